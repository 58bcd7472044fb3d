"""Summaries of numbers: how those of several batches become one."""

from typing import Self

import jax.numpy as jnp

from weft.hierarchy.summary import Summary
from weft.typing import Tensor


class MetricSummary(Summary):
    """Base of the summaries of numbers."""


class WeightedValue(MetricSummary):
    """A mean with the weight it stands for. By itself it stays that of the first batch.

    Attributes:
        mean: the mean.
        weight: how much it counts, such as the number of examples.
    """

    mean: Tensor | float
    weight: Tensor | float

    def value(self) -> Tensor | float:
        return self.mean


class WeightedSummary(WeightedValue):
    """A weighted mean; two become the mean over both.

    Example:
        >>> total = WeightedSummary(1.0, 1.0).accumulate(WeightedSummary(4.0, 2.0))
        >>> float(total.mean), float(total.weight)
        (3.0, 3.0)
    """

    def accumulate(self, other: Self) -> Self:
        weight = self.weight + other.weight
        total = self.mean * self.weight + other.mean * other.weight
        # Nothing weighs nothing: the mean of no examples is 0, not NaN.
        mean = jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), 0)
        return type(self)(mean, weight)


class _ReducerSummary(MetricSummary):
    """A number, or an array, that is reduced element by element over batches."""

    _value: Tensor | float

    def value(self) -> Tensor | float:
        return self._value


class MaxSummary(_ReducerSummary):
    """The largest of all batches.

    Example:
        >>> MaxSummary(1.0).accumulate(MaxSummary(4.0)).value().item()
        4.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.maximum(self._value, other._value))


class MinSummary(_ReducerSummary):
    """The smallest of all batches.

    Example:
        >>> MinSummary(1.0).accumulate(MinSummary(4.0)).value().item()
        1.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.minimum(self._value, other._value))


class SumSummary(_ReducerSummary):
    """The sum over all batches.

    Example:
        >>> SumSummary(1.0).accumulate(SumSummary(4.0)).value()
        5.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(self._value + other._value)
