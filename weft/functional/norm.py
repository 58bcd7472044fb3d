"""Normalization of activations and of weights.

Statistics are computed in float32 (`dtype`, see `statistics.py`), and scale and bias are applied in
it; the result has the dtype of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import arrays, statistics
from weft.functional.statistics import Axes, canonical_axes, cast


def layer_norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    bias: Float[Array, "*features"] | None = None,
    *,
    axis: Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, "*shape"] | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    fast_variance: bool = True,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*shape"]:
    """Returns `(x - mean) / sqrt(variance + eps) * scale + bias` (Ba et al., 2016).

    Args:
        scale, bias: broadcast against the last axes of `x`.
        eps: added to the variance.
        where: values that count in the statistics; all by default. The others are normalized too,
            except for NaN and infinities, which are returned as they are, with gradient 0.
        axis_name, axis_index_groups: mapped axes to combine statistics over, as in `moments`.
        fast_variance: `fast` of `moments`.
        dtype: of the computation; None for the dtype of `x`.

    >>> layer_norm(jnp.array([1.0, 3.0]), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    options = _Options(
        canonical_axes(axis, x.ndim), float(eps), True, fast_variance, dtype
    )
    return _normalize(
        x, scale, bias, where, options, axis_name, axis_index_groups
    )


def rms_norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    *,
    axis: Axes = -1,
    eps: float = 1e-6,
    where: Bool[Array, "*shape"] | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*shape"]:
    """Returns `x / sqrt(mean(x²) + eps) * scale` (Zhang and Sennrich, 2019).

    Arguments are as for `layer_norm`, with the mean square in place of the variance.

    >>> rms_norm(jnp.array([3.0, 3.0]), jnp.array([1.0, 2.0]), eps=0.0).tolist()
    [1.0, 2.0]
    """
    options = _Options(
        canonical_axes(axis, x.ndim), float(eps), False, True, dtype
    )
    return _normalize(
        x, scale, None, where, options, axis_name, axis_index_groups
    )


def centered_rms_norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    *,
    axis: Axes = -1,
    eps: float = 1e-6,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*shape"]:
    """Returns `(x - mean(x)) / sqrt(mean(x²) + eps) * scale`: `rms_norm` without its mean.

    Unlike in `layer_norm`, the divisor is not changed by the subtraction. Arguments are as for
    `rms_norm`.

    >>> [round(y, 4) for y in centered_rms_norm(jnp.array([3.0, 4.0])).tolist()]
    [-0.1414, 0.1414]
    """
    axes = canonical_axes(axis, x.ndim)
    y = cast(x, dtype)
    normalized = _divide_by_root(y, statistics.mean_square(y, axes, None), eps)
    mean = jnp.mean(normalized, axis=axes, keepdims=True)
    return _affine(normalized - mean, scale, None, x.dtype)


def group_norm(
    x: Float[Array, "batch *spatial channels"],
    scale: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    num_groups: int,
    axis: Axes | None = None,
    eps: float = 1e-6,
    subtract_mean: bool = True,
    where: Bool[Array, " batch *spatial"]
    | Bool[Array, " batch *spatial channels"]
    | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    fast_variance: bool = True,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "batch *spatial channels"]:
    """Normalizes groups of channels (Wu and He, 2018).

    Args:
        axis: the axes that share statistics, in addition to the channels of a group; by default
            all except the first and the last.
        eps, fast_variance, dtype: as in `layer_norm`.
        subtract_mean: if False, groups are divided by their root mean square instead.
        where: positions, or single channels of them, that count in the statistics.
        segment_ids: separates the statistics of segments along axis 1; ids in `[0, time]`.
        axis_name: mapped axes to combine statistics over; not with segments.
        axis_index_groups: of that axis, as in `moments`.

    Raises:
        ArgumentShapeError: if the channels are not a multiple of the groups.

    >>> group_norm(jnp.array([[1.0, 3.0, 5.0, 9.0]]), num_groups=2, eps=0.0).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """
    if x.shape[-1] % num_groups:
        raise ArgumentShapeError(
            f"The last axis of x has {x.shape[-1]} channels (shape {x.shape}), which cannot be cut "
            f"into {num_groups} equal groups."
        )
    channel_axis = x.ndim - 1
    if axis is None:
        axis = range(1, channel_axis)
    axes = [a for a in canonical_axes(axis, x.ndim) if a != channel_axis]
    # Channels become two axes, (groups, channels of a group); the second is reduced.
    axes = (*axes, channel_axis + 1)
    if where is not None and where.ndim < x.ndim:
        where = where[..., None]
    y = arrays.finite_or_counted(cast(x, dtype), where)
    y = y.reshape(*x.shape[:-1], num_groups, -1)
    grouped_where = where
    if where is not None:
        has_channels = where.shape[-1] > 1
        group_shape = (num_groups, -1) if has_channels else (1, 1)
        grouped_where = where.reshape(*where.shape[:-1], *group_shape)
    if segment_ids is not None and 1 in axes:
        segment_mean = functools.partial(
            statistics.segment_mean,
            segment_ids=segment_ids,
            axis=axes,
            where=grouped_where,
        )
        if subtract_mean:
            y = y - segment_mean(y)
        y = y * jax.lax.rsqrt(segment_mean(y * y) + eps)
    else:
        options = _Options(axes, float(eps), subtract_mean, fast_variance, None)
        y = _normalize(
            y, None, None, grouped_where, options, axis_name, axis_index_groups
        )
    y = _affine(y.reshape(x.shape), scale, bias, x.dtype)
    return _with_ignored(x, y, where)


def number_of_groups(
    channels: int, num_groups: int | None, group_size: int | None
) -> int:
    """Returns the number of groups of channels, from `num_groups` or `group_size`.

    Raises:
        ArgumentShapeError: if the channels cannot be split into equal groups.
        ArgumentValueError: if not exactly one of the two is given, or it is not positive.

    >>> number_of_groups(12, None, 4)
    3
    """
    if (num_groups is None) == (group_size is None):
        raise ArgumentValueError(
            f"num_groups={num_groups} and group_size={group_size}: give one of the two, and None "
            "for the other."
        )
    divisor = num_groups if group_size is None else group_size
    if divisor is None or divisor < 1:
        raise ArgumentValueError(
            f"num_groups={num_groups} and group_size={group_size}: expected a positive number of "
            f"groups, or of the {channels} channels of each."
        )
    if channels % divisor:
        parts = (
            f"{num_groups} equal groups"
            if group_size is None
            else f"groups of {group_size=}"
        )
        raise ArgumentShapeError(
            f"the input has {channels} channels, which cannot be cut into {parts}."
        )
    if group_size is None:
        return divisor
    return channels // divisor


def batch_norm(
    x: Float[Array, "*batch channels"],
    mean: Float[Array, "*#shape"],
    variance: Float[Array, "*#shape"],
    scale: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    eps: float = 1e-6,
    where: Bool[Array, "*#shape"] | None = None,
    dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "*batch channels"]:
    """Normalizes with given statistics: a batch's `moments`, or running averages.

    `mean` and `variance` broadcast to `x`; `scale` and `bias` are per channel. NaN and infinities
    that do not count, where `where` is False, are returned as they are. `dtype` is that of the
    computation; None for the dtype of `x`.

    >>> batch_norm(jnp.array([[5.0]]), jnp.array([1.0]), jnp.array([4.0]), eps=0.0).tolist()
    [[2.0]]
    """
    mean = arrays.to_ndim(cast(mean, dtype), x.ndim)
    variance = arrays.to_ndim(cast(variance, dtype), x.ndim)
    finite = arrays.finite_or_counted(cast(x, dtype), where)
    y = (finite - mean) * jax.lax.rsqrt(variance + eps)
    y = _affine(y, scale, bias, x.dtype)
    return _with_ignored(x, y, where)


def l2_normalize(
    x: Float[Array, "*shape"], eps: float = 1e-8, axis: Axes | None = -1
) -> Float[Array, "*shape"]:
    """Returns `x / sqrt(sum(x²) + eps)` along `axis`; None for all axes.

    >>> l2_normalize(jnp.array([0.0, 2.0])).tolist()
    [0.0, 1.0]
    """
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis, keepdims=True) + eps)


