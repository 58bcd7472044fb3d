"""Speed of a run in its summaries: steps, examples and tokens per second, MFU and goodput.

    steps per second   between two readings, excluding evaluation and saving
    MFU                operations that the model needs, relative to the devices' peak
    input wait         seconds per step of waiting for its batch
    goodput            fraction of the time since the first start of the run that went into steps
                       that were not lost

MFU counts three times the operations of a forward pass (the backward pass takes two), regardless of
recomputation (Chowdhery et al., 2022, appendix B). Goodput covers all starts: work lost when a
process was killed, compilation, waiting for a start, saving and evaluation do not count as steps.
"""

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from weft.config import Configurable, config_class
from weft.errors import ThroughputError
from weft.hierarchy.module import functional
from weft.trainer.flops import count_flops
from weft.trainer.run_record import read_record, update_record

# Dense bfloat16 FLOP/s per device, by JAX's device kind, from the makers' data sheets. The longest
# name contained in a device kind applies.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "V100": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
_RECORD = "goodput"
# Fraction of the time above which the input is reported as slow.
_SLOW_INPUT = 0.1

logger = logging.getLogger(__name__)
_KEPT_MARKS = 200


def peak_flops_of(device_kind: str) -> float | None:
    """Returns the peak operations per second of a `jax.Device.device_kind`; None for unknown ones.

    >>> peak_flops_of("NVIDIA H100 80GB HBM3"), peak_flops_of("cpu")
    (989000000000000.0, None)
    """
    names = [name for name in PEAK_FLOPS if name in device_kind]
    return PEAK_FLOPS[max(names, key=len)] if names else None


class Throughput(Configurable):
    """Measurement of a run's steps, with a monotonic clock and the time of day, in seconds."""

    @config_class
    class Config(Configurable.Config):
        """Configures a Throughput.

        Attributes:
            every_n_steps: Number of steps between two readings. A reading waits for its step; in
                between, steps are dispatched ahead.
            tokens_field: The field of a batch whose elements are counted as tokens, if present.
            peak_flops_per_device: For the MFU; None for `peak_flops_of` the device kind, without
                MFU for unknown kinds.
        """

        every_n_steps: int = 100
        tokens_field: str = "input_ids"
        peak_flops_per_device: float | None = None

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
        self._clock, self._now = clock, now
        self._start: tuple[int, float] | None = None  # step and time to count from
        self._paused = 0.0  # total seconds
        self._pause_began: float | None = None
        self._productive = 0.0  # seconds of steps since the first start of the run
        self._flops: float | None = None  # of a step, once counted
        self._waited: tuple[int, float] = (0, 0.0)  # last report's step and total seconds
        self._said_slow = False

    def start(self, directory: str, step: int) -> None:
        """Starts or resumes measuring after a step."""
        self._directory, self._start = directory, None
        record = read_record(directory)
        starts = record.get("starts", [])
        self._first_start = (
            datetime.datetime.fromisoformat(starts[0]["time"]).timestamp()
            if starts
            else self._now()
        )
        marks = [mark for mark in record.get(_RECORD, []) if mark["step"] <= step]
        self._productive = marks[-1]["productive_seconds"] if marks else 0.0

    def on_step(
        self,
        step: int,
        outputs: Any,
        batch: Any,
        *,
        model: Any,
        params: Any,
        input_wait_seconds: float = 0.0,
    ) -> dict[str, float]:
        """Records a dispatched step; returns values to report by name, mostly none.

        Args:
            outputs: Arrays that the step computes.
            model: The module whose `forward(input_batch)` the step differentiates.
            input_wait_seconds: Total time that the run has waited for batches so far.
        """
        first = self._start is None
        if not first and step % self.config.every_n_steps:
            return {}
        jax.block_until_ready(outputs)
        before, (steps, seconds) = self._start, self._read(step)
        waited, self._waited = self._waited, (step, input_wait_seconds)
        if before is None or seconds <= 0:
            return {}
        per_second = steps / seconds
        wait = (input_wait_seconds - waited[1]) / (step - waited[0])
        self._say_if_slow(step, wait, wait * per_second)
        summaries = {
            "steps_per_second": per_second,
            "examples_per_second": per_second * jax.tree.leaves(batch)[0].shape[0],
            "input_wait_seconds": wait,
            "goodput": min(1.0, self._productive / max(self._now() - self._first_start, 1e-9)),
        }
        if isinstance(batch, Mapping) and self.config.tokens_field in batch:
            tokens = int(np.prod(np.shape(batch[self.config.tokens_field])))
            summaries["tokens_per_second"] = per_second * tokens
        utilization = self._utilization(per_second, batch, model, params)
        if utilization is not None:
            summaries["mfu"] = utilization
        return summaries

    def _say_if_slow(self, step: int, wait: float, share: float) -> None:
        if share > _SLOW_INPUT and not self._said_slow:
            self._said_slow = True
            logger.warning(
                "Up to step %d each step waited %.3g s for its input, %.0f %% of the time: the "
                "input is slower than the model. Reduce its work per batch, or read with more "
                "workers.",
                step,
                wait,
                100 * min(share, 1.0),
            )

    def _read(self, step: int) -> tuple[int, float]:
        """Returns the number of steps since the last reading, and their duration in seconds."""
        now = self._active_seconds()
        before, self._start = self._start, (step, now)
        if before is None:  # the first step, which includes compilation
            return 0, 0.0
        seconds = now - before[1]
        self._productive += seconds
        return step - before[0], seconds

    def _active_seconds(self) -> float:
        """Returns the time without pauses."""
        now = self._clock() if self._pause_began is None else self._pause_began
        return now - self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time while open from that of steps."""
        self._pause_began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - self._pause_began
            self._pause_began = None

    def on_checkpoint(self, step: int, outputs: Any) -> None:
        """Records in the run's directory the time of the steps up to a saved one."""
        jax.block_until_ready(outputs)
        self._read(step)
        if jax.process_index():
            return
        marks = read_record(self._directory).get(_RECORD, [])
        marks = [mark for mark in marks if mark["step"] < step][-_KEPT_MARKS:]
        marks.append({"step": step, "productive_seconds": round(self._productive, 3)})
        with contextlib.suppress(OSError):  # a full disk does not end training
            update_record(self._directory, **{_RECORD: marks})

    def _utilization(self, per_second: float, batch: Any, model: Any, params: Any) -> float | None:
        peak = self.config.peak_flops_per_device or peak_flops_of(jax.devices()[0].device_kind)
        if peak is None:
            return None
        if self._flops is None:
            self._flops = 3 * _forward_flops(model, params, batch)
        devices = len(jax.tree.leaves(params)[0].sharding.device_set)
        return self._flops * per_second / (peak * devices)


def _forward_flops(model: Any, params: Any, batch: Any) -> int:
    """Counts the operations of a forward pass over a global batch, without running it."""

    def forward(params: Any, batch: Any) -> Any:
        (loss, _), _ = functional(
            model,
            prng_key=jax.random.key(0),
            state=params,
            inputs={"input_batch": batch},
            is_training=True,
        )
        return loss

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    return count_flops(forward, *shapes).total()
