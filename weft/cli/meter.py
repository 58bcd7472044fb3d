"""Readings of a run's steps, delayed so that no step waits for them.

Reading a loss from a device blocks until its step ends. A reading is therefore taken two steps
later, when the device has further steps queued.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.hierarchy.summary import Summary

_DELAY = 2
_WINDOW = 50
_FEWEST = 5


class Reading(NamedTuple):
    """Measurements of a step.

    Attributes:
        loss: In nats per token for a language model.
        bits_per_byte: None if the model does not report them.
        tokens_per_second: Over the last steps; None for data without tokens, or too early.
        seconds_left: Until the last step; None for an unlimited run, or too early.
    """

    step: int
    loss: float
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    examples_per_second: float | None = None


class Meter:
    """Takes readings of a run."""

    def __init__(self, max_step: float, clock: Callable[[], float] = time.perf_counter):
        self._max_step = max_step
        self._clock = clock
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._first: tuple[int, float] | None = None
        self._tokens_per_step = self._examples_per_step = 0
        self._speed: float | None = None

    def on_step(self, step: int, outputs: Mapping[str, Any], batch: Any) -> Reading | None:
        """Records a started step, and returns the reading of an earlier one, if available."""
        if isinstance(batch, Mapping) and "input_ids" in batch:
            self._tokens_per_step = int(np.prod(np.shape(batch["input_ids"])))
        elif fields := jax.tree.leaves(batch):
            self._examples_per_step = int(np.shape(fields[0])[0]) if np.shape(fields[0]) else 0
        bits = scalar(outputs.get("summaries", {}), "bits_per_byte")
        self._waiting.append((step, outputs["loss"], bits))
        return self._read() if len(self._waiting) > _DELAY else None

    def last(self) -> Reading | None:
        """Waits for the newest step and reads it; returns None if it was read already."""
        reading = None
        while self._waiting:
            # They were ready before, so the clock does not measure their duration.
            reading = self._read(timed=False)
        return reading

    def pause(self) -> None:
        """Excludes the time of other work, such as evaluation, from the speed."""
        self._recent.clear()

    def _read(self, timed: bool = True) -> Reading:
        step, loss, bits = self._waiting.popleft()
        loss, bits = float(loss), None if bits is None else float(bits)
        seconds_left = None
        if timed:
            now = self._clock()
            self._recent.append((step, now))
            self._first = self._first or (step, now)
            self._measure_speed()
            seconds_left = self._seconds_left(step, now)
        tokens, examples = self._tokens_per_step, self._examples_per_step
        per_second = None if self._speed is None else self._speed * (tokens or examples)
        return Reading(
            step,
            loss,
            bits,
            tokens_per_second=per_second if tokens else None,
            examples_per_second=per_second if examples and not tokens else None,
            seconds_left=seconds_left,
        )

    def _measure_speed(self) -> None:
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        if len(self._recent) >= _FEWEST and end > start:
            self._speed = (last - first) / (end - start)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """Estimates the remaining time, including evaluations and saves."""
        assert self._first is not None
        first, start = self._first
        if step - first < _FEWEST or math.isinf(self._max_step):
            return None
        return (now - start) / (step - first) * (self._max_step - step)


def scalar(summaries: Any, name: str) -> Any:
    """Returns the outermost summary of that name, or None.

    >>> scalar({"decoder": {"loss": 1.0}, "learner": {"x": {"loss": 2.0}}}, "loss")
    1.0
    """
    level = [summaries]
    while level:
        for values in level:
            if name in values:
                value = values[name]
                return value.value() if isinstance(value, Summary) else value
        level = [v for values in level for v in values.values() if isinstance(v, Mapping)]
    return None
