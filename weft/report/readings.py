"""Readings of the steps of a run: speed, remaining time, and the values worth showing."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from weft.hierarchy.metrics import Summary
from weft.typing import ArrayLike, NestedTensor

LOSSES = ("loss", "cross_entropy")
# The speed is that of the last steps, from the fewest that give a stable number.
_SPEED_WINDOW = 50
_FEWEST_STEPS = 5
_MAX_METRICS = 3
# Weight of a value in the moving average, relative to that of the value after it.
_DECAY = 0.9


class Reading(NamedTuple):
    """Measurements of a step.

    Attributes:
        loss: Moving average over about the last ten steps.
        metrics: Such averages of what `metrics` returns.
        summaries: As the trainer reports them, on devices.
        unit: "tokens" or "examples".
        per_second: Tokens or examples over the last steps; None if unknown or too early.
        elapsed: Seconds since the start.
        seconds_left: Until the last step; None for an unlimited run, or too early.
    """

    step: int
    loss: float
    metrics: Mapping[str, float] = {}
    summaries: Mapping[str, Any] = {}
    unit: str = "examples"
    per_second: float | None = None
    elapsed: float = 0.0
    seconds_left: float | None = None


class _TimedStep(NamedTuple):
    step: int
    time: float


class _MovingAverage:
    """Average of a value over about the last ten steps."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """Adds the value of a step, and returns the average."""
        # After a value that is not finite, the average begins again.
        if not math.isfinite(self._sum):
            self._sum = self._weight = 0.0
        self._sum = _DECAY * self._sum + value
        self._weight = _DECAY * self._weight + 1
        return self._sum / self._weight


class Meter:
    """Takes readings of a run."""

    def __init__(
        self, max_step: float, clock: Callable[[], float] = time.perf_counter
    ):
        self._max_step = max_step
        self._clock = clock
        self._start_time = clock()
        self._unread: deque[tuple[int, Mapping[str, Any]]] = deque(
            maxlen=_SPEED_WINDOW
        )
        self._timed_steps: deque[_TimedStep] = deque(maxlen=_SPEED_WINDOW)
        self._first_timed_step: _TimedStep | None = None
        self._unit = "examples"
        self._units_per_step = 0
        self._steps_per_second: float | None = None
        self._loss = _MovingAverage()
        self._metrics: dict[str, _MovingAverage] = {}
        self._newest: Reading | None = None

    def on_step(
        self, step: int, outputs: Mapping[str, Any], batch: NestedTensor
    ) -> Reading | None:
        """Records a started step, and returns the reading of the newest finished one, if new."""
        fields = jax.tree.leaves(batch)
        if isinstance(batch, Mapping) and "input_ids" in batch:
            self._unit = "tokens"
            self._units_per_step = np.size(cast(ArrayLike, batch["input_ids"]))
        elif fields:
            shape = np.shape(fields[0])
            self._units_per_step = shape[0] if shape else 0
        self._unread.append((step, outputs))
        num_finished = 0
        for _, step_outputs in self._unread:
            if not step_outputs["loss"].is_ready():
                break
            num_finished += 1
        reading = None
        for index in range(num_finished):
            # Of steps that finished since the last call, only the newest one finished now.
            reading = self._read(is_timed=index == num_finished - 1)
        return reading

    def last(self) -> Reading | None:
        """Waits for the newest step and returns its reading; None without a step."""
        while self._unread:
            self._read(is_timed=False)
        return self._newest

    def pause(self) -> None:
        """Excludes the time of other work, such as evaluation, from the speed."""
        self._timed_steps.clear()

    def _read(self, is_timed: bool) -> Reading:
        step, outputs = self._unread.popleft()
        read_time = self._clock()
        seconds_left = None
        if is_timed:
            self._update_speed(step, read_time)
            seconds_left = self._seconds_left(step, read_time)
        per_second = None
        if self._steps_per_second and self._units_per_step:
            per_second = self._steps_per_second * self._units_per_step
        summaries = outputs.get("summaries", {})
        self._newest = Reading(
            step,
            self._loss.add(float(outputs["loss"])),
            self._averaged_metrics(summaries),
            summaries,
            unit=self._unit,
            per_second=per_second,
            elapsed=read_time - self._start_time,
            seconds_left=seconds_left,
        )
        return self._newest

    def _averaged_metrics(
        self, summaries: Mapping[str, Any]
    ) -> dict[str, float]:
        averages: dict[str, float] = {}
        for name, value in metrics(summaries).items():
            average = self._metrics.setdefault(name, _MovingAverage())
            averages[name] = average.add(value)
        return averages

    def _update_speed(self, step: int, read_time: float) -> None:
        self._timed_steps.append(_TimedStep(step, read_time))
        oldest = self._timed_steps[0]
        if len(self._timed_steps) >= _FEWEST_STEPS and read_time > oldest.time:
            self._steps_per_second = (step - oldest.step) / (
                read_time - oldest.time
            )

    def _seconds_left(self, step: int, read_time: float) -> float | None:
        """Estimates the rest of the run, with its evaluations and saves."""
        if self._first_timed_step is None:
            self._first_timed_step = _TimedStep(step, read_time)
        num_steps = step - self._first_timed_step.step
        if num_steps < _FEWEST_STEPS or math.isinf(self._max_step):
            return None
        seconds_per_step = (read_time - self._first_timed_step.time) / num_steps
        return seconds_per_step * (self._max_step - step)


def scalar(summaries: Mapping[str, Any], name: str) -> ArrayLike | None:
    """Returns the outermost summary of that name, or None."""
    for level in _scalars_by_level(summaries):
        if name in level:
            return level[name]
    return None


def metrics(summaries: Mapping[str, Any]) -> dict[str, float]:
    """Returns the first metrics that a model reports at its outermost level, other than losses.

    >>> metrics({"model": {"loss": 1.5, "accuracy": 0.5}, "learner": {"learning_rate": 0.1}})
    {'accuracy': 0.5}
    """
    values: dict[str, float] = {}
    for name, value in outermost_scalars(summaries).items():
        is_loss = any(part in name for part in LOSSES)
        if not is_loss and len(values) < _MAX_METRICS:
            values[name] = float(value)
    return values


def outermost_scalars(summaries: Mapping[str, Any]) -> dict[str, ArrayLike]:
    """Returns the scalars that a model reports at its outermost level that has any."""
    for level in _scalars_by_level(summaries.get("model", summaries)):
        if level:
            return level
    return {}


def _scalars_by_level(
    summaries: Mapping[str, Any],
) -> Iterator[dict[str, ArrayLike]]:
    """Yields the scalars at each level of nested summaries; the first of a name counts."""
    mappings = [summaries]
    while mappings:
        scalars: dict[str, ArrayLike] = {}
        nested: list[Mapping[str, Any]] = []
        for mapping in mappings:
            for name, summary in mapping.items():
                if isinstance(summary, Mapping):
                    nested.append(summary)
                    continue
                value = (
                    summary.value() if isinstance(summary, Summary) else summary
                )
                if (
                    not isinstance(value, Mapping | str | complex | None)
                    and np.ndim(value) == 0
                ):
                    scalars.setdefault(name, value)
        yield scalars
        mappings = nested
