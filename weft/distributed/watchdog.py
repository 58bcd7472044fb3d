"""Signals that stop a process, and a watchdog that prints all threads' stacks when a step hangs.

SIGQUIT prints them at once: `kill -QUIT`, or Ctrl-Backslash on a terminal. An unread pipe, such as
that of a frozen launcher, blocks its writers, and `faulthandler` blocks all threads when it writes
there; so a process prints from threads of their own, and does not wait for them.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

_PRINT_SECONDS = 1.0
OTHER_STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a process unless they are handled: of a closed terminal, and of schedulers that
announce the end of a job.
"""


def call_with_timeout(
    call: Callable[..., object], *args: object, **kwargs: object
) -> None:
    """Runs a call that may block, such as `logger.error`, and continues after at most a second.

    While the interpreter shuts down, Python starts no threads from 3.12 on; then it is left out.
    """
    thread = threading.Thread(
        target=call, args=args, kwargs=kwargs, daemon=True
    )
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(_PRINT_SECONDS)


def print_error(text: str) -> None:
    """Prints to the process's own standard error, even if `sys.stderr` is replaced."""
    file = sys.__stderr__ or sys.stderr
    if file is not None:
        call_with_timeout(print, text, file=file, flush=True)


def dump_stacks() -> str:
    """Returns the stacks as `faulthandler` shows them, with the caller's as the current one."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def handle_stop_signals(
    handler: Callable[[signal.Signals], None],
) -> Iterator[frozenset[int]]:
    """Handles SIGTERM and Ctrl-C, and `OTHER_STOP_SIGNALS` that would end the process.

    Yields the numbers of those that it handles. A signal that is ignored, as SIGHUP under `nohup`,
    or that the program handles itself, stays as it is. Only the main thread can handle signals; in
    other threads, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield frozenset()
        return

    def on_signal(number: int, frame: types.FrameType | None) -> None:
        handler(signal.Signals(number))

    numbers = [signal.SIGTERM, signal.SIGINT]
    for number in OTHER_STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            numbers.append(number)
    previous_handlers = {
        number: signal.signal(number, on_signal) for number in numbers
    }
    try:
        yield frozenset(numbers)
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


@contextlib.contextmanager
def notice_signals(notice: Callable[[int], None]) -> Iterator[None]:
    """Calls a function with the number of each signal, in a second thread and at once.

    Python runs the handlers of signals in the main thread, which may be in C++ for long. Signals
    that have no handler are not noticed. If the program has a wakeup descriptor of its own, as an
    event loop of asyncio may have, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)

    def listen() -> None:
        for numbers in iter(lambda: receiver.recv(64), b""):
            for number in numbers:
                notice(number)

    listener = threading.Thread(target=listen, name="weft-signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        if previous == -1:
            signal.set_wakeup_fd(-1)
        sender.close()
        listener.join()
        receiver.close()


class Interrupts:
    """Context that remembers Ctrl-C, for code that is imported may swallow a KeyboardInterrupt.

    Attributes:
        came: whether Ctrl-C has come in the present context.

    >>> with interrupts:
    ...     with contextlib.suppress(KeyboardInterrupt):
    ...         signal.raise_signal(signal.SIGINT)
    ...     interrupts.came
    True
    """

    def __init__(self) -> None:
        self.came = False
        self._is_handled = False

    def __enter__(self) -> "Interrupts":
        self.came = False
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT)
        self._is_handled = is_main and handler is signal.default_int_handler
        if self._is_handled:
            signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A run that the program starts afterwards is not interrupted.
        self.came = False
        if self._is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_interrupt(self, number: int, frame: types.FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


interrupts = Interrupts()
"""Those of this process, while a command of Weft runs and no run handles them."""


class Watchdog:
    """Context manager that prints all threads' stacks after a time without reports, and at SIGQUIT.

    Args:
        timeout_seconds: time without a report until the stacks are printed, repeatedly; or None.
        crash_after_seconds: time after which SIGABRT ends the process; None for never.

    Attributes:
        doing: activity of the run at the last report.
        waits_for_others: whether other processes hold this one up; then it does not hang by itself.

    >>> with Watchdog(timeout_seconds=60.0) as watchdog:
    ...     watchdog.report("step 1")
    """

    def __init__(
        self,
        timeout_seconds: float | None = None,
        crash_after_seconds: float | None = None,
    ):
        self._timeout = timeout_seconds
        self._crash_after = crash_after_seconds
        self._stopped = threading.Event()
        self.waits_for_others: Callable[[], bool] = lambda: False
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
        stderr = sys.__stderr__ or sys.stderr
        if (
            stderr is not None
        ):  # else the process was started without, as by `2>&-`
            faulthandler.register(signal.SIGQUIT, file=stderr, all_threads=True)
        if self._timeout is not None or self._crash_after is not None:
            self._thread = threading.Thread(
                target=self._watch, name="weft-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        faulthandler.unregister(signal.SIGQUIT)
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        limits = [
            seconds
            for seconds in (self._timeout, self._crash_after)
            if seconds is not None
        ]
        printed_at = 0.0
        while not self._stopped.wait(min(limits) / 4):
            if self.waits_for_others():
                self._last = time.monotonic()
            silent_seconds = self.silent_seconds
            seconds_since_print = time.monotonic() - printed_at
            # Printed again after each further timeout, as long as the step hangs.
            if (
                self._timeout is not None
                and min(silent_seconds, seconds_since_print) > self._timeout
            ):
                printed_at = time.monotonic()
                self._print_stacks(silent_seconds)
            if (
                self._crash_after is not None
                and silent_seconds > self._crash_after
            ):
                self._print_stacks(silent_seconds)
                os.kill(os.getpid(), signal.SIGABRT)
                return

    def _print_stacks(self, silent_seconds: float) -> None:
        message = "No progress for %.0f s while %s. The stacks of all threads:"
        call_with_timeout(logger.error, message, silent_seconds, self.doing)
        print_error(dump_stacks())
