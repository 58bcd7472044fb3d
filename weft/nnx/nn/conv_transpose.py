"""Transposed convolution layer."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import functional
from weft.functional.initializers import zeros
from weft.nnx.module import Module
from weft.nnx.nn.conv import Sizes, as_padding, as_sizes, check_input, check_mask, masked_kernel
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

__all__ = ["ConvTranspose"]


class ConvTranspose(Module):
    """Transposed convolution, a learned upsampling.

    The parameters are `kernel`, shape `(*kernel_size, in_features, out_features)`, and `bias`,
    shape `(out_features,)` or None. Other arguments are those of `Linear`.

    Args:
        kernel_size: window size along each spatial axis; a number means one axis.
        strides: number of output positions per input position, per axis or for all.
        padding: VALID, SAME or CIRCULAR, a number, or for each axis a number or `(left, right)`,
            applied to the dilated input; see `functional.pad_conv_transpose`.
        kernel_dilation: dilation of the window.
        mask: multiplied with the kernel; has its shape.
        transpose_kernel: whether to compute the gradient of the convolution with this kernel, whose
            last axes then are `(out_features, in_features)`.

    Raises:
        ArgumentShapeError: if the mask's shape is not the kernel's.

    Example:
        >>> from weft import nnx
        >>> layer = ConvTranspose(3, 8, 3, strides=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 4, 3))).shape, layer.kernel.shape
        ((1, 8, 8), (3, 3, 8))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = None,
        *,
        padding: functional.Padding = "SAME",
        kernel_dilation: Sizes = None,
        use_bias: bool = True,
        mask: Num[Array, "*kernel"] | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = zeros,
        transpose_kernel: bool = False,
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
        self.kernel_size = functional.per_axis(kernel_size, 1)
        self.in_features = in_features
        self.out_features = out_features
        self.strides = as_sizes(strides)
        self.padding = as_padding(padding)
        self.kernel_dilation = as_sizes(kernel_dilation)
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

        channels = (in_features, out_features)
        channels = channels[::-1] if transpose_kernel else channels
        self.kernel_shape = (*self.kernel_size, *channels)
        self.kernel = new_param(kernel_init, rngs, self.kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = new_param(bias_init, rngs, (out_features,), param_dtype, bias_metadata)
        check_mask(self, self.kernel.shape)

    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"]
    ) -> Num[Array, "*batch_out_spatial output"]:
        """Applies the convolution.

        Args:
            inputs: array with any number of batch axes.

        Raises:
            ArgumentValueError: if the padding is unknown.
        """
        kernel = masked_kernel(self)
        check_input(self, inputs, kernel.shape[-1 if self.transpose_kernel else -2])
        window = self.kernel_size
        strides = functional.per_axis(self.strides, len(window))
        dilation = functional.per_axis(self.kernel_dilation, len(window))
        padded, zeros = functional.pad_conv_transpose(
            inputs,
            window=window,
            strides=strides,
            padding=self.padding,
            dilation=dilation,
            transpose_kernel=self.transpose_kernel,
        )
        x, kernel, bias = self.promote_dtype(
            (padded, kernel, value_of(self.bias)), dtype=self.dtype
        )
        return functional.over_batch_axes(
            lambda x: functional.conv_transpose(
                x,
                kernel,
                bias,
                strides=strides,
                padding=zeros,
                dilation=dilation,
                transpose_kernel=self.transpose_kernel,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
            ),
            x,
            len(window) + 1,
        )
