"""Means and variances along axes, optionally masked.

Mean and mean square come from one reduction over the stacked pair `(x, x²)`. XLA's CPU backend
fuses it into its neighbors, but recomputes the input of two separate reductions layer after layer,
which multiplies compile time and program size of deep residual stacks.

The difference of mean square and squared mean loses precision if the mean is large compared with
the deviations, so the first element is subtracted beforehand, as a constant, which changes neither
the variance nor its gradient. If the first element is an outlier, use `fast=False`, which averages
squared deviations in a second pass.

Values that do not count may be NaN or infinite: they are replaced before they are used, see
`arrays.counted`.

`deviations` uses `lax` rather than `jnp` because it traces in half the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from weft.functional.arrays import counted, explicit_spec

Axes = int | Sequence[int]


class Deviations(NamedTuple):
    """`x` less its mean, and what the mean is the sum of.

    Attributes:
        deviation: `x - mean`.
        mean_parts: two numbers whose sum is the mean: the first element, and the mean of what
            remains. Their sum is rounded to the dtype, which the deviation is not.
        variance: the mean of `|deviation|²`.
    """

    deviation: Array
    mean_parts: tuple[Array, Array]
    variance: Array


def moments(
    x: Float[Array, "*shape"],
    *,
    axis: Axes = -1,
    where: Bool[Array, "*shape"] | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    fast: bool = True,
    dtype: jax.typing.DTypeLike | None = jnp.float32,
) -> tuple[Float[Array, "*reduced"], Float[Array, "*reduced"]]:
    """Returns mean and variance along `axis`, which stays with size 1.

    Args:
        where: values that count, broadcastable to `x`; by default all. Without any, moments are 0.
        axis_index_groups: groups of indices of that axis to combine, as in `jax.lax.psum`.
        fast: whether mean and variance come from one reduction.
        dtype: of the computation and the result; None for the dtype of `x`.

    >>> mean, variance = moments(jnp.array([[1.0, 3.0]]))
    >>> mean.tolist(), variance.tolist()
    ([[2.0]], [[1.0]])
    """
    x = counted(cast(x, dtype), where)
    axes = canonical_axes(axis, x.ndim)
    _, (first, mean), variance = deviations(x, axes, where, fast=fast)
    mean = lax.add(first, mean)
    if axis_name is None:
        return mean, variance
    # Chan, Golub and LeVeque (1979): the variance within the parts plus that between their means.
    combine = cross_axis_mean(x, axes, where, axis_name, axis_index_groups)
    overall = combine(mean)
    return overall, combine(variance + abs_square(mean - overall))


def segment_mean(
    x: Float[Array, "batch time *rest"],
    *,
    segment_ids: Int[Array, "batch time"],
    axis: Axes,
    where: Bool[Array, "batch time *rest"] | None = None,
) -> Float[Array, "batch time *reduced"]:
    """Returns the mean along `axis`, separately for each segment of axis 1.

    Args:
        segment_ids: the segment of each position; ids in `[0, time]`.
        axis: the axes to reduce, including axis 1, which keeps its size: each position has its
            segment's mean. The others stay with size 1.
        where: values that count; all by default. A segment without any has mean 0.

    >>> segment_mean(jnp.arange(4.0)[None], segment_ids=jnp.array([[1, 1, 2, 2]]), axis=1).tolist()
    [[0.5, 0.5, 2.5, 2.5]]
    """
    other_axes = tuple(a for a in canonical_axes(axis, x.ndim) if a != 1)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else None
    x = x.astype(statistics_dtype(x))
    counts = jnp.ones(x.shape, x.dtype)
    if where is not None:
        counts = counts * where
        x = counted(x, where)
    num_segments = x.shape[1] + 1

    @jax.vmap
    def segment_sums(values: Array, ids: Array) -> Array:
        """Returns at each position of an example the sum of its segment."""
        return jax.ops.segment_sum(values, ids, num_segments)[ids]

    totals = segment_sums(jnp.sum(x, other_axes, keepdims=True), segment_ids)
    counts = segment_sums(
        jnp.sum(counts, other_axes, keepdims=True), segment_ids
    )
    return cast(totals / jnp.maximum(counts, 1), dtype)


def compute_mean_square_with_segment_ids(
    x: Float[Array, "batch time *rest"],
    *,
    segment_ids: Int[Array, "batch time"],
    reduction_axis: Axes,
) -> Float[Array, "batch time *reduced"]:
    """Returns the mean of `x²` by segment; arguments and result as in `segment_mean`."""
    return segment_mean(
        jnp.square(x), segment_ids=segment_ids, axis=reduction_axis
    )


def update_running_average(
    average: Float[Array, "*shape"],
    value: Float[Array, "*shape"],
    *,
    decay: float | Float[Array, ""],
) -> Float[Array, "*shape"]:
    """Returns `decay * average + (1 - decay) * value`, in the dtype of the average.

    If only the value is complex, the result is complex too.

    >>> update_running_average(jnp.array(1.0), jnp.array(2.0), decay=0.75).item()
    1.25
    """
    updated = decay * average + (1 - decay) * value
    if jnp.iscomplexobj(value):
        return updated
    return updated.astype(average.dtype)


def deviations(
    x: Array,
    axes: tuple[int, ...],
    where: Array | None = None,
    *,
    fast: bool = True,
) -> Deviations:
    """Returns `x - mean`, two parts that sum to the mean, and the variance.

    With the first element `a` along the axes, mean and variance are those of `d = x - a`:

        mean = a + E[d]     variance = E[|d|²] - |E[d]|²

    Args:
        axes: the axes to reduce, not negative. They stay with size 1.
        where, fast: as in `moments`; `x` is finite also where it does not count.

    >>> deviation, (first, mean), variance = deviations(jnp.array([1.0, 3.0]), (0,))
    >>> deviation.tolist(), (first + mean).tolist(), variance.tolist()
    ([-1.0, 1.0], [2.0], [1.0])
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.result_type(x, float))
    first = _first(lax.stop_gradient(counted(x, where)), axes)
    from_first = lax.sub(x, first)
    summands = counted(from_first, where)
    count = _at_least_one(_count(x, axes, where))
    if not fast:
        mean = _sum(summands, axes) / count
        deviation = from_first - mean
        square = abs_square(counted(deviation, where))
        return Deviations(deviation, (first, mean), _sum(square, axes) / count)
    pair = _stacked(summands, abs_square(summands))  # (2, *shape)
    sums = _sum(pair, tuple(a + 1 for a in axes), keepdims=False)
    if where is None:
        means = lax.div(sums, constant(count, sums))
    else:
        means = sums / jnp.reshape(count, (1, *sums.shape[1:]))
    mean, square = lax.split(means, (1, 1))
    reduced_shape = _reduced_shape(x, axes)
    mean = lax.reshape(mean, reduced_shape)
    square = real(lax.reshape(square, reduced_shape))
    variance = lax.sub(square, abs_square(mean))
    variance = lax.max(
        variance, constant(0, square)
    )  # rounding may make it negative
    return Deviations(lax.sub(from_first, mean), (first, mean), variance)


