"""The hook that saves a run, which continues if the file system refuses a save.

When to save is decided by the checkpointer's policy, see `weft.trainer.checkpointer.policy`.
"""

import logging
import time
from typing import Any

from weft.errors import CheckpointSaveError
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.checkpointer import BaseCheckpointer
from weft.trainer.hooks import Hook, RunningTrainer
from weft.typing import NestedTensor

logger = logging.getLogger(__name__)


class CheckpointHook(Hook):
    """Hook that saves the state when it is due, and after the last step.

    If the file system refuses a save, for lack of space or otherwise, that is reported, training
    continues, and the next save that is due is the next attempt; the last step gets several.
    Any other error of a save ends the run.

    Args:
        logs_failures: whether to log a failed save, which no display shows.
    """

    def __init__(
        self,
        trainer: RunningTrainer,
        checkpointer: BaseCheckpointer,
        *,
        logs_failures: bool,
    ):
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._logs_failures = logs_failures
        self._evaler_summaries: dict[str, Any] = {}
        self._last_evaluation: tuple[int, dict[str, Any]] = (0, {})

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        self._evaler_summaries[name] = summaries

    def after_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        evaler_summaries = self._evaler_summaries
        self._evaler_summaries = {}
        if (
            self._trainer.step != step
        ):  # the step was bad, and the run has gone back
            return
        self._last_evaluation = step, evaler_summaries
        try:
            is_saved = self._trainer.save_checkpoint(evaler_summaries)
        except CheckpointSaveError as error:
            self._report(error)
        else:
            if is_saved:
                self._trainer.hooks.on_checkpoint(step)

    def save_last(self) -> None:
        """Saves the state after the last step, and waits for it.

        Raises CheckpointSaveError if it still fails after the pauses for errors that may pass.
        """
        failures: list[CheckpointSaveError] = []
        for seconds in (0.0, *retries.PAUSES_SECONDS):
            time.sleep(seconds)
            try:
                is_new = self._save_and_wait()
            except CheckpointSaveError as error:
                if not error.of_file_system:
                    raise
                if not failures:  # of this save or of an earlier one
                    self._report(error)
                failures.append(error)
            else:
                if is_new:
                    self._trainer.hooks.on_checkpoint(self._trainer.step)
                return
        raise failures[-1]

    def _save_and_wait(self) -> bool:
        # By the values of its evaluation, the last step may be the best one.
        step, evaler_summaries = self._last_evaluation
        if step != self._trainer.step:
            evaler_summaries = {}
        is_new = self._trainer.save_checkpoint(evaler_summaries, force=True)
        self._checkpointer.wait_until_finished()
        return is_new

    def _report(self, error: CheckpointSaveError) -> None:
        """Reports that the file system refuses a checkpoint; raises other errors."""
        if not error.of_file_system:
            raise error
        step = self._trainer.step
        if self._logs_failures:
            logger.error("%s Training continues from step %d.", error, step)
        self._trainer.hooks.on_save_failed(step, error)
