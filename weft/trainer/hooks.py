"""Hooks: what a run does at its steps, besides training.

    on_start
    repeat
        before_step          the batch is there
        on_dispatch          the devices work on the step
        on_summaries         of the step before, which is judged by now
        on_step
        after_step           the state is that after the step: evaluations and checkpoints
            on_eval, on_checkpoint, on_save_failed
    on_end
    close

The devices are always given the next step before the host waits for the last one: what reads values
of a step belongs into `on_summaries`. Before an evaluation, a save and the end, the loop calls it
for the last step, so that nothing is evaluated or saved that was not judged.

With an anomaly policy, the loop also calls `on_step` only for a step that it has judged. A step
that is undone by a rewind has no `on_step`; one that was skipped has.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weft.distributed.peers import StopRequest
from weft.errors import CheckpointSaveError, HookError
from weft.typing import NestedTensor

if TYPE_CHECKING:
    from weft.trainer.train_step import TrainerState

EARLY_STOPPING = "early stopping"
INPUT_ENDED = "input ended"
MAX_STEP = "max_step"
_COMPLETE = (MAX_STEP, INPUT_ENDED, EARLY_STOPPING)
_OF_HOOK = "a hook: "


def has_ended(reason: str) -> bool:
    """Returns whether a run with this `on_end` reason is complete, rather than asked to stop.

    >>> has_ended("max_step"), has_ended("a hook: accuracy reached"), has_ended("SIGTERM")
    (True, True, False)
    """
    return reason in _COMPLETE or reason.startswith(_OF_HOOK)


class EndRun(NamedTuple):
    """Request of a hook to end the run early, after the step under way.

    The run is complete then: its last step is saved, and evaluations at the end are run. If the
    hooks of several processes do not agree, one request ends the run in all of them.

    >>> EndRun("accuracy reached").full_reason
    'a hook: accuracy reached'
    """

    reason: str

    @property
    def full_reason(self) -> str:
        """The reason that `Hook.on_end` receives."""
        is_known = self.reason in _COMPLETE
        return self.reason if is_known else f"{_OF_HOOK}{self.reason}"

    def as_request(self) -> StopRequest:
        """Returns the request to all processes of the run."""
        return StopRequest("end", self.full_reason)


class RunningTrainer(Protocol):
    """Trainer as its hooks see it."""

    @property
    def config(self) -> Any: ...

    @property
    def step(self) -> int: ...

    @property
    def trainer_state(self) -> "TrainerState": ...

    @property
    def trainer_state_specs(self) -> "TrainerState": ...

    @property
    def hooks(self) -> "Hooks":
        """The hooks of the run, for one that evaluates by itself: it calls their `on_eval`."""
        ...

    @property
    def input_wait_seconds(self) -> float:
        """Time that the run has waited for batches."""
        ...

    def path(self) -> str: ...

    def model_params_for_eval(self) -> NestedTensor: ...

    def save_checkpoint(
        self, evaler_summaries: dict[str, Any] | None, *, force: bool = False
    ) -> bool: ...

    def settle(self) -> bool:
        """Judges the last step; returns whether the state is still that after it."""
        ...


class Hook:
    """Hook of a run. Its methods do nothing; a subclass defines those that it needs.

    A hook may end the run: it returns an `EndRun` from `on_start`, `on_step`, `after_step`,
    `on_summaries` or `on_eval`. An error that a hook raises ends the run, and has a note that names
    the hook. With several processes, each has hooks of its own and calls them at the same steps.

    A hook with `get_state` and `set_state` is saved with checkpoints. Its state is a JSON value or
    bytes; it is restored before `on_start`.

    Values in `outputs` and `summaries` are arrays on devices; reading one waits for its step.

    >>> class Target(Hook):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...
    ...     def on_summaries(self, step, outputs, batch):
    ...         if float(outputs["loss"]) <= self.loss:
    ...             return EndRun(f"loss {self.loss} reached")
    >>> Target(0.5).on_summaries(7, {"loss": jnp.array(0.25)}, {}).full_reason
    'a hook: loss 0.5 reached'
    """

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> EndRun | None:
        """Handles the start, with the state restored or new.

        `trainer` gives the config, and at any time the step and the state. `resumed_from` is the
        step of the restored checkpoint, or None.
        """

    def before_step(self, step: int) -> None:
        """Handles a step that is about to be dispatched; it counts from 1."""

    def on_dispatch(self, step: int, outputs: dict[str, Any]) -> None:
        """Handles a step right after its dispatch, also of one that is repeated: for timing."""

    def on_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> EndRun | None:
        """Handles a dispatched step; `outputs` has "loss", "aux" and "summaries".

        With an anomaly policy it is called while the next step runs.
        """

    def after_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> EndRun | None:
        """Handles the state after a step, which the trainer has now; for work between two steps.

        Its time does not count as that of steps. The step may still run.
        """

    def on_summaries(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> EndRun | None:
        """Handles a step while the next one runs: reading its values does not hold up the devices.

        Entries that are added to `outputs["summaries"]` are written with those of the step.
        """

    def on_eval(
        self, name: str, step: int, summaries: dict[str, Any]
    ) -> EndRun | None:
        """Handles the summaries of an evaler."""

    def on_checkpoint(self, step: int) -> None:
        """Handles a state that was passed to the checkpointer."""

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        """Handles a save that failed for lack of disk space; training continues.

        `step` is the run's last; the error names the step, the cause and existing checkpoints.
        """

    def on_rewind(self, step: int) -> None:
        """Handles the return to the state of an earlier step, after a bad one."""

    def on_end(self, step: int, reason: str) -> None:
        """Handles the end of the run, even if it was asked to stop before `on_start`.

        The reason is "max_step", "input ended", "early stopping", "a hook: …", or the name of the
        signal that asked to stop; see `has_ended`. It is not called if an error ends the run.
        """

    def close(self) -> None:
        """Releases what the hook holds, however the run has ended."""


RunListener = Hook
"""Name of `Hook` in version 0.2."""

_EVENTS = tuple(name for name in vars(Hook) if not name.startswith("_"))


def check_hook(hook: object, where: str) -> Hook:
    """Returns the hook; raises HookError, which says where it is, for another object."""
    has_event = any(
        hasattr(hook, event) for event in _EVENTS if event != "close"
    )
    if isinstance(hook, type) or not has_event:
        kind = f"a {type(hook).__name__}"
        if isinstance(hook, type):
            kind = f"the class {hook.__name__}"
        raise HookError(
            f"{where} is {kind}, which is not a hook. Pass an object of a subclass of "
            "weft.trainer.Hook, whose methods are called at the steps of a run; see there."
        )
    return hook  # pyright: ignore[reportReturnType]


def as_hooks(listener: Hook | Sequence[Hook] | None, where: str) -> list[Hook]:
    """Returns the hooks that a caller passes as one, several or None."""
    if listener is None:
        return []
    hooks = listener if isinstance(listener, Sequence) else [listener]
    return [check_hook(hook, where) for hook in hooks if hook is not None]


class Hooks(Hook):
    """Hook that passes each event on to several, in order.

    An error that a hook raises gets a note with its name.

    Attributes:
        end: the first request to end the run.
    """

    def __init__(self, hooks_by_name: Mapping[str, Hook]):
        self.end: EndRun | None = None
        self._hooks_by_name = hooks_by_name
        self._closers = self._handlers_of("close")
        for event in _EVENTS:
            if event != "close":
                # Bound here, so that an event takes one call, and one more for each hook.
                setattr(
                    self,
                    event,
                    functools.partial(self._pass_on, self._handlers_of(event)),
                )

    def _handlers_of(self, event: str) -> list["_Handler"]:
        """Returns the methods that define an event; a hook without one costs nothing per step."""
        handlers = []
        for name, hook in self._hooks_by_name.items():
            # An object with some of the methods is a hook too.
            method = getattr(hook, event, None)
            is_defined = (
                getattr(method, "__func__", method) is not vars(Hook)[event]
            )
            if method is not None and is_defined:
                handlers.append((name, method))
        return handlers

    def _pass_on(self, handlers: list["_Handler"], *args: Any) -> None:
        for name, method in handlers:
            try:
                end = method(*args)
            except Exception as error:
                error.add_note(
                    f"It was raised by `{method.__name__}` of the hook {name}."
                )
                raise
            if isinstance(end, EndRun) and self.end is None:
                self.end = end

    def close(self) -> None:
        """Closes all hooks, also if closing one fails."""
        with contextlib.ExitStack() as stack:
            for _, method in reversed(self._closers):
                stack.callback(method)


_Handler = tuple[str, Callable[..., EndRun | None]]
