"""Metrics that accumulate over batches, devices and iterations."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from weft.config import Configurable
from weft.errors import OutputConflictError
from weft.hierarchy.metric_summaries import (
    MaxSummary,
    MetricSummary,
    MinSummary,
    SumSummary,
    WeightedSummary,
    WeightedValue,
)
from weft.hierarchy.summary import Summary

__all__ = [
    "MaxSummary",
    "MetricAccumulator",
    "MetricSummary",
    "MinSummary",
    "SumSummary",
    "WeightedScalar",
    "WeightedSummary",
    "WeightedValue",
]


class WeightedScalar(WeightedSummary):
    """Mean with its weight, such as a number of examples; a sum is the mean over both.

    Example:
        >>> total = WeightedScalar(1.0, 1.0) + WeightedScalar(4.0, 2.0)
        >>> float(total.mean), float(total.weight)
        (3.0, 3.0)
    """

    def __add__(self, other: Self) -> Self:
        return self.accumulate(other)


class MetricAccumulator(Configurable):
    """Accumulates summaries over batches.

    Each `Summary` merges with its own `accumulate`. Plain numbers are averaged over the batches;
    for any other value, the first is kept.

    Example:
        >>> accumulator = MetricAccumulator.default_config().instantiate()
        >>> accumulator.update({"loss": WeightedScalar(1.0, 1.0), "scale": 2.0})
        >>> accumulator.update({"loss": WeightedScalar(4.0, 2.0), "scale": 4.0})
        >>> summaries = accumulator.summaries()
        >>> float(summaries["loss"].mean), float(summaries["scale"])
        (3.0, 3.0)
    """

    def __init__(self, config: Configurable.Config):
        super().__init__(config)
        self._total: dict[str, Any] = {}

    def update(self, model_outputs: Mapping[str, Any]) -> None:
        """Adds the summaries of one more batch, in nested dicts as an invocation collects them.

        Raises:
            OutputConflictError: if a name is a dict in one batch and a value in another.
        """
        self._total = _accumulate(self._total, _weighted(model_outputs), path="")

    def summaries(self) -> dict[str, Any]:
        """Returns the accumulated summaries, nested like those of one batch."""
        return _unweighted(self._total)


class _PlainMean(WeightedScalar):
    """Mean of numbers that were reported without a weight."""


def _weighted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _weighted(child) for name, child in value.items()}
    if value is None or isinstance(value, Summary | str) or np.ndim(value):
        return value
    return _PlainMean(value, 1.0)


def _unweighted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _unweighted(child) for name, child in value.items()}
    return value.mean if isinstance(value, _PlainMean) else value


def _accumulate(total: Any, new: Any, path: str) -> Any:
    if isinstance(total, Mapping) != isinstance(new, Mapping):
        raise OutputConflictError(
            f"the summary {path!r} is a dict in one batch and a value in another; rename one "
            "of them."
        )
    if isinstance(total, Mapping):
        merged = dict(total)
        for name, value in new.items():
            below = f"{path}/{name}" if path else name
            merged[name] = _accumulate(total[name], value, below) if name in total else value
        return merged
    return total.accumulate(new) if isinstance(total, Summary) else total
