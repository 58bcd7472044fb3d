"""Convolutions and pooling over any number of spatial axes.

Arrays are channels-last, `(batch, *spatial, channels)`, and weights `(*window, input / groups,
output)`. `conv_shape.py` documents padding names and output shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError
from weft.functional import conv_shape, linear
from weft.functional.arrays import (
    OutSharding,
    explicit_spec,
    gathered,
    num_parts,
    promote_dtype,
    without_none,
)


def conv(
    x: Num[Array, "batch *spatial input"],
    weight: Num[Array, "*window group_input output"],
    bias: Num[Array, " output"] | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: conv_shape.ConvPadding = "VALID",
    dilation: int | Sequence[int] = 1,
    input_dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    conv_general_dilated: Callable[..., Array] | None = None,
    out_sharding: OutSharding = None,
) -> Num[Array, "batch *out_spatial output"]:
    """Convolves the spatial axes of `x`, without flipping the window.

    Args:
        strides: one number, or one per spatial axis.
        padding: a name (see `conv_shape.py`) or `(left, right)` per spatial axis.
        dilation: step between two positions of one window.
        input_dilation: step between two positions of the input, with zeros between them.
        groups: number of channel groups, each convolved separately.
        precision, preferred_element_type, out_sharding: as in `jax.lax.conv_general_dilated`.
        conv_general_dilated: replaces `jax.lax.conv_general_dilated`; receives
            `preferred_element_type` and `out_sharding` only if they are set.

    Raises:
        ArgumentShapeError: if the ranks or the channels do not match.
        ArgumentValueError: if the padding is unknown.

    >>> conv(jnp.ones((1, 5, 2)), jnp.ones((3, 2, 4)), strides=2, padding="SAME").shape
    (1, 3, 4)
    """
    window = _window_shape(x, weight)
    if x.shape[-1] != weight.shape[-2] * groups:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}: {weight.shape[-2]} input channels for each of "
            f"{groups} group(s), but x has {x.shape[-1]} channels (shape {x.shape})."
        )
    if weight.shape[-1] % groups:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}: {weight.shape[-1]} output channels, which cannot be "
            f"shared out among {groups} groups."
        )
    strides = conv_shape.per_axis(strides, len(window))
    dilation = conv_shape.per_axis(dilation, len(window))
    pads = conv_shape.conv_explicit_padding(
        window=window, strides=strides, padding=padding, dilation=dilation
    )
    y = _conv_general(
        x,
        weight,
        strides=strides,
        padding=pads,
        lhs_dilation=conv_shape.per_axis(input_dilation, len(window)),
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision,
        preferred_element_type=preferred_element_type,
        fn=conv_general_dilated,
        out_sharding=out_sharding,
    )
    if bias is None:
        return y
    return linear.add_bias(y, bias)


def conv_local(
    x: Num[Array, "batch *spatial input"],
    weight: Num[Array, "*out_spatial window_input output"],
    bias: Num[Array, "*out_spatial output"] | None = None,
    *,
    window: Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: Sequence[tuple[int, int]],
    dilation: int | Sequence[int] = 1,
    input_dilation: int | Sequence[int] = 1,
    precision: lax.PrecisionLike = None,
) -> Num[Array, "batch *out_spatial output"]:
    """Convolves the spatial axes of `x` with separate weights for each output position.

    Args:
        weight: shape `(*out_spatial, input * prod(window), output)`, input channel before window.
        strides, dilation, input_dilation: as in `conv`.
        padding: `(left, right)` per spatial axis.
        precision: as in `jax.lax.conv_general_dilated_local`.

    Raises ArgumentShapeError if the weight's inputs do not match the window and channels.

    >>> x, weight = jnp.ones((1, 5, 2)), jnp.ones((3, 3 * 2, 4))
    >>> conv_local(x, weight, window=(3,), padding=((0, 0),)).shape
    (1, 3, 4)
    """
    n = len(window)
    expected = math.prod(window) * x.shape[-1]
    if x.ndim != n + 2 or weight.ndim != n + 2 or weight.shape[-2] != expected:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}; for the window {tuple(window)} over x, whose shape "
            f"is {x.shape}, it must be (*out_spatial, {expected}, output)."
        )
    if x.dtype != weight.dtype:
        x, weight = promote_dtype(x, weight, inexact=False)
    y = lax.conv_general_dilated_local(
        gathered(x, -1),
        weight,
        window_strides=conv_shape.per_axis(strides, n),
        padding=padding,
        filter_shape=tuple(window),
        lhs_dilation=conv_shape.per_axis(input_dilation, n),
        rhs_dilation=conv_shape.per_axis(dilation, n),
        dimension_numbers=_channels_last(n),
        precision=precision,
    )
    if bias is None:
        return y
    return linear.add_bias(y, bias)


def conv_transpose(
    x: Num[Array, "batch *spatial input"],
    weight: Num[Array, "*window group_input output"],
    bias: Num[Array, " output"] | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: conv_shape.ConvPadding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Num[Array, "batch *out_spatial output"]:
    """Convolves `x` with `strides - 1` zeros between its positions: a learned upsampling.

    Args:
        weight: as in `conv`; `(*window, output / groups, input)` with `transpose_kernel`.
        strides: number of outputs per input position.
        padding: a name (see `conv_transpose_explicit_padding`), or `(left, right)` per spatial
            axis, added around the dilated input.
        dilation, groups, precision, preferred_element_type: as in `conv`.
        transpose_kernel: flips the window and swaps its channels, which makes this function the
            gradient of the convolution with `weight`.

    For the errors see `conv`.

    >>> conv_transpose(jnp.ones((1, 5, 2)), jnp.ones((3, 2, 4)), strides=2).shape
    (1, 10, 4)
    """
    window = _window_shape(x, weight)
    if transpose_kernel:
        weight = _flip_kernel(weight, groups)
    if x.shape[-1] != weight.shape[-2] * groups:
        raise ArgumentShapeError(
            f"weight takes {weight.shape[-2]} input channels for each of {groups} group(s), but x "
            f"has {x.shape[-1]} (shape {x.shape}). With transpose_kernel the input channels of a "
            "weight come last."
        )
    strides = conv_shape.per_axis(strides, len(window))
    dilation = conv_shape.per_axis(dilation, len(window))
    pads = conv_shape.conv_transpose_explicit_padding(
        window=window, strides=strides, padding=padding, dilation=dilation
    )
    y = _conv_general(
        x,
        weight,
        strides=(1,) * len(window),
        padding=pads,
        lhs_dilation=strides,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if bias is None:
        return y
    return linear.add_bias(y, bias)


def _flip_kernel(weight: Array, groups: int) -> Array:
    """Returns the weight flipped, with inputs and outputs of each group exchanged."""
    *window, outputs, inputs = weight.shape
    weight = jnp.flip(weight, tuple(range(len(window))))
    weight = weight.reshape(*window, outputs, groups, inputs // groups)
    return jnp.swapaxes(weight, -1, -3).reshape(
        *window, inputs // groups, outputs * groups
    )


def _conv_general(
    x,
    weight,
    *,
    strides,
    padding,
    preferred_element_type,
    fn=None,
    out_sharding=None,
    **kwargs,
):
    if x.dtype != weight.dtype:
        x, weight = promote_dtype(x, weight, inexact=False)
    options = without_none(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    layout = _channels_last(x.ndim - 2)

    def convolve(x: Array, weight: Array) -> Array:
        convolution = fn or lax.conv_general_dilated
        return convolution(
            x,
            weight,
            strides,
            padding,
            dimension_numbers=layout,
            **options,
            **kwargs,
        )

    x = gathered(x, -1)
    if out_sharding is None:
        x = _evenly_sharded(x, weight, convolve)
    return convolve(x, weight)


def _evenly_sharded(
    x: Array, weight: Array, convolve: Callable[..., Array]
) -> Array:
    """Returns `x` without the Explicit axes of a mesh that do not divide the spatial outputs."""
    spec = explicit_spec(x)
    if not any(spec[1:-1]):
        return x
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, weight)]
    sizes = jax.eval_shape(convolve, *operands).shape
    mesh = jax.typeof(x).sharding.mesh
    uneven = []
    for axis in range(1, x.ndim - 1):
        if sizes[axis] % num_parts(mesh, spec[axis]):
            uneven.append(axis)
    return gathered(x, *uneven)


def _channels_last(n: int) -> lax.ConvDimensionNumbers:
    spatial = tuple(range(1, n + 1))
    array = (0, n + 1, *spatial)
    return lax.ConvDimensionNumbers(array, (n + 1, n, *range(n)), array)


def _window_shape(x, weight) -> tuple[int, ...]:
    if x.ndim != weight.ndim or x.ndim < 2:
        raise ArgumentShapeError(
            "x must be (batch, *spatial, channels) and weight (*window, input, output) with the "
            f"same spatial axes, but their shapes are {x.shape} and {weight.shape}."
        )
    return weight.shape[:-2]


def pool(
    x: Num[Array, "batch *spatial channels"],
    initial: float | Num[Array, ""],
    reduce: Callable[[Array, Array], Array],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: conv_shape.ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Reduces the numbers of each window by a function of two numbers.

    Args:
        initial: the identity of `reduce`, such as 0 for `jax.lax.add`; the value of padding.
        reduce: associative, such as `jax.lax.add`.
        strides: step between windows along each axis; 1 by default.
        padding: a name, or `(left, right)` per spatial axis.

    Raises ArgumentShapeError if `window` does not have one size per spatial axis.

    >>> pool(jnp.array([[[2.0], [3.0], [4.0]]]), 1.0, lax.mul, (2,)).ravel().tolist()
    [6.0, 12.0]
    """
    if len(window) != x.ndim - 2:
        raise ArgumentShapeError(
            f"window={window} must have one size for each of the {x.ndim - 2} spatial "
            f"axes of x, whose shape is {x.shape}: (batch, *spatial, channels)."
        )
    if strides is None:
        strides = (1,) * len(window)
    pads = conv_shape.conv_explicit_padding(
        window=window, strides=strides, padding=padding
    )
    # XLA's gradient of the largest of overlapping windows is wrong over a sharded spatial axis.
    x = gathered(x, *range(1, x.ndim - 1))
    return lax.reduce_window(
        x,
        np.asarray(initial, x.dtype)[()],
        reduce,
        window_dimensions=(1, *window, 1),
        window_strides=(1, *strides, 1),
        padding=((0, 0), *pads, (0, 0)),
    )


