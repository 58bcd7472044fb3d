"""Convolutions: with shared weights, separate weights for each position, and transposed."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from weft import errors, functional
from weft.functional.arrays import promote_dtype
from weft.functional.initializers import zeros_init
from weft.linen import linear, methods
from weft.linen.linear import Initializer, PromoteDtype, path_of
from weft.linen.module import Module
from weft.typing import DType

Sizes = int | Sequence[int] | None
Shape = tuple[int, ...]


class _Weights(NamedTuple):
    """Shapes of a convolution's parameters, and its function of an input with one batch axis."""

    kernel_shape: Shape
    bias_shape: Shape
    convolve: Callable[..., Array]


class _Conv(Module):
    features: int
    kernel_size: int | Sequence[int]
    strides: Sizes = 1
    padding: functional.Padding = "SAME"
    input_dilation: Sizes = 1
    kernel_dilation: Sizes = 1
    feature_group_count: int = 1
    use_bias: bool = True
    mask: Num[Array, "*kernel"] | None = None
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: lax.PrecisionLike = None
    kernel_init: Initializer = linear.default_kernel_init
    bias_init: Initializer = zeros_init()
    promote_dtype: PromoteDtype = promote_dtype
    conv_general_dilated: Callable[..., Array] | None = None
    conv_general_dilated_cls: Callable[[], Callable[..., Array]] | None = None

    @methods.compact
    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Applies the convolution to an input with any number of batch axes.

        Raises:
            ArgumentShapeError: if the input has too few axes, the channels are not divisible by the
                number of groups, or the mask does not have the kernel's shape.
            ArgumentValueError: if the padding is unknown or not supported.
            ScopeParamShapeError: if the given parameters have other sizes.
        """
        window = window_of(self, inputs)
        num_spatial = len(window)
        input_dilation = functional.per_axis(self.input_dilation, num_spatial)
        options: dict[str, Any] = {
            "strides": functional.per_axis(self.strides, num_spatial),
            "dilation": functional.per_axis(self.kernel_dilation, num_spatial),
        }
        padded, options["padding"] = functional.pad_conv(
            inputs,
            window=window,
            padding=self.padding,
            input_dilation=input_dilation,
            **options,
        )
        # The convolution dilates the input itself, so only its shape is needed here.
        spatial: list[int] = []
        padded_spatial = padded.shape[-num_spatial - 1 : -1]
        for size, dilation in zip(padded_spatial, input_dilation, strict=True):
            spatial.append((size - 1) * dilation + 1)
        weights = self._weights(
            window, inputs.shape[-1], tuple(spatial), options
        )
        x, kernel, bias = parameters(
            self, padded, weights.kernel_shape, weights.bias_shape
        )
        convolve = functools.partial(
            weights.convolve,
            weight=kernel,
            bias=bias,
            input_dilation=input_dilation,
            precision=self.precision,
            **options,
        )
        return functional.over_batch_axes(convolve, x, num_spatial + 1)

    @methods.nowrap
    @abc.abstractmethod
    def _weights(
        self,
        window: Shape,
        channels: int,
        spatial: Shape,
        options: dict[str, Any],
    ) -> _Weights:
        """Describes the parameters; `spatial` is the input's spatial shape, padded and dilated."""


