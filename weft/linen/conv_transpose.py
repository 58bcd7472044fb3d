"""Transposed convolutions, which make more positions of fewer."""

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
    """A convolution of the input with zeros put between its positions: a learned upsampling.

    The parameters are `kernel`, shape `(*kernel_size, input, features)`, and `bias`, shape
    `(features,)`.

    Attributes:
        features: the channels of the result.
        kernel_size: along each spatial axis; one number is for one axis.
        strides: how many outputs there are for each position, along each axis or along all.
        padding: VALID, SAME or CIRCULAR, a number, or for each axis a number or `(left, right)` to
            be put around the input with its zeros; see `functional.pad_conv_transpose`.
        kernel_dilation: the step between two positions of one window.
        use_bias: whether to add a bias.
        mask: of the kernel's shape, which it is multiplied by.
        dtype: of the computation; by default the one to which input and parameters promote.
        param_dtype: of the parameters.
        precision: of the multiplication, as in `jax.lax.conv_general_dilated`.
        kernel_init: makes the kernel.
        bias_init: makes the bias.
        transpose_kernel: whether this is the gradient of the convolution with its kernel, whose
            last axes then are `(features, input)`.
        promote_dtype: gives input and parameters the dtype of the computation.
        preferred_element_type: the dtype of the sum, as in `jax.lax.conv_general_dilated`.

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
        """Applies the convolution.

        Args:
            inputs: the input, with any number of batch axes.

        Raises:
            ArgumentShapeError: if the input has too few axes, or the mask has another shape than
                the kernel.
            ArgumentValueError: if the padding is unknown.
            ScopeParamShapeError: if the parameters that were given are for other sizes.
        """
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
