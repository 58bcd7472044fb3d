"""Progress of a run: listeners for its events, and the reasons why it ends."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.errors import CheckpointSaveError
from weft.typing import NestedTensor

if TYPE_CHECKING:
    from weft.trainer.train_step import TrainerState


EARLY_STOPPING = "early stopping"
INPUT_ENDED = "input ended"
MAX_STEP = "max_step"


def has_ended(reason: str) -> bool:
    """Returns whether a run with this `on_end` reason is complete, rather than asked to stop.

    >>> has_ended("max_step"), has_ended("SIGTERM")
    (True, False)
    """
    return reason in (MAX_STEP, INPUT_ENDED, EARLY_STOPPING)


class RunningTrainer(Protocol):
    """Trainer as its listeners see it."""

    @property
    def config(self) -> Any: ...

    @property
    def step(self) -> int: ...

    @property
    def trainer_state(self) -> "TrainerState": ...

    @property
    def trainer_state_specs(self) -> "TrainerState": ...

    def path(self) -> str: ...


class RunListener:
    """Listener for a trainer's progress that does nothing. Subclass it for displays and reports.

    Values in `outputs` and `summaries` are arrays on devices; reading one waits for its step.
    """

    def on_start(self, trainer: RunningTrainer, resumed_from: int | None) -> None:
        """Handles the start; `resumed_from` is the step of a restored checkpoint, or None."""

    def on_step(self, step: int, outputs: dict[str, Any], batch: NestedTensor) -> None:
        """Handles a dispatched step; `step` counts from 1, `outputs` has "loss" and "summaries"."""

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        """Handles the summaries of an evaler."""

    def on_checkpoint(self, step: int) -> None:
        """Handles a state that was passed to the checkpointer."""

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        """Handles a save that failed for lack of disk space; training continues.

        `step` is the run's last; the error names the step, the cause and existing checkpoints.
        """

    def on_end(self, step: int, reason: str) -> None:
        """Handles the end of the run, even if it was asked to stop before `on_start`.

        The reason is "max_step", "input ended", "early stopping", or the name of the signal that
        asked to stop; see `has_ended`.
        """


class RunListeners(RunListener):
    """Listener that passes each event on to several, in order."""

    def __init__(self, listeners: Sequence[RunListener]):
        self._listeners = listeners


def _passed_on(event: str) -> Callable[..., None]:
    def to_all(self: RunListeners, *args: Any, **kwargs: Any) -> None:
        for listener in self._listeners:
            getattr(listener, event)(*args, **kwargs)

    return to_all


for _event in [name for name in vars(RunListener) if name.startswith("on_")]:
    setattr(RunListeners, _event, _passed_on(_event))