def normalize_sum(
    x: Num[Array, "*shape"], eps: float = 1e-8, axis: Axes = -1
) -> Array:
    """Returns `x / (sum(x) + eps)` along `axis`.

    >>> normalize_sum(jnp.array([1.0, 3.0])).tolist()
    [0.25, 0.75]
    """
    return x / (jnp.sum(x, axis, keepdims=True) + eps)


class _Options(NamedTuple):
    axes: tuple[int, ...]
    eps: float
    subtract_mean: bool
    fast: bool
    dtype: DTypeLike | None


def _normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    options: _Options,
    axis_name: str | Sequence[str] | None,
    axis_index_groups: Sequence[Sequence[int]] | None,
) -> Array:
    if axis_name is None:
        return _normalize_locally(x, scale, bias, where, options)
    axes, eps, subtract_mean, fast, dtype = options
    y = arrays.finite_or_counted(cast(x, dtype), where)
    if subtract_mean:
        mean, square = statistics.moments(
            y,
            axis=axes,
            where=where,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            fast=fast,
            dtype=None,
        )
        y = y - mean
    else:
        combine = statistics.cross_axis_mean(
            y, axes, where, axis_name, axis_index_groups
        )
        square = combine(statistics.mean_square(y, axes, where))
    y = _divide_by_root(y, square, eps)
    y = _affine(y, scale, bias, x.dtype)
    return _with_ignored(x, y, where)


