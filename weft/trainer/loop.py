"""The loop of a run.

    step n      dispatched; the devices work on it
    step n - 1  judged, its summaries written, while step n runs
    step n      evaluated and saved, if it is due

The host is one step ahead of what it knows: it dispatches a step before it has judged the one
before. What a bad step and the one after it do to the state is up to the judge: the compiled step
of an anomaly policy keeps the state of before in both cases, so that the second one is repeated.
"""

import contextlib
import enum
from collections import deque
from collections.abc import Callable, Iterator

import jax

from weft.debug.anomalies import Judge, Step
from weft.distributed import cpu_threads, preemption
from weft.distributed.peers import StopRequest
from weft.input import PrefetchingIterator
from weft.trainer.base import BaseTrainer
from weft.trainer.hooks import Hooks
from weft.typing import NestedTensor


class _Outcome(enum.Enum):
    """Outcome of the last step."""

    KEPT = enum.auto()
    SKIPPED = enum.auto()
    REWOUND = enum.auto()


class TrainingLoop:
    """The steps of one run.

    Args:
        between_steps: context manager of what is done between two steps.
        stop: decides when to stop before the last step.
        restore: restores the last checkpoint, or the state before the first step.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        hooks: Hooks,
        judge: Judge,
        batches: PrefetchingIterator,
        between_steps: Callable[[], contextlib.AbstractContextManager[None]],
        stop: preemption.GracefulStop,
        restore: Callable[[], object],
    ):
        self._trainer = trainer
        self._hooks = hooks
        self._judge = judge
        self._batches = batches
        self._between_steps = between_steps
        self._stop = stop
        self._restore = restore
        self._max_step = trainer.config.max_step
        self._first_step = cpu_threads.FirstStepWatch()
        self._is_compiled = False
        # Whether the processes have met since the start, or since they went back.
        self._has_met = False
        self._last_losses: deque[jax.Array] = deque(maxlen=2)
        self._unsettled: Step | None = None  # the last step, until it is judged
        self.last_step: Step | None = None

    def run(self) -> preemption.StopRun | None:
        """Runs the remaining steps; returns the request that has ended the run early, if any.

        It comes from a signal, the end of the data, or a hook's `EndRun`.
        """
        try:
            for step in self._steps():
                self._stop.doing(
                    f"evaluating or saving after step {step.number}"
                )
                with self._between_steps():
                    self._hooks.after_step(
                        step.number, step.outputs, step.batch
                    )
        except preemption.StopRun as stopped:
            self._settle()
            return stopped
        except Exception:
            self._write_last_summaries()
            raise
        finally:
            self._first_step.close()
        if self._hooks.end is not None:  # at the last step
            return preemption.StopRun(self._hooks.end.as_request())
        return None

    def _steps(self) -> Iterator[Step]:
        """Yields each step when it is dispatched and the one before is settled."""
        while not self._is_complete():
            number = self._trainer.step + 1
            request = None
            if self._hooks.end is not None:
                request = self._hooks.end.as_request()
            if not self._has_met:
                self._meet(number, request)
            batch = self._next_batch(number, request)
            step = self._dispatch(number, batch)
            if self._settle() is not _Outcome.KEPT:
                # The step before was bad, so that this one has changed nothing.
                step = self._dispatch(self._trainer.step + 1, batch)
            self._unsettled = self.last_step = step
            if not self._judge.counts_late:
                self._hooks.on_step(step.number, step.outputs, step.batch)
            yield step

    def _is_complete(self) -> bool:
        if self._trainer.step < self._max_step:
            return False
        self._settle()  # which may take the run back
        return self._trainer.step >= self._max_step

    def _next_batch(
        self, number: int, request: StopRequest | None
    ) -> NestedTensor:
        """Returns the batch of a step; raises StopRun if the run ends before it."""
        self._stop.doing(f"waiting for the input of step {number}")
        if len(self._last_losses) == 2:
            self._stop.wait_until_computed(self._last_losses[0])
        return self._stop.next_batch(
            self._batches, f"running step {number}", request
        )

    def _meet(self, number: int, request: StopRequest | None) -> None:
        """Waits until all processes have their first batches and have compiled the step."""
        self._stop.doing(f"waiting for the input of step {number}")
        within_seconds = None
        if not self._is_compiled:
            within_seconds = self._trainer.config.readiness_timeout_seconds
        meeting = self._stop.meet_with_batch(
            self._batches,
            f"running step {number}",
            own_request=request,
            within_seconds=within_seconds,
            num_batches=self._stop.num_batches,
        )
        with meeting as batch:
            if not self._is_compiled:
                self._stop.doing("compiling the step")
                state = self._trainer.trainer_state
                traced = self._trainer.trace_train_step(state, batch)
                self._stop.compile(traced.lower())
                self._is_compiled = True
                self._first_step.start()
        self._has_met = True

    def _dispatch(self, number: int, batch: NestedTensor) -> Step:
        self._hooks.before_step(number)
        outputs = self._trainer.advance(batch)
        verdict = outputs.pop("verdict", None)
        self._last_losses.append(outputs["loss"])
        self._hooks.on_dispatch(number, outputs)
        if not self._first_step.is_dispatched:
            self._first_step.dispatched(outputs["loss"])
        return Step(number, outputs, batch, verdict)

    # After a step.

    def settle(self) -> bool:
        """Judges the last step; returns whether the state is still that after it."""
        return self._settle() is not _Outcome.REWOUND

    def _settle(self) -> _Outcome:
        """Judges and reports the last step, if that was not done yet."""
        step = self._unsettled
        self._unsettled = None
        if step is None:
            return _Outcome.KEPT
        self._stop.wait_until_computed(step.outputs["loss"])
        outcome = _Outcome.KEPT
        if self._judge.is_bad(step):
            outcome = _Outcome.SKIPPED
            self._trainer.go_back_to(step.number)
            if self._judge.must_rewind(step, self._trainer.trainer_state):
                self._rewind()
                return _Outcome.REWOUND
        if self._judge.counts_late:
            self._hooks.on_step(step.number, step.outputs, step.batch)
        self._hooks.on_summaries(step.number, step.outputs, step.batch)
        return outcome

    def _rewind(self) -> None:
        """Returns to the last checkpoint, or to the start, but not in the data."""
        position = self._batches.get_state()
        self._trainer.checkpointer.wait_until_finished()
        self._restore()
        self._batches.set_state(position)
        self._has_met = False  # the next batches are read again
        self._hooks.on_rewind(self._trainer.step)

    def _write_last_summaries(self) -> None:
        step = self._unsettled
        self._unsettled = None
        if step is not None:
            with contextlib.suppress(Exception):  # the first error counts
                self._hooks.on_summaries(step.number, step.outputs, step.batch)
