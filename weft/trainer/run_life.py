"""What surrounds a run while it lives: a watchdog, signals, other processes, its status page."""

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
    """Watches over a run while open; one that is asked to stop before or after its steps is over.

    Args:
        cfg: the trainer's config.
        listener: of the run.
        step: gives the last one that was run.

    Yields:
        What knows when to stop, and the listener that the run is to tell.
    """
    limits = (cfg.watchdog_timeout_seconds, cfg.crash_on_hang_timeout_seconds)
    with (
        Watchdog(*limits) as watchdog,
        status_page(cfg.status_port, watchdog, listener or RunListener()) as told,
        graceful_stop(watchdog.report, cfg.readiness_timeout_seconds) as stop,
    ):
        # All are here before the first collective, which would wait without a word for who is not.
        # A wish to stop is heard before the first step.
        stop.agreed("preparing the state", within_seconds=cfg.readiness_timeout_seconds)
        try:
            yield stop, told
        except StopRun as stopped:  # there is nothing to save, or it is saved
            if stopped.error is not None:
                raise stopped.error from None
            told.on_end(step(), stopped.wish.text)


def void_later_summaries(
    reporters: Iterable[Any], checkpoints_dir: str, *, step: int, state: Any
) -> None:
    """Tells summary writers that the run goes on from a step, whatever was reported of later ones.

    Args:
        reporters: the trainer and its evalers, which have a `summary_writer` each.
        checkpoints_dir: from which the state was restored.
        step: of the state.
        state: the state.
    """
    for reporter in reporters:
        reporter.summary_writer.log_checkpoint(
            checkpoints_dir, state=state, action=CheckpointerAction.RESTORE, step=step
        )
