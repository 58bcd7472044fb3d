"""Convolution layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import functional
from weft.errors import ArgumentShapeError
from weft.functional.initializers import zeros
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.linear import value_of
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    default_kernel_init,
    new_param,
)
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["Conv"]

Sizes = int | Sequence[int] | None


class Conv(Module):
    """Convolution with any number of spatial axes.

    The parameters are `kernel`, shape `(*kernel_size, in_features / groups, out_features)`, and
    `bias`, shape `(out_features,)` or None. Other arguments are those of `Linear`.

    Args:
        kernel_size: window size along each spatial axis; a number means one axis.
        strides: window stride, per axis or for all.
        padding: VALID, SAME, SAME_LOWER, CIRCULAR, REFLECT or CAUSAL, a number, or for each axis a
            number or `(left, right)`; see `functional.pad_conv`.
        input_dilation: dilation of the input, with zeros between positions.
        kernel_dilation: dilation of the window.
        feature_group_count: number of channel groups, each convolved separately.
        mask: multiplied with the kernel; has its shape.
        conv_general_dilated: replaces `jax.lax.conv_general_dilated`.

    Raises:
        ArgumentShapeError: if the groups do not divide the channels, or the mask's shape is not the
            kernel's.

    Example:
        >>> from weft import nnx
        >>> layer = Conv(3, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 8, 8, 3))).shape, layer.kernel.shape
        ((1, 4, 4, 16), (3, 3, 3, 16))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = 1,
        *,
        padding: functional.Padding = "SAME",
        input_dilation: Sizes = 1,
        kernel_dilation: Sizes = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: Num[Array, "*kernel"] | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DType | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__,
            in_features=in_features,
            out_features=out_features,
            kernel_size=kernel_size,
        )
        groups = feature_group_count
        if in_features % groups or out_features % groups:
            raise ArgumentShapeError(
                f"Conv was given feature_group_count={groups}; expected a divisor of both "
                f"in_features={in_features} and out_features={out_features}."
            )
        self.kernel_size = functional.per_axis(kernel_size, 1)
        self.kernel_shape = (*self.kernel_size, in_features // groups, out_features)
        self.kernel = new_param(kernel_init, rngs, self.kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = new_param(bias_init, rngs, (out_features,), param_dtype, bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.strides = as_sizes(strides)
        self.padding = as_padding(padding)
        self.input_dilation = as_sizes(input_dilation)
        self.kernel_dilation = as_sizes(kernel_dilation)
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        check_mask(self, self.kernel.shape)

    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"], out_sharding: Any = None
    ) -> Num[Array, "*batch_out_spatial output"]:
        """Applies the convolution.

        Args:
            inputs: array with any number of batch axes.
            out_sharding: sharding of the output, which then has one batch axis, as in
                `jax.lax.conv_general_dilated`.

        Raises:
            ArgumentValueError: if the padding is unknown or not applicable.
        """
        kernel = masked_kernel(self)
        window, groups = self.kernel_size, self.feature_group_count
        check_input(self, inputs, kernel.shape[-2] * groups)
        sizes = (self.strides, self.kernel_dilation, self.input_dilation)
        strides, dilation, input_dilation = (functional.per_axis(s, len(window)) for s in sizes)
        padded, zeros = functional.pad_conv(
            inputs,
            window=window,
            strides=strides,
            padding=self.padding,
            dilation=dilation,
            input_dilation=input_dilation,
        )
        x, kernel, bias = self.promote_dtype(
            (padded, kernel, value_of(self.bias)), dtype=self.dtype
        )
        return functional.over_batch_axes(
            lambda x: functional.conv(
                x,
                kernel,
                bias,
                strides=strides,
                padding=zeros,
                dilation=dilation,
                input_dilation=input_dilation,
                groups=groups,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                conv_general_dilated=self.conv_general_dilated,
                out_sharding=out_sharding,
            ),
            x,
            len(window) + 1,
        )


def as_sizes(sizes: Sizes) -> int | tuple[int, ...] | None:
    """Returns sizes with sequences as tuples."""
    return sizes if sizes is None or isinstance(sizes, int) else tuple(sizes)


def as_padding(padding: functional.Padding) -> functional.Padding:
    """Returns a padding with sequences as tuples."""
    if isinstance(padding, str | int):
        return padding
    return tuple(sides if isinstance(sides, int) else tuple(sides) for sides in padding)


def check_input(layer: Any, inputs: Array, channels: int) -> None:
    """Checks that a convolution's input has the rank and channels of its kernel.

    Raises:
        ArgumentShapeError: if not.
    """
    n = len(layer.kernel_size)
    if inputs.ndim < n + 1 or inputs.shape[-1] != channels:
        raise ArgumentShapeError(
            f"{type(layer).__name__} with in_features={layer.in_features} and "
            f"kernel_size={layer.kernel_size} was given an input of shape {inputs.shape}; expected "
            f"(..., *spatial, {channels}) with {n} spatial axes."
        )


def check_mask(layer: Any, shape: tuple[int, ...]) -> None:
    """Raises `ArgumentShapeError` if a convolution's mask differs in shape from its kernel."""
    if layer.mask is not None and layer.mask.shape != shape:
        raise ArgumentShapeError(
            f"{type(layer).__name__} with in_features={layer.in_features}, "
            f"out_features={layer.out_features} and kernel_size={layer.kernel_size} has a mask of "
            f"shape {layer.mask.shape}; expected the kernel's shape, {shape}."
        )


def masked_kernel(layer: Any) -> Array:
    """Returns the kernel of a convolution times its mask.

    Raises:
        ArgumentShapeError: if their shapes differ.
    """
    kernel = layer.kernel[...]
    if layer.mask is None:
        return kernel
    check_mask(layer, kernel.shape)
    return kernel * layer.mask