class Conv(_Conv):
    """Convolution.

    The parameters are `kernel`, shape `(*kernel_size, input / groups, features)`, and `bias`, shape
    `(features,)`.

    Attributes:
        kernel_size: size along each spatial axis; a number means one axis.
        strides: per axis, or one for all axes.
        padding: VALID, SAME, SAME_LOWER, CIRCULAR, REFLECT or CAUSAL, a number, or for each axis a
            number or `(left, right)`; see `functional.pad_conv`.
        input_dilation: step between two positions of the input, with zeros between them.
        kernel_dilation: step between two positions of a window.
        feature_group_count: number of groups of channels, each convolved separately.
        mask: multiplied with the kernel; has its shape.
        dtype: dtype of the computation; by default promoted from input and parameters.
        conv_general_dilated: replaces `jax.lax.conv_general_dilated`.
        conv_general_dilated_cls: factory that takes precedence over `conv_general_dilated`.

    >>> layer = Conv(16, (3, 3), strides=2)
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))[0].shape
    (1, 4, 4, 16)
    """

    @methods.nowrap
    def _weights(
        self,
        window: Shape,
        channels: int,
        spatial: Shape,
        options: dict[str, Any],
    ) -> _Weights:
        groups = self.feature_group_count
        if channels % groups or self.features % groups:
            raise errors.ArgumentShapeError(
                f"Conv {path_of(self)} has feature_group_count={groups}; expected a number by "
                f"which the input's {channels} channels and the result's {self.features} can both "
                "be divided."
            )
        conv_general_dilated = self.conv_general_dilated
        if self.conv_general_dilated_cls is not None:
            conv_general_dilated = self.conv_general_dilated_cls()
        convolve = functools.partial(
            functional.conv,
            groups=groups,
            conv_general_dilated=conv_general_dilated,
        )
        kernel_shape = (*window, channels // groups, self.features)
        return _Weights(kernel_shape, (self.features,), convolve)


class ConvLocal(_Conv):
    """Convolution with separate weights for each output position.

    The parameters are `kernel`, shape `(*out_spatial, input * window, features)`, and `bias`, shape
    `(*out_spatial, features)`, where `window` is the product of `kernel_size`.

    The attributes are those of `Conv`, where `feature_group_count` must be 1, and
    `conv_general_dilated` and `conv_general_dilated_cls` None.

    >>> layer = ConvLocal(4, 3, padding="VALID")
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 2)))
    >>> y.shape, jax.tree.map(jnp.shape, variables["params"])
    ((1, 6, 4), {'bias': (6, 4), 'kernel': (6, 6, 4)})
    """

    @methods.nowrap
    def _weights(
        self,
        window: Shape,
        channels: int,
        spatial: Shape,
        options: dict[str, Any],
    ) -> _Weights:
        required_values = {
            "feature_group_count": 1,
            "conv_general_dilated": None,
            "conv_general_dilated_cls": None,
        }
        for name, value in required_values.items():
            if getattr(self, name) != value:
                raise errors.ArgumentValueError(
                    f"ConvLocal {path_of(self)} has {name}={getattr(self, name)!r}; expected "
                    f"{value}: only Conv can do otherwise."
                )
        out_spatial: Any = functional.conv_output_shape(
            spatial, window=window, **options
        )
        return _Weights(
            kernel_shape=(
                *out_spatial,
                channels * math.prod(window),
                self.features,
            ),
            bias_shape=(*out_spatial, self.features),
            convolve=functools.partial(functional.conv_local, window=window),
        )


def window_of(module: Any, inputs: Array) -> Shape:
    """Returns the window's size along each axis, after checking sizes and the input's axes."""
    name = type(module).__name__
    functional.check_sizes(
        name, features=module.features, kernel_size=module.kernel_size
    )
    window = functional.per_axis(module.kernel_size, 1)
    if inputs.ndim < len(window) + 1:
        raise errors.ArgumentShapeError(
            f"{name} {path_of(module)} has kernel_size={module.kernel_size}, for "
            f"{len(window)} spatial axes; expected an input with that many axes before its "
            f"channels, but its shape is {inputs.shape}."
        )
    return window


def parameters(
    module: Any, x: Array, kernel_shape: Shape, bias_shape: Shape
) -> list[Any]:
    """Returns the input, the masked kernel and the bias or None, in the computation's dtype."""
    mask = module.mask
    if mask is not None and mask.shape != kernel_shape:
        raise errors.ArgumentShapeError(
            f"{type(module).__name__} {path_of(module)} has a mask of shape {mask.shape}; expected "
            f"the kernel's, {kernel_shape}."
        )
    kernel, bias = linear.kernel_and_bias(module, kernel_shape, bias_shape)
    if mask is not None:
        kernel = kernel * mask
    return module.promote_dtype(x, kernel, bias, dtype=module.dtype)


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

    >>> layer = ConvTranspose(8, 3, strides=2)
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 4, 3)))[0].shape
    (1, 8, 8)
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
    kernel_init: Initializer = linear.default_kernel_init
    bias_init: Initializer = zeros_init()
    transpose_kernel: bool = False
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: DType | None = None

    @methods.compact
    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"]
    ) -> Num[Array, "*batch_out_spatial features"]:
        """Applies the convolution to an input with any number of batch axes; raises as `Conv`."""
        window = window_of(self, inputs)
        num_spatial = len(window)
        options: dict[str, Any] = {
            "strides": functional.per_axis(self.strides, num_spatial),
            "dilation": functional.per_axis(self.kernel_dilation, num_spatial),
            "transpose_kernel": self.transpose_kernel,
        }
        padded, options["padding"] = functional.pad_conv_transpose(
            inputs, window=window, padding=self.padding, **options
        )
        kernel_shape = (*window, inputs.shape[-1], self.features)
        if self.transpose_kernel:
            kernel_shape = (*window, self.features, inputs.shape[-1])
        x, kernel, bias = parameters(
            self, padded, kernel_shape, (self.features,)
        )
        convolve = functools.partial(
            functional.conv_transpose,
            weight=kernel,
            bias=bias,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            **options,
        )
        return functional.over_batch_axes(convolve, x, num_spatial + 1)
