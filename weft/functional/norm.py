"""Normalisation: what is left of an input when its statistics are taken away.

Statistics are computed in float32 (`dtype`) as `statistics.py` says, and so are scale and bias
applied; the result has the dtype of the input.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from weft.errors import ArgumentShapeError
from weft.functional.statistics import (
    Axes,
    canonical_axes,
    cast,
    deviations,
    mean_square,
    segment_mean,
)


def layer_norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    bias: Float[Array, "*features"] | None = None,
    *,
    axis: Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, "*shape"] | None = None,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*shape"]:
    """Returns `(x - mean) / sqrt(variance + eps) * scale + bias` (Ba et al., 2016).

    Args:
        x: the input.
        scale: broadcast against the last axes of `x`; none by default.
        bias: likewise.
        axis: the axis or axes of the statistics.
        eps: added to the variance.
        where: which values count in the statistics; all by default.
        dtype: of the computation; None is the dtype of `x`.

    >>> layer_norm(jnp.array([1.0, 3.0]), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    y = _standardize(cast(x, dtype), canonical_axes(axis, x.ndim), eps, where)
    return _affine(y, scale, bias, x.dtype)


def rms_norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    *,
    axis: Axes = -1,
    eps: float = 1e-6,
    zero_centered: bool = False,
    where: Bool[Array, "*shape"] | None = None,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*shape"]:
    """Returns `x / sqrt(mean(x²) + eps) * scale` (Zhang and Sennrich, 2019).

    Args:
        x: the input.
        scale: broadcast against the last axes of `x`; none by default.
        axis: the axis or axes of the mean.
        eps: added to the mean square.
        zero_centered: whether `scale` is a difference from 1, so that weight decay pulls the
            factor towards 1.
        where: which values count in the mean; all by default.
        dtype: of the computation; None is the dtype of `x`.

    >>> rms_norm(jnp.array([3.0, 3.0]), jnp.array([0.0, 1.0]), eps=0.0, zero_centered=True).tolist()
    [1.0, 2.0]
    """
    y = _divide_by_rms(cast(x, dtype), canonical_axes(axis, x.ndim), eps, where)
    if scale is not None and zero_centered:
        scale = cast(scale, dtype) + 1
    return _affine(y, scale, None, x.dtype)


def group_norm(
    x: Float[Array, "batch *spatial channels"],
    scale: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    num_groups: int,
    axis: Axes | None = None,
    eps: float = 1e-6,
    subtract_mean: bool = True,
    where: Bool[Array, " batch *spatial"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "batch *spatial channels"]:
    """Normalises groups of channels (Wu and He, 2018).

    Args:
        x: the input.
        scale: per channel; none by default.
        bias: per channel; none by default.
        num_groups: how many groups the channels are cut into.
        axis: the axes that share statistics besides the channels of a group; by default all but
            the first and the last.
        eps: added to the variance.
        subtract_mean: without it, groups are divided by their root mean square instead.
        where: which positions count in the statistics; all by default.
        segment_ids: gives each segment of axis 1 statistics of its own; ids in `[0, time]`.
        dtype: of the computation; None is the dtype of `x`.

    Raises:
        ArgumentShapeError: if the channels cannot be cut into equal groups.

    >>> group_norm(jnp.array([[1.0, 3.0, 5.0, 9.0]]), num_groups=2, eps=0.0).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    if x.shape[-1] % num_groups:
        raise ArgumentShapeError(
            f"The last axis of x has {x.shape[-1]} channels (shape {x.shape}), which cannot be cut "
            f"into {num_groups} equal groups."
        )
    axes = canonical_axes(range(1, x.ndim - 1) if axis is None else axis, x.ndim)
    axes = (*(a for a in axes if a < x.ndim - 1), x.ndim)
    y = cast(x, dtype).reshape(*x.shape[:-1], num_groups, -1)
    where = None if where is None else where[..., None, None]
    if segment_ids is not None and 1 in axes:
        if subtract_mean:
            y = y - segment_mean(y, segment_ids=segment_ids, axis=axes, where=where)
        square = segment_mean(y * y, segment_ids=segment_ids, axis=axes, where=where)
        y = y * lax.rsqrt(square + eps)
    else:
        y = (_standardize if subtract_mean else _divide_by_rms)(y, axes, eps, where)
    return _affine(y.reshape(x.shape), scale, bias, x.dtype)


def batch_norm(
    x: Float[Array, "*batch channels"],
    mean: Float[Array, "*#shape"],
    variance: Float[Array, "*#shape"],
    scale: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    eps: float = 1e-6,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*batch channels"]:
    """Normalises with statistics that are given: a batch's `moments`, or running averages.

    Args:
        x: the input.
        mean: broadcastable to `x`.
        variance: broadcastable to `x`.
        scale: per channel; none by default.
        bias: per channel; none by default.
        eps: added to the variance.
        dtype: of the computation; None is the dtype of `x`.

    >>> batch_norm(jnp.array([[5.0]]), jnp.array([1.0]), jnp.array([4.0]), eps=0.0).tolist()
    [[2.0]]
    """
    mean, variance = cast(mean, dtype), cast(variance, dtype)
    y = (cast(x, dtype) - mean) * lax.rsqrt(variance + eps)
    return _affine(y, scale, bias, x.dtype)


def l2_normalize(x: Float[Array, "*shape"], eps: float = 1e-8, axis: Axes = -1) -> Array:
    """Returns `x / sqrt(sum(x²) + eps)` along `axis`.

    >>> l2_normalize(jnp.array([0.0, 2.0])).tolist()
    [0.0, 1.0]
    """
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis, keepdims=True) + eps)


def normalize_sum(x: Num[Array, "*shape"], eps: float = 1e-8, axis: Axes = -1) -> Array:
    """Returns `x / (sum(x) + eps)` along `axis`.

    >>> normalize_sum(jnp.array([1.0, 3.0])).tolist()
    [0.25, 0.75]
    """
    return x / (jnp.sum(x, axis, keepdims=True) + eps)


def _standardize(x: Array, axes: tuple[int, ...], eps: float, where: Array | None) -> Array:
    deviation, _, variance = deviations(x, axes, where)
    return deviation * lax.rsqrt(variance + eps)


def _divide_by_rms(x: Array, axes: tuple[int, ...], eps: float, where: Array | None) -> Array:
    return x * lax.rsqrt(mean_square(x, axes, where) + eps)


def _affine(y: Array, scale: Array | None, bias: Array | None, dtype: DTypeLike) -> Array:
    if scale is not None:
        y = y * scale.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(dtype)
