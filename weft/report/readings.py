"""Readings of the steps of a run: speed, remaining time, and the values worth showing."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.hierarchy.metrics import Summary

_WINDOW = 50
_FEWEST = 5
_MOST_METRICS = 3
# Of an earlier loss in the moving average that is shown, relative to the one after it.
_DECAY = 0.9


class Reading(NamedTuple):
    """Measurements of a step.

    Attributes:
        loss: Moving average over about the last ten steps.
        summaries: As the trainer reports them, on devices.
        unit: "tokens" or "examples".
        per_second: Tokens or examples over the last steps; None if unknown or too early.
        elapsed: Seconds since the start.
        seconds_left: Until the last step; None for an unlimited run, or too early.
    """

    step: int
    loss: float
    summaries: Mapping[str, Any] = {}
    unit: str = "examples"
    per_second: float | None = None
    elapsed: float = 0.0
    seconds_left: float | None = None


class Meter:
    """Takes readings of a run."""

    def __init__(self, max_step: float, clock: Callable[[], float] = time.perf_counter):
        self._max_step = max_step
        self._clock = clock
        self._start = clock()
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_WINDOW)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._first: tuple[int, float] | None = None
        self._unit, self._per_step = "examples", 0
        self._speed: float | None = None
        self._losses, self._weight = 0.0, 0.0
        self._newest: Reading | None = None

    def on_step(self, step: int, outputs: Mapping[str, Any], batch: Any) -> Reading | None:
        """Records a started step, and returns the reading of the newest finished one, if new."""
        if isinstance(batch, Mapping) and "input_ids" in batch:
            self._unit, self._per_step = "tokens", math.prod(np.shape(batch["input_ids"]))
        elif fields := jax.tree.leaves(batch):
            self._per_step = next(iter(np.shape(fields[0])), 0)
        self._waiting.append((step, outputs))
        reading = None
        ready = sum(
            1 for _ in itertools.takewhile(lambda x: x[1]["loss"].is_ready(), self._waiting)
        )
        for left in reversed(range(ready)):
            # Steps that are read at once do not tell how long one takes.
            reading = self._read(timed=not left)
        return reading

    def last(self) -> Reading | None:
        """Waits for the newest step and returns its reading; None without a step."""
        while self._waiting:
            self._read(timed=False)
        return self._newest

    def pause(self) -> None:
        """Excludes the time of other work, such as evaluation, from the speed."""
        self._recent.clear()

    def _read(self, timed: bool = True) -> Reading:
        step, outputs = self._waiting.popleft()
        loss = float(outputs["loss"])
        if not math.isfinite(self._losses):
            self._losses, self._weight = 0.0, 0.0
        self._losses = _DECAY * self._losses + loss
        self._weight = _DECAY * self._weight + 1
        seconds_left, now = None, self._clock()
        if timed:
            self._recent.append((step, now))
            self._first = self._first or (step, now)
            (first, start), (last, end) = self._recent[0], self._recent[-1]
            if len(self._recent) >= _FEWEST and end > start:
                self._speed = (last - first) / (end - start)
            # Estimated, including evaluations and saves.
            if step - self._first[0] >= _FEWEST and not math.isinf(self._max_step):
                seconds_per_step = (now - self._first[1]) / (step - self._first[0])
                seconds_left = seconds_per_step * (self._max_step - step)
        self._newest = Reading(
            step,
            self._losses / self._weight,
            outputs.get("summaries", {}),
            unit=self._unit,
            per_second=self._speed * self._per_step if self._speed and self._per_step else None,
            elapsed=now - self._start,
            seconds_left=seconds_left,
        )
        return self._newest


def scalar(summaries: Mapping[str, Any], name: str) -> Any:
    """Returns the outermost summary of that name, or None."""
    return next((level[name] for level in _scalars(summaries) if name in level), None)


def metrics(summaries: Mapping[str, Any]) -> dict[str, float]:
    """Returns the first metrics that a model reports at its outermost level, other than losses.

    >>> metrics({"model": {"loss": 1.5, "accuracy": 0.5}, "learner": {"learning_rate": 0.1}})
    {'accuracy': 0.5}
    """
    outermost = outermost_scalars(summaries)
    names = [name for name in outermost if not any(part in name for part in LOSSES)]
    return {name: float(outermost[name]) for name in names[:_MOST_METRICS]}


def outermost_scalars(summaries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars that a model reports at its outermost level that has any."""
    levels = _scalars(summaries.get("model", summaries))
    return next((level for level in levels if level), {})


LOSSES = ("loss", "cross_entropy")


def _scalars(summaries: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields the scalars at each level of nested summaries; the first of a name counts."""
    level = [summaries]
    while level:
        found: dict[str, Any] = {}
        for name, value in (item for values in level for item in values.items()):
            shown = value.value() if isinstance(value, Summary) else value
            if not isinstance(shown, Mapping | str | None) and np.ndim(shown) == 0:
                found.setdefault(name, shown)
        yield found
        level = [v for values in level for v in values.values() if isinstance(v, Mapping)]
