"""Throughput of a run, in its summaries.

    steps per second   between two readings, excluding evaluation and saving
    MFU                operations that the model needs, relative to the devices' peak
    input wait         seconds per step of waiting for its batch
    device idle        fraction of the time between the end of a step and the dispatch of the next,
                       over ten steps after a reading without an evaluation or a save between them
    goodput            fraction of the time since the first start of the run that went into steps
                       that were not lost, without waiting for input

MFU counts three times the operations of a forward pass (the backward pass takes two), regardless of
recomputation (Chowdhery et al., 2022, appendix B); `weft.trainer.flops` counts them. Goodput covers
all starts: work lost when a process was killed, compilation, waiting for a start, saving and
evaluation do not count as steps; `weft.trainer.goodput` keeps the account.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from weft.config import Configurable
from weft.errors import ThroughputError
from weft.hierarchy.module import Module
from weft.trainer.flops import forward_flops, peak_flops_of
from weft.trainer.goodput import TimeAccount
from weft.trainer.hooks import Hook
from weft.trainer.run_dir import read_record
from weft.typing import NestedTensor, PyTree

logger = logging.getLogger(__name__)

# Fraction of the time above which the input is reported as slow, and the seconds lost before that:
# no one has to tune the input of a run that lasts seconds.
_SLOW_INPUT = 0.1
_SLOW_SECONDS = 1.0
# Steps in a sample of the time between them.
_IDLE_STEPS = 10


class IdleTime:
    """Fraction of the time that devices wait for the host between two steps, in a sample of them.

    A thread waits for each step of the sample, so that the time of its end is known without holding
    up the next one. It waits in C++, and not at all between samples.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._starts: list[float] = []
        self._ends: list[Future[float]] = []
        self._waiter: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        """Returns whether a sample is being taken."""
        return self._waiter is not None and len(self._ends) <= _IDLE_STEPS

    def start(self) -> None:
        """Starts a sample of the next steps."""
        self.discard()
        self._waiter = ThreadPoolExecutor(1, "weft-idle-time")

    def discard(self) -> None:
        """Ends the sample without a result."""
        if self._waiter is not None:
            self._waiter.shutdown(wait=False)
        self._starts = []
        self._ends = []
        self._waiter = None

    def restart(self) -> None:
        """Starts the sample again, if one is taken: an evaluation or a save is not a step."""
        if self._waiter is not None:
            self.start()

    def on_dispatch(self) -> None:
        """Records the start of a step."""
        self._starts.append(self._clock())

    def on_dispatched(self, output: PyTree) -> None:
        """Records the end of a step when it has computed `output`."""
        assert self._waiter is not None
        self._ends.append(self._waiter.submit(self._wait_for, output))

    def _wait_for(self, output: PyTree) -> float:
        jax.block_until_ready(output)
        return self._clock()

    def fraction(self) -> float | None:
        """Ends a complete sample, and returns its fraction of idle time; None without one."""
        if len(self._ends) <= _IDLE_STEPS:
            return None
        starts = self._starts
        ends = [end.result() for end in self._ends]
        self.discard()
        idle_seconds = 0.0
        for end, next_start in zip(ends, starts[1:], strict=False):
            idle_seconds += max(
                0.0, next_start - end
            )  # negative if the step was dispatched ahead
        total_seconds = ends[-1] - starts[0]
        if total_seconds <= 0:
            return None
        return idle_seconds / total_seconds


class _Reading(NamedTuple):
    """Steps since the last reading, and their duration."""

    steps: int
    seconds: float


