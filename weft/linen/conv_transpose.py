"""Transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import functional
from weft.linen.conv import Sizes, parameters, window_of
from weft.linen.dtypes import promote_dtype
from weft.linen.initializers import zeros_init
from weft.linen.linear import Initializer, PromoteDtype, default_kernel_init
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.typing import DType

__all__ = ["ConvTranspose"]


class ConvTranspose(Module):
    """Transposed convolution, for learned upsampling.

    The parameters are `kernel`, shape `(*kernel_size, input, features)`, and `bias`, shape
    `(features,)`. See `Conv` for the other attributes.

    Attributes:
        strides: number of outputs per input position, per axis or one for all axes.
        padding: VALID, SAME or CIRCULAR, a number, or for each axis a number or `(left, right)` to
            add around the dilated input; see `functional.pad_conv_transpose`.
        transpose_kernel: whether to compute the gradient of the convolution with the kernel, whose
            last axes then are `(features, input)`.
        preferred_element_type: dtype of the sum, see `jax.lax.conv_general_dilated`.

    Example:
        >>> import jax
        >>> layer = ConvTranspose(8, 3, strides=2)
        >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 4, 3)))
        >>> y.shape, variables["params"]["kernel"].shape
        ((1, 8, 8), (3, 3, 8))
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: Sizes = None
    padding: functional.Padding = "SAME"
    kernel_dilation: Sizes = None
    use_bias: bool = True
    mask: Num[Array, "*kernel"] | None = None
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = zeros_init()
    transpose_kernel: bool = False
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: DType | None = None

    @compact
    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Applies the convolution to an input with any number of batch axes; raises as `Conv`."""
        functional.check_sizes(
            type(self).__name__, features=self.features, kernel_size=self.kernel_size
        )
        window = window_of(self, inputs)
        n = len(window)
        strides = functional.per_axis(self.strides, n)
        dilation = functional.per_axis(self.kernel_dilation, n)
        padded, zeros = functional.pad_conv_transpose(
            inputs,
            window=window,
            strides=strides,
            padding=self.padding,
            dilation=dilation,
            transpose_kernel=self.transpose_kernel,
        )
        channels = (inputs.shape[-1], self.features)
        shape = (*window, *(reversed(channels) if self.transpose_kernel else channels))
        x, kernel, bias = parameters(self, padded, shape, (self.features,))
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
            n + 1,
        )
