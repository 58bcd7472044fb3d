"""Convolutions, with the same weights at each position."""

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
    """A convolution.

    The parameters are `kernel`, shape `(*kernel_size, in_features / groups, out_features)`, and
    `bias`, shape `(out_features,)` or None.

    Args:
        in_features: the channels of the input.
        out_features: the channels of the result.
        kernel_size: along each spatial axis; one number is for one axis.
        strides: the step between two outputs along each axis, or along all.
        padding: VALID, SAME, SAME_LOWER, CIRCULAR, REFLECT or CAUSAL, a number, or for each axis a
            number or `(left, right)`; see `functional.pad_conv`.
        input_dilation: the step between two positions of the input, with zeros between them.
        kernel_dilation: the step between two positions of one window.
        feature_group_count: the channels are cut into so many groups, each convolved by itself.
        use_bias: whether to add a bias.
        mask: of the kernel's shape, which it is multiplied by.
        dtype: of the computation; by default the one to which input and parameters promote.
        param_dtype: of the parameters.
        precision: of the multiplication, as in `jax.lax.conv_general_dilated`.
        kernel_init: makes the kernel.
        bias_init: makes the bias.
        conv_general_dilated: convolves in place of `jax.lax.conv_general_dilated`.
        promote_dtype: gives input and parameters the dtype of the computation.
        preferred_element_type: the dtype of the sum, as in `jax.lax.conv_general_dilated`.
        rngs: its stream `params` gives a key for each parameter.
        kernel_metadata: of the kernel's variable.
        bias_metadata: of the bias's variable.

    Raises:
        ArgumentShapeError: if the channels cannot be cut into the groups, or the mask has another
            shape than the kernel.

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
                f"Conv was given feature_group_count={groups}; expected a number by which "
                f"in_features={in_features} and out_features={out_features} can both be divided."
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
            inputs: the input, with any number of batch axes.
            out_sharding: how the result is laid out, with one batch axis, as in
                `jax.lax.conv_general_dilated`.

        Raises:
            ArgumentShapeError: if the input has too few axes or other channels, or the mask another
                shape than the kernel.
            ArgumentValueError: if the padding is unknown, or has no meaning here.
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
    """Sizes as an attribute keeps them: sequences as tuples."""
    return sizes if sizes is None or isinstance(sizes, int) else tuple(sizes)


def as_padding(padding: functional.Padding) -> functional.Padding:
    """A padding as an attribute keeps it: sequences as tuples."""
    if isinstance(padding, str | int):
        return padding
    return tuple(sides if isinstance(sides, int) else tuple(sides) for sides in padding)


def check_input(layer: Any, inputs: Array, channels: int) -> None:
    """Checks the rank and the channels of what a convolution is applied to.

    Args:
        layer: the convolution.
        inputs: what it is applied to.
        channels: those that its kernel takes.

    Raises:
        ArgumentShapeError: if they do not fit.
    """
    n = len(layer.kernel_size)
    if inputs.ndim < n + 1 or inputs.shape[-1] != channels:
        raise ArgumentShapeError(
            f"{type(layer).__name__} with in_features={layer.in_features} and "
            f"kernel_size={layer.kernel_size} was given an input of shape {inputs.shape}; expected "
            f"(..., *spatial, {channels}) with {n} spatial axes."
        )


def check_mask(layer: Any, shape: tuple[int, ...]) -> None:
    """Checks that the mask of a convolution, if it has one, has the shape of its kernel.

    Args:
        layer: the convolution.
        shape: that of its kernel.

    Raises:
        ArgumentShapeError: if they differ.
    """
    if layer.mask is not None and layer.mask.shape != shape:
        raise ArgumentShapeError(
            f"{type(layer).__name__} with in_features={layer.in_features}, "
            f"out_features={layer.out_features} and kernel_size={layer.kernel_size} has a mask of "
            f"shape {layer.mask.shape}; expected that of the kernel, {shape}."
        )


def masked_kernel(layer: Any) -> Array:
    """The kernel of a convolution, times its mask.

    Args:
        layer: the convolution.

    Raises:
        ArgumentShapeError: if they have different shapes.
    """
    kernel = layer.kernel[...]
    if layer.mask is None:
        return kernel
    check_mask(layer, kernel.shape)
    return kernel * layer.mask