# As `jnp.mean` and `jnp.var` are. Twenty operations by themselves take three times as long to
# trace, and eight times as long to differentiate.
@functools.partial(jax.jit, static_argnums=4, inline=arrays.INLINE)
def _normalize_locally(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    where: Array | None,
    options: _Options,
) -> Array:
    axes, eps, subtract_mean, fast, dtype = options
    y = arrays.finite_or_counted(cast(x, dtype), where)
    if subtract_mean:
        y, _, square = statistics.deviations(y, axes, where, fast=fast)
    else:
        square = statistics.mean_square(y, axes, where)
    y = _divide_by_root(y, square, eps)
    y = _affine(y, scale, bias, x.dtype)
    return _with_ignored(x, y, where)


def _with_ignored(x: Array, y: Array, where: Array | None) -> Array:
    """Returns `y`, with NaN and infinities of the input `x` in places that do not count."""
    if where is None:
        return y
    ignored = jax.lax.stop_gradient(x).astype(y.dtype)
    ignored = jnp.where(jnp.isfinite(ignored), y, ignored)
    return jnp.where(where, y, ignored)


def _divide_by_root(x: Array, square: Array, eps: float) -> Array:
    factor = jax.lax.rsqrt(
        jax.lax.add(square, statistics.constant(eps, square))
    )
    if factor.dtype == x.dtype:
        return jax.lax.mul(x, factor)
    return x * factor  # x is complex, or has fewer bits than its statistics


def _affine(
    y: Array, scale: Array | None, bias: Array | None, dtype: DTypeLike
) -> Array:
    if scale is not None:
        y = jax.lax.mul(y, _match_operand(scale, y))
    if bias is not None:
        y = jax.lax.add(y, _match_operand(bias, y))
    return cast(y, dtype)


def _match_operand(x: Array, y: Array) -> Array:
    """Returns a scale or bias with the dtype and number of axes of the other operand."""
    x = cast(x, y.dtype)
    if x.ndim == y.ndim:
        return x
    return jax.lax.expand_dims(x, range(y.ndim - x.ndim))


