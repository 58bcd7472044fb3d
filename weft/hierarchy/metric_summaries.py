"""Numeric summaries and how they merge across batches."""

from typing import Self

import jax.numpy as jnp

from weft.hierarchy.summary import Summary
from weft.typing import Tensor


class MetricSummary(Summary):
    """Base of numeric summaries."""


class WeightedValue(MetricSummary):
    """A mean and its weight, such as a number of examples; merging keeps the first batch's."""

    mean: Tensor | float
    weight: Tensor | float

    def value(self) -> Tensor | float:
        return self.mean


class WeightedSummary(WeightedValue):
    """Weighted mean; merging two returns the mean over both.

    Example:
        >>> total = WeightedSummary(1.0, 1.0).accumulate(WeightedSummary(4.0, 2.0))
        >>> float(total.mean), float(total.weight)
        (3.0, 3.0)
    """

    def accumulate(self, other: Self) -> Self:
        weight = self.weight + other.weight
        total = self.mean * self.weight + other.mean * other.weight
        # The mean of no examples is 0, not NaN.
        mean = jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), 0)
        return type(self)(mean, weight)


class _ReducerSummary(MetricSummary):
    """A number or array that is reduced element by element over batches."""

    _value: Tensor | float

    def value(self) -> Tensor | float:
        return self._value


class MaxSummary(_ReducerSummary):
    """Maximum over all batches.

    Example:
        >>> MaxSummary(1.0).accumulate(MaxSummary(4.0)).value().item()
        4.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.maximum(self._value, other._value))


class MinSummary(_ReducerSummary):
    """Minimum over all batches.

    Example:
        >>> MinSummary(1.0).accumulate(MinSummary(4.0)).value().item()
        1.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.minimum(self._value, other._value))


class SumSummary(_ReducerSummary):
    """Sum over all batches.

    Example:
        >>> SumSummary(1.0).accumulate(SumSummary(4.0)).value()
        5.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(self._value + other._value)
