"""What a run tells to whoever watches it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.trainer.trainer import SpmdTrainer


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

    def on_end(self, step: int, reason: str) -> None:
        """The run is over.

        Args:
            step: the last one that was run.
            reason: "max_step", "input ended", or the name of the signal that asked to stop.
        """