def mean_square(
    x: Array, axes: tuple[int, ...], where: Array | None = None
) -> Array:
    """Returns the mean of `|x|²`; arguments as in `deviations`.

    >>> mean_square(jnp.array([1.0, 3.0]), (0,)).tolist()
    [5.0]
    """
    square = abs_square(counted(x, where))
    count = _at_least_one(_count(square, axes, where))
    return _sum(square, axes) / count


def abs_square(x: Array) -> Array:
    """Returns `|x|²`, which is real.

    >>> abs_square(jnp.array(3 + 4j)).item()
    25.0
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return lax.mul(x, x)


def constant(value: jax.typing.ArrayLike, like: Array) -> np.ndarray:
    """Returns a number as a `lax` operand with the dtype of `like`.

    >>> lax.add(jnp.ones(1, jnp.bfloat16), constant(2, jnp.ones(1, jnp.bfloat16))).tolist()
    [3.0]
    """
    return np.asarray(value, like.dtype)


def real(x: Array) -> Array:
    """Returns the real part of `x`; a real array is returned unchanged."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.real(x)
    return x


def cross_axis_mean(
    x: Array,
    axes: tuple[int, ...],
    where: Array | None,
    axis_name: str | Sequence[str],
    axis_index_groups: Sequence[Sequence[int]] | None,
) -> Callable[[Array], Array]:
    """Returns a function from each part's mean to the mean of all parts along mapped axes.

    Parts are weighted by their number of counted values; arguments as in `moments`.
    """
    count = _count(x, axes, where)
    psum = functools.partial(
        lax.psum, axis_name=axis_name, axis_index_groups=axis_index_groups
    )
    total = _at_least_one(psum(count))
    return lambda mean: psum(count * mean) / total


