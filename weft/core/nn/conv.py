"""Convolutions of a scope."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from weft import functional
from weft.core.nn.linear import Initializer, default_kernel_init
from weft.core.scope import Scope
from weft.errors import ArgumentShapeError, ArgumentValueError

Padding = str | Sequence[tuple[int, int]]


def explicit_padding(
    inputs: Num[Array, "batch *spatial channels"],
    window: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
    dilation: Sequence[int] | None = None,
) -> Sequence[tuple[int, int]]:
    """The padding of each spatial axis; that of "SAME" depends on the input's size.

    Args:
        inputs: the input.
        window: its size along each spatial axis.
        strides: along each axis; 1 by default.
        padding: "SAME", "VALID", or the answer.
        dilation: of the window; 1 by default.
    """
    if not isinstance(padding, str):
        return padding
    dilation = dilation or (1,) * len(window)
    span = [(w - 1) * d + 1 for w, d in zip(window, dilation, strict=True)]
    strides = tuple(strides or (1,) * len(window))
    return lax.padtype_to_pads(inputs.shape[1:-1], span, strides, padding)


def conv(
    scope: Scope,
    inputs: Num[Array, "batch *spatial input"],
    features: int,
    kernel_size: int | Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "SAME",
    input_dilation: Sequence[int] | None = None,
    kernel_dilation: Sequence[int] | None = None,
    feature_group_count: int = 1,
    bias: bool = True,
    dtype: DTypeLike = jnp.float32,
    precision: lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
) -> Num[Array, "batch *out_spatial features"]:
    """A convolution.

    Args:
        scope: has `kernel`, shape `(*kernel_size, input / groups, features)`, and `bias`, shape
            `(features,)`.
        inputs: the input.
        features: the channels of the result.
        kernel_size: along each spatial axis.
        strides: the step between two outputs along each axis; 1 by default.
        padding: "SAME", "VALID", or `(left, right)` for each spatial axis.
        input_dilation: the step between two positions of the input along each axis, with zeros
            between them; then the padding must be given in numbers.
        kernel_dilation: the step between two positions of one window along each axis.
        feature_group_count: the channels are cut into so many groups, each convolved by itself.
        bias: whether to add a bias.
        dtype: of the computation.
        precision: of the multiplication, as in `jax.lax.conv_general_dilated`.
        kernel_init: makes the kernel.
        bias_init: makes the bias.

    Raises:
        ArgumentShapeError: if the input has not one spatial axis for each of `kernel_size`.
        ArgumentValueError: if a named padding is to go around a dilated input.

    Example:
        >>> from weft.core import init
        >>> y, _ = init(conv)(jax.random.key(0), jnp.ones((1, 8, 8, 3)), 16, (3, 3), strides=(2, 2))
        >>> y.shape
        (1, 4, 4, 16)
    """
    window = _window(inputs, kernel_size)
    if input_dilation is not None and isinstance(padding, str) and padding != "VALID":
        raise ArgumentValueError(
            f"padding={padding!r} with input_dilation={input_dilation}: give the padding as "
            "numbers, or use conv_transpose."
        )
    shape = (*window, inputs.shape[-1] // feature_group_count, features)
    kernel = scope.param("kernel", kernel_init, shape)
    added = scope.param("bias", bias_init, (features,)) if bias else None
    return functional.conv(
        jnp.asarray(inputs, dtype),
        jnp.asarray(kernel, dtype),
        None if added is None else jnp.asarray(added, dtype),
        strides=strides or 1,
        padding=explicit_padding(inputs, window, strides, padding, kernel_dilation),
        input_dilation=input_dilation or 1,
        dilation=kernel_dilation or 1,
        groups=feature_group_count,
        precision=precision,
    )


def conv_transpose(
    scope: Scope,
    inputs: Num[Array, "batch *spatial input"],
    features: int,
    kernel_size: int | Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "SAME",
    kernel_dilation: Sequence[int] | None = None,
    bias: bool = True,
    dtype: DTypeLike = jnp.float32,
    precision: lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
) -> Num[Array, "batch *out_spatial features"]:
    """A convolution of the input with zeros put between its positions: a learned upsampling.

    Args:
        scope: has `kernel`, shape `(*kernel_size, input, features)`, and `bias`.
        inputs: the input.
        features: the channels of the result.
        kernel_size: along each spatial axis.
        strides: how many outputs there are for each position along each axis; 1 by default.
        padding: "SAME", "VALID", or `(left, right)` for each spatial axis.
        kernel_dilation: see `conv`.
        bias: whether to add a bias.
        dtype: of the computation.
        precision: see `conv`.
        kernel_init: makes the kernel.
        bias_init: makes the bias.

    Raises:
        ArgumentShapeError: if the input has not one spatial axis for each of `kernel_size`.
    """
    window = _window(inputs, kernel_size)
    kernel = scope.param("kernel", kernel_init, (*window, inputs.shape[-1], features))
    added = scope.param("bias", bias_init, (features,)) if bias else None
    return functional.conv_transpose(
        jnp.asarray(inputs, dtype),
        jnp.asarray(kernel, dtype),
        None if added is None else jnp.asarray(added, dtype),
        strides=strides or 1,
        padding=padding,
        dilation=kernel_dilation or 1,
        precision=precision,
    )


def _window(inputs: Array, kernel_size: int | Sequence[int]) -> tuple[int, ...]:
    window = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
    if inputs.ndim != len(window) + 2:
        raise ArgumentShapeError(
            f"kernel_size {window} is for {len(window)} spatial axes, so the input must have "
            f"{len(window) + 2}: batch, space, channels. Its shape is {inputs.shape}."
        )
    return window