def max_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: conv_shape.ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the largest value of each window, ignoring padding; arguments as in `pool`.

    >>> max_pool(jnp.arange(4.0).reshape(1, 4, 1), (2,), strides=(2,)).ravel().tolist()
    [1.0, 3.0]
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        lowest = -jnp.inf
    else:
        lowest = jnp.iinfo(x.dtype).min
    return pool(x, lowest, lax.max, window, strides=strides, padding=padding)


def min_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: conv_shape.ConvPadding = "VALID",
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the smallest value of each window. Arguments as in `max_pool`."""
    return -max_pool(-x, window, strides=strides, padding=padding)


def avg_pool(
    x: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: conv_shape.ConvPadding = "VALID",
    count_include_pad: bool = True,
) -> Num[Array, "batch *out_spatial channels"]:
    """Returns the mean of each window. Arguments and errors as in `pool`.

    `count_include_pad` counts padding as zeros; otherwise it is ignored.

    >>> x = jnp.ones((1, 3, 1))
    >>> avg_pool(x, (3,), padding="SAME", count_include_pad=False).ravel().tolist()
    [1.0, 1.0, 1.0]
    """
    total = pool(x, 0, lax.add, window, strides=strides, padding=padding)
    if count_include_pad:
        return total / math.prod(window)
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    num_values = pool(
        ones, 0, lax.add, window, strides=strides, padding=padding
    )
    return total / num_values
