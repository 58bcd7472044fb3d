"""Summaries of a training or evaluation step, and how numbers merge across batches and devices.

Modules pass them to `add_summary`. As pytrees they are outputs of the compiled step; on the host, a
summary writer renders each `value()`. An evaler first merges those of all batches by `accumulate`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from weft import errors, struct
from weft.config import Configurable
from weft.typing import NestedTensor, PyTree, Tensor


class Summary(struct.PyTreeNode):
    """Base of summaries. A subclass defines `value`."""

    def value(self) -> NestedTensor | int | float | complex | str | None:
        """Returns the value to show, None for nothing."""
        raise NotImplementedError(type(self))

    def accumulate(self, other: Self) -> Self:
        """Returns a summary of this and a later one; by default, keeps the first."""
        return self

    def validate(self) -> None:
        """Checks shapes and dtypes; called by `add_summary`, possibly on tracers.

        Raises SummaryValueError if a writer could not show the value.
        """


class _ValueSummary(Summary):
    """Base of summaries that show their only array or number."""

    _value: Tensor | float

    def value(self) -> Tensor | float:
        return self._value


class ImageSummary(_ValueSummary):
    """Images; an evaler keeps those of the first batch.

    Args:
        _value: `[batch, height, width, channels]` or one image `[height, width, channels]`, with
            1, 3 or 4 channels; uint8, or floats between 0 and 1.

    >>> ImageSummary(np.zeros((2, 8, 8, 3))).validate()
    """

    _value: Tensor

    def validate(self) -> None:
        shape, dtype = self._value.shape, self._value.dtype
        if len(shape) not in (3, 4) or shape[-1] not in (1, 3, 4):
            raise errors.SummaryValueError(
                f"ImageSummary got an array of shape {tuple(shape)}; expected [batch, height, "
                "width, channels] or [height, width, channels] with 1, 3 or 4 channels. Write "
                "`x[..., None]` for gray images without a channel axis."
            )
        if dtype != jnp.uint8 and not jnp.issubdtype(dtype, jnp.floating):
            raise errors.SummaryValueError(
                f"ImageSummary got an array of {dtype}; expected uint8, or floats between 0 and 1. "
                "Write `x.astype('uint8')`."
            )


class AudioSummary(_ValueSummary):
    """Audio; an evaler keeps that of the first batch.

    Args:
        _value: `[batch, time, channels]` or one clip `[time, channels]`; floats between -1 and 1.
        sample_rate: in Hz.

    >>> AudioSummary(np.zeros((1, 16000, 1)), sample_rate=16000).validate()
    """

    _value: Tensor
    sample_rate: int = struct.field(pytree_node=False)

    def validate(self) -> None:
        shape, dtype = self._value.shape, self._value.dtype
        if len(shape) not in (2, 3) or not jnp.issubdtype(dtype, jnp.floating):
            raise errors.SummaryValueError(
                f"AudioSummary got an array of shape {tuple(shape)} and {dtype}; expected floats "
                "between -1 and 1, [batch, time, channels] or [time, channels]. Write "
                "`x[..., None]` for a mono signal without a channel axis."
            )


class ArraySummary(_ValueSummary):
    """A small array whose numbers are all kept, such as a score for each class.

    Other arrays are shown as histograms. An evaler keeps that of the first batch.

    >>> ArraySummary(np.array([0.5, 1.0])).value().tolist()
    [0.5, 1.0]
    """

    _value: Tensor


class CallbackSummary(Summary):
    """Value that is computed on the host when a writer shows it.

    Args:
        fn: called as `fn(*args, **kwargs)` with host arrays. It is static in the compiled step, so
            pass a named function; a new lambda per call triggers recompilation.

    >>> CallbackSummary("{:.1f} %".format, args=(12.34,)).value()
    '12.3 %'
    """

    fn: Callable[..., Any] = struct.field(pytree_node=False)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = struct.field(default_factory=dict)

    def value(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


class MetricSummary(Summary):
    """Base of numeric summaries."""


class WeightedValue(MetricSummary):
    """A mean and its weight, such as a number of examples; merging keeps the first batch's."""

    mean: Tensor | float
    weight: Tensor | float

    def value(self) -> Tensor | float:
        return self.mean

    def validate(self) -> None:
        """Checks that the weight is not negative and has the shape of the mean, or none."""
        mean, weight = np.shape(self.mean), np.shape(self.weight)
        if weight not in ((), mean):
            raise errors.SummaryValueError(
                f"{type(self).__name__} has a mean of shape {mean} and a weight of shape {weight}; "
                "expected the same shape, or a single weight."
            )
        if not isinstance(self.weight, jax.core.Tracer) and np.any(
            np.asarray(self.weight) < 0
        ):
            raise errors.SummaryValueError(
                f"{type(self).__name__} has the weight {self.weight}; expected at least 0."
            )


