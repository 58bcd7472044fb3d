"""Convolution layers, and transposed convolution layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from jax import lax
from jaxtyping import Array, Num

from weft import errors, functional
from weft.functional.arrays import OutSharding
from weft.nnx.nn import parameters

Sizes = int | Sequence[int] | None


@dataclass(repr=False, eq=False)
class _Conv(parameters.KernelModule):
    """Fields and steps that both convolutions have."""

    in_features: int
    out_features: int
    kernel_size: int | Sequence[int]
    strides: Sizes = 1
    _: KW_ONLY
    padding: functional.Padding = "SAME"
    kernel_dilation: Sizes = 1
    use_bias: bool = True
    mask: Num[Array, "*kernel"] | None = None

    def __post_init__(self, *arguments: *parameters.KernelArguments) -> None:
        parameters.check_sizes(
            self, "in_features", "out_features", "kernel_size"
        )
        window = functional.per_axis(self.kernel_size, 1)
        self.kernel_size = window
        self.strides = _as_sizes(self.strides)
        self.kernel_dilation = _as_sizes(self.kernel_dilation)
        if not isinstance(self.padding, str | int):
            padding: list[int | Sequence[int]] = []
            for sizes in self.padding:
                padding.append(
                    sizes if isinstance(sizes, int) else tuple(sizes)
                )
            self.padding = tuple(padding)
        self.kernel_shape = (*window, *self._kernel_channels())
        bias_shape = (self.out_features,) if self.use_bias else None
        self._make_parameters(self.kernel_shape, bias_shape, *arguments)
        self._check_mask(self.kernel.shape)

    def _kernel_channels(self) -> tuple[int, int]:
        """Returns the last two sizes of the kernel."""
        raise NotImplementedError

    def _check_mask(self, shape: tuple[int, ...]) -> None:
        if self.mask is not None and self.mask.shape != shape:
            raise errors.ArgumentShapeError(
                f"{type(self).__name__} with in_features={self.in_features}, "
                f"out_features={self.out_features} and kernel_size={self.kernel_size} has a mask "
                f"of shape {self.mask.shape}; expected the kernel's shape, {shape}."
            )

    def _masked_kernel(self) -> Array:
        kernel = self.kernel[...]
        if self.mask is None:
            return kernel
        self._check_mask(kernel.shape)
        return kernel * self.mask

    def _convolved(
        self,
        pad: Callable[..., tuple[Array, functional.Padding]],
        convolve: Callable[..., Array],
        inputs: Array,
        channels: int,
        kernel: Array,
        sizes: dict[str, Sizes],
        **options: bool,
    ) -> Array:
        """Pads and convolves an input; both functions receive sizes of all axes and options."""
        window = functional.per_axis(self.kernel_size, 1)
        if inputs.ndim < len(window) + 1 or inputs.shape[-1] != channels:
            raise errors.ArgumentShapeError(
                f"{type(self).__name__} with in_features={self.in_features} and "
                f"kernel_size={window} was given an input of shape {inputs.shape}; expected "
                f"(..., *spatial, {channels}) with {len(window)} spatial axes."
            )
        sizes_per_axis: dict[str, Sequence[int]] = {}
        for name, size in sizes.items():
            sizes_per_axis[name] = functional.per_axis(size, len(window))
        # What JAX has no padding for, such as CIRCULAR; zeros are left to the convolution.
        padded, zero_padding = pad(
            inputs,
            window=window,
            padding=self.padding,
            **sizes_per_axis,
            **options,
        )
        x, kernel, bias = self._promoted(padded, kernel)

        def convolve_batch(x: Array) -> Array:
            return convolve(
                x,
                kernel,
                bias,
                padding=zero_padding,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                **sizes_per_axis,
                **options,
            )

        return functional.over_batch_axes(convolve_batch, x, len(window) + 1)


def _as_sizes(sizes: Sizes) -> Sizes:
    """Returns sizes with a sequence as a tuple, which is static."""
    if sizes is None or isinstance(sizes, int):
        return sizes
    return tuple(sizes)


@dataclass(repr=False, eq=False)
class Conv(_Conv):
    """Convolution with any number of spatial axes.

    The parameters are `kernel`, shape `(*kernel_size, in_features / groups, out_features)`, and
    `bias`, shape `(out_features,)` or None. Other arguments are those of `Linear`.

    Args:
        kernel_size: window size along each spatial axis; a number means one axis.
        strides: window stride, per axis or for all.
        padding: VALID, SAME, SAME_LOWER, CIRCULAR, REFLECT or CAUSAL, a number, or for each axis a
            number or `(left, right)`; see `functional.pad_conv`.
        input_dilation: dilation of the input, with zeros between positions.
        feature_group_count: number of channel groups, each convolved separately.
        mask: multiplied with the kernel; has its shape.
        conv_general_dilated: replaces `jax.lax.conv_general_dilated`.

    Raises ArgumentShapeError if the groups do not divide the channels, or the mask does not fit.

    >>> layer = Conv(3, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 8, 8, 3))).shape
    (1, 4, 4, 16)
    """

    _: KW_ONLY
    input_dilation: Sizes = 1
    feature_group_count: int = 1
    conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated

    def __post_init__(self, *arguments: *parameters.KernelArguments) -> None:
        self.input_dilation = _as_sizes(self.input_dilation)
        super().__post_init__(*arguments)

    def _kernel_channels(self) -> tuple[int, int]:
        groups = self.feature_group_count
        if self.in_features % groups or self.out_features % groups:
            raise errors.ArgumentShapeError(
                f"Conv was given feature_group_count={groups}; expected a divisor of both "
                f"in_features={self.in_features} and out_features={self.out_features}."
            )
        return self.in_features // groups, self.out_features

    def __call__(
        self,
        inputs: Num[Array, "*batch_spatial input"],
        out_sharding: OutSharding = None,
    ) -> Num[Array, "*batch_out_spatial output"]:
        """Applies the convolution to an input with any number of batch axes.

        Args:
            out_sharding: sharding of the output, which then has one batch axis, as in
                `jax.lax.conv_general_dilated`.

        Raises ArgumentValueError if the padding is unknown or not applicable.
        """
        kernel = self._masked_kernel()
        groups = self.feature_group_count
        convolve = functools.partial(
            functional.conv,
            groups=groups,
            conv_general_dilated=self.conv_general_dilated,
            out_sharding=out_sharding,
        )
        sizes = {
            "strides": self.strides,
            "dilation": self.kernel_dilation,
            "input_dilation": self.input_dilation,
        }
        channels = kernel.shape[-2] * groups
        return self._convolved(
            functional.pad_conv, convolve, inputs, channels, kernel, sizes
        )


@dataclass(repr=False, eq=False)
class ConvTranspose(_Conv):
    """Transposed convolution, a learned upsampling.

    The parameters are `kernel`, shape `(*kernel_size, in_features, out_features)`, and `bias`,
    shape `(out_features,)` or None. Other arguments are those of `Conv`.

    Args:
        strides: number of output positions per input position, per axis or for all.
        padding: VALID, SAME or CIRCULAR, a number, or for each axis a number or `(left, right)`,
            applied to the dilated input; see `functional.pad_conv_transpose`.
        transpose_kernel: whether to compute the gradient of the convolution with this kernel, whose
            last axes then are `(out_features, in_features)`.

    Raises ArgumentShapeError if the mask's shape is not the kernel's.

    >>> layer = ConvTranspose(3, 8, 3, strides=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 4, 3))).shape, layer.kernel.shape
    ((1, 8, 8), (3, 3, 8))
    """

    strides: Sizes = None
    _: KW_ONLY
    kernel_dilation: Sizes = None
    transpose_kernel: bool = False

    def _kernel_channels(self) -> tuple[int, int]:
        if self.transpose_kernel:
            return self.out_features, self.in_features
        return self.in_features, self.out_features

    def __call__(
        self, inputs: Num[Array, "*batch_spatial input"]
    ) -> Num[Array, "*batch_out_spatial output"]:
        """Applies the convolution to an input with any number of batch axes.

        Raises ArgumentValueError if the padding is unknown.
        """
        kernel = self._masked_kernel()
        channel_axis = -1 if self.transpose_kernel else -2
        return self._convolved(
            functional.pad_conv_transpose,
            functional.conv_transpose,
            inputs,
            kernel.shape[channel_axis],
            kernel,
            {"strides": self.strides, "dilation": self.kernel_dilation},
            transpose_kernel=self.transpose_kernel,
        )
