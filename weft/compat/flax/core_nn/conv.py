"""Convolutions as functions of a scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from weft import functional
from weft.compat.flax.core_nn.linear import Initializer, default_kernel_init
from weft.core.scope import Scope
from weft.functional.arrays import as_tuple, promote_dtype

Sizes = int | Sequence[int] | None


def conv(
    scope: Scope,
    inputs: Num[Array, "batch *spatial input"],
    features: int,
    kernel_size: int | Sequence[int],
    strides: Sizes = None,
    padding: functional.Padding = "SAME",
    input_dilation: Sizes = None,
    kernel_dilation: Sizes = None,
    feature_group_count: int = 1,
    bias: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
) -> Num[Array, "batch *out_spatial features"]:
    """Applies a convolution.

    Args:
        scope: has `kernel`, shape `(*kernel_size, input / groups, features)`, and `bias`, shape
            `(features,)`.
        kernel_size: size along each spatial axis.
        strides: per axis, or one for all axes; 1 by default.
        padding: see `functional.pad_conv`.
        input_dilation: step between two positions of the input along each axis, with zeros between
            them; requires padding in numbers.
        kernel_dilation: step between two positions of a window along each axis.
        feature_group_count: number of groups of channels, each convolved separately.

    Raises:
        ArgumentShapeError: if the number of spatial axes is not that of `kernel_size`, or the
            channels are not divisible by the number of groups.
        ArgumentValueError: if the padding is unknown, or is named for a dilated input.

    >>> from weft.core import init
    >>> y, _ = init(conv)(jax.random.key(0), jnp.ones((1, 8, 8, 3)), 16, (3, 3), strides=(2, 2))
    >>> y.shape
    (1, 4, 4, 16)
    """
    window = as_tuple(kernel_size)
    options: dict[str, Any] = {
        "strides": functional.per_axis(strides, len(window)),
        "dilation": functional.per_axis(kernel_dilation, len(window)),
        "input_dilation": functional.per_axis(input_dilation, len(window)),
    }
    padded, pads = functional.pad_conv(
        inputs, window=window, padding=padding, **options
    )
    shape = (*window, inputs.shape[-1] // feature_group_count, features)
    kernel = scope.param("kernel", kernel_init, shape)
    added = scope.param("bias", bias_init, (features,)) if bias else None
    return functional.conv(
        *promote_dtype(padded, kernel, added, dtype=dtype, inexact=False),
        padding=pads,
        groups=feature_group_count,
        precision=precision,
        **options,
    )


def conv_transpose(
    scope: Scope,
    inputs: Num[Array, "batch *spatial input"],
    features: int,
    kernel_size: int | Sequence[int],
    strides: Sizes = None,
    padding: functional.ConvPadding = "SAME",
    kernel_dilation: Sizes = None,
    bias: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
) -> Num[Array, "batch *out_spatial features"]:
    """Applies a transposed convolution, for learned upsampling; see `conv` for the other arguments.

    Args:
        scope: has `kernel`, shape `(*kernel_size, input, features)`, and `bias`.
        strides: number of outputs per input position, per axis or for all axes; 1 by default.
        padding: see `functional.conv_transpose_explicit_padding`, or `(left, right)` per axis.

    Raises:
        ArgumentShapeError: if the number of spatial axes is not that of `kernel_size`.
        ArgumentValueError: if the padding is unknown.
    """
    window = as_tuple(kernel_size)
    kernel = scope.param(
        "kernel", kernel_init, (*window, inputs.shape[-1], features)
    )
    added = scope.param("bias", bias_init, (features,)) if bias else None
    return functional.conv_transpose(
        *promote_dtype(inputs, kernel, added, dtype=dtype, inexact=False),
        strides=functional.per_axis(strides, len(window)),
        padding=padding,
        dilation=functional.per_axis(kernel_dilation, len(window)),
        precision=precision,
    )