class WeightedSummary(WeightedValue):
    """Weighted mean; merging two returns the mean over both.

    >>> total = WeightedSummary(1.0, 1.0).accumulate(WeightedSummary(4.0, 2.0))
    >>> float(total.mean), float(total.weight)
    (3.0, 3.0)
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(
            *_merge_means(self.mean, self.weight, other.mean, other.weight)
        )

    def __add__(self, other: Self) -> Self:
        return self.accumulate(other)


@jax.jit
def _merge_means(*means_and_weights: Tensor | float) -> tuple[Tensor, Tensor]:
    mean_a, weight_a, mean_b, weight_b = map(jnp.asarray, means_and_weights)
    # The mean of no examples is 0, and one that is NaN does not count.
    total_a = jnp.where(weight_a > 0, mean_a, 0) * weight_a
    total_b = jnp.where(weight_b > 0, mean_b, 0) * weight_b
    weight = weight_a + weight_b
    mean = (total_a + total_b) / jnp.maximum(weight, 1e-30)
    return jnp.where(weight > 0, mean, 0), weight


class _ReducerSummary(_ValueSummary, MetricSummary):
    """A number or array that is reduced element by element over batches."""


class MaxSummary(_ReducerSummary):
    """Maximum over all batches.

    >>> MaxSummary(1.0).accumulate(MaxSummary(4.0)).value().item()
    4.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.maximum(self._value, other.value()))


class MinSummary(_ReducerSummary):
    """Minimum over all batches.

    >>> MinSummary(1.0).accumulate(MinSummary(4.0)).value().item()
    1.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(jnp.minimum(self._value, other.value()))


class SumSummary(_ReducerSummary):
    """Sum over all batches.

    >>> SumSummary(1.0).accumulate(SumSummary(4.0)).value()
    5.0
    """

    def accumulate(self, other: Self) -> Self:
        return type(self)(self._value + other.value())


class WeightedScalar(WeightedSummary):
    """Mean with its weight, such as a number of examples; a sum is the mean over both.

    >>> total = WeightedScalar(1.0, 1.0) + WeightedScalar(4.0, 2.0)
    >>> float(total.mean), float(total.weight)
    (3.0, 3.0)
    """

    def validate(self) -> None:
        """Checks also that the mean is a single number."""
        super().validate()
        if np.ndim(self.mean):
            raise errors.SummaryValueError(
                f"{type(self).__name__} has a mean of shape {np.shape(self.mean)}; expected a "
                "single number. Write `WeightedSummary` for arrays."
            )


class LossOfRows(WeightedScalar):
    """Loss that was given without a weight; its weight is the number of rows.

    With gradient accumulation, that is a guess: the loss may be a mean over something else.
    """


class Perplexity(WeightedScalar):
    """Exponential of a mean; two add up to the exponential of the mean over both.

    >>> total = Perplexity(4.0, 1.0) + Perplexity(1.0, 1.0)
    >>> float(total.mean), float(total.weight)
    (2.0, 2.0)
    """

    def accumulate(self, other: Self) -> Self:
        total = WeightedScalar(jnp.log(self.mean), self.weight)
        total += WeightedScalar(jnp.log(other.mean), other.weight)
        return type(self)(jnp.exp(total.mean), total.weight)


def bits_per_byte(
    per_target_loss: Float[Array, "batch time"],
    target_num_bytes: Int[Array, " batch"],
) -> WeightedScalar:
    """Returns bits per byte of text, whose weight is the number of bytes.

    Args:
        per_target_loss: Cross entropies in nats, 0 where a target does not count.
        target_num_bytes: Bytes of the targets of each example, as Weft's inputs count them. With a
            negative one, which means unknown, the result is NaN, also if others are added to it.

    >>> metric = bits_per_byte(jnp.full((1, 4), jnp.log(2.0)), jnp.array([8]))
    >>> float(metric.mean), float(metric.weight)
    (0.5, 8.0)
    """
    is_known = jnp.all(target_num_bytes >= 0)
    bits = jnp.where(is_known, jnp.sum(per_target_loss) / math.log(2), jnp.nan)
    num_bytes = jnp.where(is_known, jnp.sum(target_num_bytes), 1).astype(
        jnp.float32
    )
    return WeightedScalar(bits / jnp.maximum(1, num_bytes), num_bytes)


class MetricAccumulator(Configurable):
    """Accumulates summaries over batches.

    Each `Summary` merges with its own `accumulate`. Plain numbers are averaged over the batches;
    for any other value, the first is kept.

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

        Raises OutputConflictError if a name is a dict in one batch and a value in another.
        """
        self._total = _accumulate(
            self._total, _as_weighted(model_outputs), path=""
        )

    def summaries(self) -> dict[str, Any]:
        """Returns the accumulated summaries, nested like those of one batch."""
        return _as_numbers(self._total)


class _UnweightedMean(WeightedScalar):
    """Mean of numbers that were reported without a weight."""


def _as_weighted(value: PyTree) -> PyTree:
    if isinstance(value, Mapping):
        return {name: _as_weighted(child) for name, child in value.items()}
    if value is None or isinstance(value, Summary | str) or np.ndim(value):
        return value
    return _UnweightedMean(value, 1.0)


def _as_numbers(value: PyTree) -> PyTree:
    if isinstance(value, Mapping):
        return {name: _as_numbers(child) for name, child in value.items()}
    if isinstance(value, _UnweightedMean):
        return value.mean
    return value


def _accumulate(total: PyTree, summaries: PyTree, path: str) -> PyTree:
    if isinstance(total, Mapping) != isinstance(summaries, Mapping):
        raise errors.OutputConflictError(
            f"the summary {path!r} is a dict in one batch and a value in another; rename one "
            "of them."
        )
    if isinstance(total, Mapping):
        totals = dict(total)
        for name, value in summaries.items():
            if name in total:
                child_path = f"{path}/{name}" if path else name
                value = _accumulate(total[name], value, child_path)
            totals[name] = value
        return totals
    if isinstance(total, Summary):
        return total.accumulate(summaries)
    return total
