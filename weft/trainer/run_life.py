"""Context managers active during a run: watchdog, signals, other processes, status page."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weft.trainer.interruption import GracefulStop, StopRun, graceful_stop
from weft.trainer.progress import RunListener
from weft.trainer.status_page import status_page
from weft.trainer.summary_writer import CheckpointerAction
from weft.trainer.watchdog import Watchdog


@contextlib.contextmanager
def run_life(
    cfg: Any, listener: RunListener | None, step: Callable[[], int] = lambda: 0
) -> Iterator[tuple[GracefulStop, RunListener]]:
    """Supervises a run while open; ends quietly if asked to stop before or after its steps.

    Yields the object that decides when to stop, and the listener for the run. `step` returns the
    run's last step.
    """
    limits = (cfg.watchdog_timeout_seconds, cfg.crash_on_hang_timeout_seconds)
    with (
        Watchdog(*limits) as watchdog,
        status_page(cfg.status_port, watchdog, listener or RunListener()) as told,
        graceful_stop(watchdog.report, cfg.readiness_timeout_seconds) as stop,
    ):
        # Wait for all processes before the first collective, which would block without a message.
        # A request to stop is handled before the first step.
        stop.agreed("preparing the state", within_seconds=cfg.readiness_timeout_seconds)
        try:
            yield stop, told
        except StopRun as stopped:  # nothing to save, or already saved
            if stopped.error is not None:
                raise stopped.error from None
            told.on_end(step(), stopped.wish.text)


def void_later_summaries(
    reporters: Iterable[Any], checkpoints_dir: str, *, step: int, state: Any
) -> None:
    """Discards summaries that were reported for steps after a restored one.

    Args:
        reporters: the trainer and its evalers, with a `summary_writer` each.
        checkpoints_dir: the directory that the state was restored from.
    """
    for reporter in reporters:
        reporter.summary_writer.log_checkpoint(
            checkpoints_dir, state=state, action=CheckpointerAction.RESTORE, step=step
        )
