r"""Watchdog that prints the stacks of all threads when a step hangs.

SIGQUIT prints them at once: `kill -QUIT`, or Ctrl-\ on a terminal.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from weft.trainer.stacks import beside, print_error, stacks_of_all_threads

logger = logging.getLogger(__name__)


class Watchdog:
    """Context manager that prints all threads' stacks after a time without reports, and at SIGQUIT.

    Args:
        timeout_seconds: time without a report before the stacks are printed, repeatedly; None for
            never.
        crash_after_seconds: time after which SIGABRT ends the process; None for never.

    Attributes:
        doing: activity of the run at the last report.

    Example:
        >>> with Watchdog(timeout_seconds=60.0) as watchdog:
        ...     watchdog.report("step 1")
    """

    def __init__(
        self, timeout_seconds: float | None = None, crash_after_seconds: float | None = None
    ):
        self._timeout = timeout_seconds
        self._crash_after = crash_after_seconds
        self._stopped = threading.Event()
        self._last = time.monotonic()
        self.doing = "starting"
        self._thread: threading.Thread | None = None

    def report(self, doing: str) -> None:
        """Reports that the run is alive, and its next activity."""
        self._last, self.doing = time.monotonic(), doing

    @property
    def silent_seconds(self) -> float:
        """Time since the last report."""
        return time.monotonic() - self._last

    def __enter__(self) -> "Watchdog":
        self._last = time.monotonic()
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGQUIT, file=_stderr(), all_threads=True)
        if self._timeout is not None or self._crash_after is not None:
            self._thread = threading.Thread(target=self._watch, name="weft-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGQUIT)
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        limits = [t for t in (self._timeout, self._crash_after) if t is not None]
        printed_at = 0.0
        while not self._stopped.wait(min(limits) / 4):
            silent = time.monotonic() - self._last
            due = time.monotonic() - printed_at
            if self._timeout is not None and min(silent, due) > self._timeout:
                printed_at = time.monotonic()
                self._print_stacks(silent)
            if self._crash_after is not None and silent > self._crash_after:
                self._print_stacks(silent)
                os.kill(os.getpid(), signal.SIGABRT)
                return

    def _print_stacks(self, silent: float) -> None:
        said = "No progress for %.0f s while %s. The stacks of all threads:"
        beside(logger.error, said, silent, self.doing)
        print_error(stacks_of_all_threads())


def _stderr() -> Any:
    """Returns the process's own standard error, even if `sys.stderr` is replaced."""
    return sys.__stderr__ or sys.stderr