def _first(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns the first element along axes, which stay with size 1."""
    spec = list(explicit_spec(x))
    sharded_axes = [a for a in axes if spec[a] is not None]
    unsharded_axes = [a for a in axes if spec[a] is None]
    x = lax.slice(x, [0] * x.ndim, _reduced_shape(x, unsharded_axes))
    for axis in sharded_axes:
        # JAX takes one element of an axis that is sharded over an Explicit axis of a mesh only by
        # its index, and only if the sharding of the result is given.
        spec[axis] = None
        sharding = NamedSharding(
            jax.typeof(x).sharding.mesh, PartitionSpec(*spec)
        )
        index = (*[slice(None)] * axis, np.zeros(1, int))
        x = x.at[index].get(out_sharding=sharding, mode="promise_in_bounds")
    return x


def _reduced_shape(x: Array, axes: Sequence[int]) -> list[int]:
    """Returns the shape of `x` with size 1 at the axes."""
    shape = list(x.shape)
    for axis in axes:
        shape[axis] = 1
    return shape


def _count(
    x: Array, axes: tuple[int, ...], where: Array | None
) -> Array | float:
    """Returns how many values count along the axes: a float if that is the same everywhere."""
    if where is None:
        return float(math.prod(x.shape[a] for a in axes))
    count = jnp.sum(jnp.broadcast_to(where, x.shape), axes, keepdims=True)
    real_dtype = real(jnp.zeros((), x.dtype)).dtype
    return count.astype(real_dtype)


def _stacked(x: Array, y: Array) -> Array:
    """Returns `jnp.stack([x, y])`, by `lax` where no number needs another dtype."""
    if x.dtype != y.dtype:  # x is complex
        return jnp.stack([x, y])
    pair_shape = (1, *x.shape)
    return lax.concatenate(
        [lax.reshape(x, pair_shape), lax.reshape(y, pair_shape)], 0
    )


def _sum(x: Array, axes: tuple[int, ...], keepdims: bool = True) -> Array:
    # `lax` sums 16-bit numbers in 16 bits, `jnp` in float32.
    if keepdims or x.dtype.itemsize < 4:
        return jnp.sum(x, axes, keepdims=keepdims)
    return lax.reduce_sum(x, axes)


def _at_least_one(count: Array | float) -> Array | float:
    """Returns the count as a divisor, at least 1, so that the mean of nothing is 0."""
    if isinstance(count, float):
        return count
    return jnp.maximum(count, 1)


def cast(x: Array, dtype: jax.typing.DTypeLike | None) -> Array:
    """Returns `x` in that dtype; unchanged for None."""
    if dtype is None or x.dtype == dtype:
        return x
    return x.astype(dtype)


def statistics_dtype(
    x: Array, force_float32: bool = True
) -> jax.typing.DTypeLike:
    """Returns the dtype for statistics of `x`: at least float32 if forced.

    >>> statistics_dtype(jnp.ones(1, jnp.bfloat16)).name
    'float32'
    """
    if force_float32 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.promote_types(x.dtype, jnp.float32)
    return x.dtype


def canonical_axes(axis: Axes, ndim: int) -> tuple[int, ...]:
    """Returns the axes as a tuple of nonnegative integers.

    >>> canonical_axes(-1, 3)
    (2,)
    """
    axes = (axis,) if isinstance(axis, int | np.integer) else axis
    return tuple(a % ndim for a in axes)


@jax.custom_vjp
def with_gradient_norm(
    x: Float[Array, "*shape"], norm: Float[Array, ""]
) -> Float[Array, "*shape"]:
    """Returns `x`; the gradient of `norm`, whose value is ignored, is the norm of that of `x`.

    >>> jax.grad(lambda norm: jnp.sum(3.0 * with_gradient_norm(jnp.ones(4), norm)))(0.0).item()
    6.0
    """
    del norm
    return x


def _with_gradient_norm_fwd(x: Array, norm: Array) -> tuple[Array, Array]:
    return x, norm


def _with_gradient_norm_bwd(
    norm: Array, gradient: Array
) -> tuple[Array, Array]:
    squares = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
    return gradient, jnp.sqrt(squares).astype(norm.dtype)


with_gradient_norm.defvjp(_with_gradient_norm_fwd, _with_gradient_norm_bwd)