class Throughput(Configurable, Hook):
    """Hook that measures a run's steps, and adds the results to their summaries.

    It reads a monotonic clock and the time of day, in seconds.
    """

    class Config(Configurable.Config):
        """Configures a Throughput."""

        every_n_steps: int = 100
        """Number of steps between two readings. A reading waits for its step; in between, steps are
        dispatched ahead."""
        tokens_field: str = "input_ids"
        """The field of a batch whose elements are counted as tokens, if present."""
        peak_flops_per_device: float | None = None
        """For the MFU; None for `peak_flops_of` the device kind, if known."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(config)
        if config.every_n_steps < 1:
            raise ThroughputError(
                f"throughput.every_n_steps={config.every_n_steps}; expected 1 or more steps."
            )
        self._every_n_steps = config.every_n_steps
        self._clock = clock
        self.account = TimeAccount(now)
        self.idle = IdleTime(clock)
        self._trainer: Any = None  # that of the run, from its start on
        self._directory: str | None = None
        self._last_reading: tuple[int, float] | None = None  # its step and time
        self._paused_seconds = 0.0
        self._pause_began: float | None = None
        self._start_time = 0.0
        self._counted_wait = 0.0  # of the input, in the account
        # Up to this time, the account has everything but steps.
        self._last_event_time = 0.0
        self._settled_time = 0.0  # when a step was last known to have ended
        self._flops: float | None = None  # of a step, once counted
        self._last_wait: tuple[int, float] = (
            0,
            0.0,
        )  # last report's step and total seconds
        self._slow_seconds = 0.0  # total of readings with a slow input
        self._has_warned = False

    # In a run.

    def on_start(self, trainer: Any, resumed_from: int | None) -> None:
        self._trainer = trainer
        self.start(trainer.config.dir, trainer.step, trainer.last_sign_of_life)

    def on_rewind(self, step: int) -> None:
        self._count_until_now("lost")
        self._start_time = self._last_event_time - self._paused_seconds
        self._last_reading = None
        self.idle.discard()
        self.account.rewind(read_record(self._trainer.config.dir), step)

    def before_step(self, step: int) -> None:
        if self.idle:
            self.idle.on_dispatch()

    def on_dispatch(self, step: int, outputs: dict[str, Any]) -> None:
        if self.idle:
            self.idle.on_dispatched(outputs["loss"])

    def on_summaries(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        self._settled_time = self._clock()
        if not self.is_due(step):
            return
        trainer = self._trainer
        outputs["summaries"]["throughput"] = self.measure(
            step,
            outputs["loss"],
            batch,
            model=trainer.model,
            params=trainer.trainer_state.model,
            input_wait_seconds=trainer.input_wait_seconds,
        )

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        self.idle.restart()
        self._count_until_now("evaluation")

    def on_checkpoint(self, step: int) -> None:
        if self._trainer is not None:
            self.mark(step, self._trainer.trainer_state)

    def on_end(self, step: int, reason: str) -> None:
        # The last save, for which the run has waited.
        self._finish("checkpoints")

    def close(self) -> None:
        self.idle.discard()
        self._finish("lost")  # by an error, else it was done

    def _finish(self, kind: str) -> None:
        if self._directory is None:
            return
        self._count_until_now(kind)
        self._write()
        self._directory = None

    # The measurement.

    def start(
        self,
        directory: str,
        step: int,
        last_sign_of_life: float | None = None,
    ) -> None:
        """Starts or resumes measuring after a step.

        `last_sign_of_life` is the time of that of the start before, if it was killed.
        """
        self._directory = directory
        self._last_reading = None
        self._counted_wait = 0.0
        self._last_event_time = self._clock()
        self._start_time = self._last_event_time - self._paused_seconds
        self.idle.discard()
        self.account.start(read_record(directory), step, last_sign_of_life)
        self._write()

    def is_due(self, step: int) -> bool:
        """Returns whether to call `measure`, which waits for the step; for the first step, too."""
        return self._last_reading is None or step % self._every_n_steps == 0

    def measure(
        self,
        step: int,
        outputs: PyTree,
        batch: NestedTensor,
        *,
        model: Module,
        params: NestedTensor,
        input_wait_seconds: float = 0.0,
    ) -> dict[str, float]:
        """Records a dispatched step; returns values to report by name, none if it is not due.

        `outputs` are arrays that the step computes; `model` is the module whose
        `forward(input_batch)` it differentiates; `input_wait_seconds` is the time that the run has
        waited for batches so far.
        """
        if not self.is_due(step):
            return {}
        jax.block_until_ready(outputs)
        idle_fraction = self.idle.fraction()
        if not self.idle:
            self.idle.start()
        # A pause counts as its beginning.
        clock_time = self._pause_began
        if clock_time is None:
            clock_time = self._clock()
        reading = self._read(step, clock_time, input_wait_seconds)
        last_step, last_wait_seconds = self._last_wait
        self._last_wait = (step, input_wait_seconds)
        if reading is None or reading.seconds <= 0:
            return {}
        steps_per_second = reading.steps / reading.seconds
        # More steps than in the reading, if a save has read the clock since.
        waiting_steps = step - last_step
        wait_per_step = (input_wait_seconds - last_wait_seconds) / waiting_steps
        self._warn_if_slow(
            step, waiting_steps, wait_per_step, wait_per_step * steps_per_second
        )
        rows = jax.tree.leaves(batch)[0].shape[0]
        summaries = {
            "steps_per_second": steps_per_second,
            "examples_per_second": steps_per_second * rows,
            "input_wait_seconds": wait_per_step,
            "goodput": self.account.goodput,
        }
        if isinstance(batch, Mapping) and self.config.tokens_field in batch:
            tokens = jax.tree.leaves(batch[self.config.tokens_field])[0].size
            summaries["tokens_per_second"] = steps_per_second * tokens
        if idle_fraction is not None:
            summaries["device_idle"] = idle_fraction
        utilization = self._utilization(steps_per_second, batch, model, params)
        if utilization is not None:
            summaries["mfu"] = utilization
        return summaries

    def _warn_if_slow(
        self,
        step: int,
        num_steps: int,
        wait_per_step: float,
        waiting_fraction: float,
    ) -> None:
        if waiting_fraction > _SLOW_INPUT:
            self._slow_seconds += num_steps * wait_per_step
        if self._slow_seconds >= _SLOW_SECONDS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Up to step %d each step waited %.3g s for its input, %.0f %% of the time: the "
                "input is slower than the model. Reduce its work per batch, or read with more "
                "workers.",
                step,
                wait_per_step,
                100 * min(waiting_fraction, 1.0),
            )

    def _read(
        self, step: int, clock_time: float, input_wait_seconds: float
    ) -> _Reading | None:
        """Reads the steps up to a time; returns None at the first one, which is compiled."""
        step_time = clock_time - self._paused_seconds
        last_reading = self._last_reading
        self._last_reading = (step, step_time)
        self._last_event_time = max(self._last_event_time, clock_time)
        waited = input_wait_seconds - self._counted_wait
        self._counted_wait = input_wait_seconds
        if last_reading is None:
            seconds = step_time - self._start_time
            self.account.add("input", min(waited, seconds))
            self.account.add("compilation", seconds - waited)
            return None
        last_step, last_time = last_reading
        seconds = step_time - last_time
        self.account.add("input", min(waited, seconds))
        self.account.add("steps", seconds - waited)
        return _Reading(step - last_step, seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time while open from that of steps."""
        self._pause_began = self._last_event_time = self._clock()
        try:
            yield
        finally:
            self._count_until_now("checkpoints")
            self._paused_seconds += self._clock() - self._pause_began
            self._pause_began = None

    def _count_until_now(self, kind: str) -> None:
        """Counts the time since the last step, evaluation or pause."""
        clock_time = self._clock()
        seconds = clock_time - self._last_event_time
        self.account.add(kind, seconds)
        self._last_event_time = clock_time
        if self._pause_began is None:
            self._paused_seconds += seconds

    def mark(self, step: int, outputs: PyTree) -> None:
        """Records in the run's directory the time of the steps up to a saved one."""
        jax.block_until_ready(outputs)
        self.idle.restart()
        wait_seconds = self._counted_wait
        if self._trainer is not None:
            wait_seconds = self._trainer.input_wait_seconds
        # The last save of a run is in no pause.
        end_of_step = self._pause_began
        if end_of_step is None:
            end_of_step = max(self._last_event_time, self._settled_time)
        self._read(step, end_of_step, wait_seconds)
        if self._pause_began is None:
            self._count_until_now("checkpoints")
        self._write(step)

    def _write(self, saved_step: int | None = None) -> None:
        if jax.process_index() == 0 and self._directory is not None:
            self.account.write(self._directory, saved_step)

    def _utilization(
        self,
        steps_per_second: float,
        batch: NestedTensor,
        model: Module,
        params: NestedTensor,
    ) -> float | None:
        peak_flops = self.config.peak_flops_per_device
        if not peak_flops:
            peak_flops = peak_flops_of(jax.devices()[0].device_kind)
        if peak_flops is None:
            return None
        if self._flops is None:
            self._flops = 3 * forward_flops(model, params, batch)
        num_devices = len(jax.tree.leaves(params)[0].sharding.device_set)
        return self._flops * steps_per_second / (peak_flops * num_devices)