def group_norm_axes(
    reduction_axes: Axes | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the axes that share statistics, the last one split into groups.

    `reduction_axes` of None means all but the first. Raises ArgumentValueError if the last axis is
    not among them.

    >>> group_norm_axes(None, (2, 3, 4)), group_norm_axes((0, -1), (2, 3, 4))
    ((1, 2), (0, 2))
    """
    ndim = len(shape)
    if reduction_axes is None:
        return tuple(range(1, ndim))
    axes = canonical_axes(reduction_axes, ndim)
    if ndim - 1 not in axes:
        raise ArgumentValueError(
            f"reduction_axes={reduction_axes} of an input of shape {tuple(shape)} leave out the "
            "last axis, which holds the channels; add -1."
        )
    return axes


def instance_norm_axes(
    feature_axes: Axes, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of the channels in increasing order, and those that share statistics.

    Raises ArgumentValueError if `feature_axes` include the first axis, the batch axis.

    >>> instance_norm_axes(-1, (2, 3, 4, 5))
    ((3,), (1, 2))
    """
    channel_axes = tuple(sorted(canonical_axes(feature_axes, len(shape))))
    if 0 in channel_axes:
        raise ArgumentValueError(
            f"feature_axes={feature_axes} of an input of shape {tuple(shape)} include the first "
            "axis, the batch axis; leave it out."
        )
    spatial_axes = tuple(
        a for a in range(1, len(shape)) if a not in channel_axes
    )
    return channel_axes, spatial_axes


class NormLayer(Protocol):
    """A layer of normalization, as `normalize_by_layer` reads it."""

    @property
    def epsilon(self) -> float: ...
    @property
    def axis_name(self) -> str | Sequence[str] | None: ...
    @property
    def axis_index_groups(self) -> Sequence[Sequence[int]] | None: ...


def normalize_by_layer(
    layer: NormLayer,
    norm_fn: Callable[..., Array],
    x: Num[Array, "*shape"],
    *params: Array | None,
    dtype: DTypeLike,
    force_float32: bool = True,
    **options: Any,
) -> Float[Array, "*shape"]:
    """Calls a function of this module with the options of a layer; the result has `dtype`."""
    y = norm_fn(
        cast(x, statistics.statistics_dtype(x, force_float32)),
        *params,
        eps=layer.epsilon,
        axis_name=layer.axis_name,
        axis_index_groups=layer.axis_index_groups,
        dtype=None,
        **options,
    )
    return cast(y, dtype)


def along(
    axes: Sequence[int], values: Array | None, x: Num[Array, "*shape"]
) -> Array | None:
    """Reshapes values of some axes of `x`, which may be merged, to broadcast to `x`."""
    if values is None:
        return None
    last_axes = range(x.ndim - len(axes), x.ndim)
    if values.ndim == len(axes) and list(axes) == list(last_axes):
        return values
    return values.reshape(_shape_along(axes, x.shape))


def _shape_along(axes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Returns the shape with size 1 at all other axes."""
    sizes = [1] * len(shape)
    for axis in axes:
        sizes[axis] = shape[axis]
    return sizes


def weight_norm(
    weight: Float[Array, "*shape"],
    scale: Float[Array, "*features"] | None = None,
    *,
    feature_axes: Axes | None = -1,
    eps: float = 1e-12,
) -> Float[Array, "*shape"]:
    """Returns `scale * weight / |weight|` (Salimans and Kingma, 2016).

    Args:
        scale: the norms, with the axes `feature_axes` in increasing order; 1 by default.
        feature_axes: the axes with a norm per position; None for one norm of the whole weight.

    Raises ArgumentValueError if the weight does not have these axes.

    >>> weight_norm(jnp.array([[2.0, -5.0]]), jnp.array([3.0, 1.0])).tolist()
    [[3.0, -1.0]]
    """
    axes_with_norms = weight_features(weight.shape, feature_axes)
    reduced_axes = tuple(
        a for a in range(weight.ndim) if a not in axes_with_norms
    )
    y = l2_normalize(weight, eps, reduced_axes)
    if scale is None:
        return y
    return y * scale.reshape(_shape_along(axes_with_norms, weight.shape))


def weight_features(
    shape: Sequence[int], feature_axes: Axes | None
) -> tuple[int, ...]:
    """Returns the axes of a weight that have norms, in increasing order; none for None.

    Raises ArgumentValueError if the weight does not have these axes.

    >>> weight_features((3, 4, 5), (-1, 0))
    (0, 2)
    """
    if feature_axes is None:
        return ()
    axes = arrays.as_tuple(feature_axes)
    ndim = len(shape)
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ArgumentValueError(
                f"feature_axes={feature_axes} are not all axes of a weight of shape {tuple(shape)}."
            )
    return tuple(sorted(canonical_axes(axes, ndim)))


def spectral_norm(
    weight: Float[Array, "*rows columns"],
    u: Float[Array, "1 columns"],
    *,
    n_steps: int = 1,
    eps: float = 1e-12,
) -> tuple[
    Float[Array, "*rows columns"], Float[Array, "1 columns"], Float[Array, ""]
]:
    """Returns a weight divided by its largest singular value, the next `u`, and that value.

    The singular value is estimated by power iteration (Miyato et al., 2018), starting from `u`. No
    gradient flows through the iteration, only through `v weight u`.

    Args:
        weight: a matrix; all axes but the last are its rows.
        u: an estimate of the first right singular vector, such as the one returned before.
        n_steps: number of iterations, at least 1.

    Raises ArgumentValueError if `n_steps` is less than 1.

    >>> weight, u = jnp.diag(jnp.array([4.0, 1.0])), jnp.ones((1, 2))
    >>> weight, u, sigma = spectral_norm(weight, u, n_steps=9)
    >>> weight.round(3).tolist(), sigma.round(3).item()
    ([[1.0, 0.0], [0.0, 0.25]], 4.0)
    """
    if n_steps < 1:
        raise ArgumentValueError(
            f"n_steps={n_steps}: expected at least one step of the iteration."
        )
    matrix = weight.reshape(-1, weight.shape[-1])  # (rows, columns)
    constant_matrix = jax.lax.stop_gradient(matrix)
    v = u
    for _ in range(n_steps):
        v = l2_normalize(u @ constant_matrix.T, eps, None)  # (1, rows)
        u = l2_normalize(v @ constant_matrix, eps, None)  # (1, columns)
    u, v = jax.lax.stop_gradient((u, v))
    sigma = (v @ matrix @ u.T)[0, 0]
    # A weight of zeros stays zero.
    return weight / jnp.where(sigma != 0, sigma, 1), u, sigma
