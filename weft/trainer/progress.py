"""What a run tells to whoever watches it."""

from typing import TYPE_CHECKING, Any

from weft.errors import CheckpointSaveError

EARLY_STOPPING = "early stopping"
INPUT_ENDED = "input ended"
MAX_STEP = "max_step"

if TYPE_CHECKING:
    from weft.trainer.trainer import SpmdTrainer


def has_ended(reason: str) -> bool:
    """Whether a run that is over for this reason was at its end, not only asked to stop.

    Args:
        reason: As `RunListener.on_end` gets it.

    >>> has_ended("max_step"), has_ended("SIGTERM")
    (True, False)
    """
    return reason in (MAX_STEP, INPUT_ENDED, EARLY_STOPPING)


class RunListener:
    """Is told what a trainer does; by itself it does nothing. Subclass it for displays and reports.

    Values in `outputs` and `summaries` are arrays on devices: to read one waits for the step that
      computes it.
    """

    def on_start(self, trainer: "SpmdTrainer", resumed_from: int | None) -> None:
        """The state is ready.

        Args:
            trainer: about to run its first step.
            resumed_from: the step of the checkpoint that was restored, or None for a new run.
        """

    def on_step(self, step: int, outputs: dict[str, Any], batch: Any) -> None:
        """A training step was started.

        Args:
            step: counts from 1.
            outputs: "loss" and "summaries" of the step.
            batch: the input of the step.
        """

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        """An evaler ran."""

    def on_checkpoint(self, step: int) -> None:
        """The state after a step was handed to the checkpointer."""

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        """A save has failed for lack of room, and training goes on.

        Args:
            step: the last one that was run; the error names the one that could not be saved.
            error: says why, and which checkpoints stand.
        """

    def on_end(self, step: int, reason: str) -> None:
        """The run is over, also one that was asked to stop before `on_start`.

        Args:
            step: the last one that was run.
            reason: "max_step", "input ended", "early stopping", or the name of the signal that
                asked to stop; see `has_ended`.
        """
