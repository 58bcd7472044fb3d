"""Transposed convolutions: layers that upsample their input by a learned window.

Parameters: `weight` of shape `(*window, input_dim / num_input_dim_groups, output_dim)`, and `bias`.
"""

from collections.abc import Sequence

from weft.config import REQUIRED, Required, config_class
from weft.functional import (
    compute_conv_transpose_paddings,
    conv_transpose,
    conv_transpose_output_shape,
)
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.conv_layers import BaseConv, ConvPaddingType
from weft.hierarchy.conv_time import convolve_with_paddings, time_axis
from weft.hierarchy.param_init import FanAxes
from weft.typing import Tensor


class BaseConvTranspose(BaseConv):
    """Base of the transposed convolutions over any number of spatial axes."""

    def _convolve(self, x: Tensor) -> Tensor:
        sizes = self._window_sizes()
        y = conv_transpose(
            x,
            self.parameters["weight"],
            self._bias(),
            strides=sizes["strides"],
            padding=sizes["padding"],
            dilation=sizes["dilation"],
            groups=self.config.num_input_dim_groups,
            transpose_kernel=self._transposes_kernel(),
        )
        self._add_tensor_stats("outputs", y)
        return y

    def _transposes_kernel(self) -> bool:
        """Returns whether the weight is that of the convolution whose gradient this is."""
        return False

    def _out_spatial(self, in_spatial: Sequence[int | None]) -> tuple[int | None, ...]:
        return conv_transpose_output_shape(in_spatial, **self._window_sizes())


class Conv1DTranspose(BaseConvTranspose):
    """Transposed convolution over time, optionally of padded sequences."""

    @config_class
    class Config(BaseConvTranspose.Config):
        """Configures a Conv1DTranspose.

        Attributes:
            output_dim: the number of output channels.
            strides: number of outputs per input.
            padding: "SAME", "VALID", "CAUSAL", or one pair (left, right) in a tuple.
            dilation: the step between two positions of a window.
            anchor: as for `Conv1DWithPadding`.
        """

        output_dim: Required[int] = REQUIRED
        window: int = 1
        strides: int = 1
        padding: Required[ConvPaddingType] = REQUIRED
        dilation: int = 1
        bias: bool = True
        anchor: int | None = None

    _num_axes = 1

    def forward(self, x: Tensor, *, paddings: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns `Float[Array, "batch out_time output_dim"]`, and its paddings or None.

        Args:
            x: `Float[Array, "batch time input_dim"]`.
            paddings: `Num[Array, "batch time"]`, 1 for padding; None if `x` has none.
        """
        if paddings is None:
            return self._convolve(x), None
        return convolve_with_paddings(self._convolve, self.conv_paddings, x, paddings)

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output."""
        return compute_conv_transpose_paddings(paddings, **time_axis(self))


class Conv2DTranspose(BaseConvTranspose):
    """Transposed convolution over height and width."""

    @config_class
    class Config(BaseConvTranspose.Config):
        """Configures a Conv2DTranspose, with window sizes, strides and dilations per axis.

        Attributes:
            output_dim: the number of output channels.
            strides: numbers of outputs per input.
            padding: "SAME", "VALID", "CAUSAL" (the first axis is time), or a pair (before, after)
                per axis.
            dilation: the steps between two positions of a window.
            transpose_kernel: whether the weight is flipped, with its last two axes exchanged, as
                that of the convolution whose gradient this is.
        """

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int] = (1, 1)
        strides: tuple[int, int] = (1, 1)
        padding: Required[ConvPaddingType] = REQUIRED
        dilation: tuple[int, int] = (1, 1)
        bias: bool = True
        transpose_kernel: bool = False

    _num_axes = 2

    def _transposes_kernel(self) -> bool:
        return self.config.transpose_kernel

    def _channels(self) -> tuple[int, int]:
        cfg = self.config
        if not cfg.transpose_kernel:
            return super()._channels()
        return cfg.output_dim // cfg.num_input_dim_groups, cfg.input_dim

    def _compute_fan_axes(self, name: str, spec: ParameterSpec) -> FanAxes | None:
        if name == "weight" and self.config.transpose_kernel:
            return FanAxes(in_axis=-1, out_axis=-2)
        return super()._compute_fan_axes(name, spec)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch height width input_dim"]`."""
        return self._convolve(x)


class Conv2DTransposeWith1DPadding(Conv2DTranspose):
    """Transposed convolution over time and another axis for padded sequences."""

    @config_class
    class Config(Conv2DTranspose.Config):
        """Configures a Conv2DTransposeWith1DPadding; for `anchor` see `Conv1DWithPadding`."""

        anchor: int | None = None

    def forward(self, x: Tensor, *, paddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time out_width output_dim"]` and its paddings.

        Args:
            x: `Float[Array, "batch time width input_dim"]`.
            paddings: `Num[Array, "batch time"]`, 1 for padding.
        """
        return convolve_with_paddings(self._convolve, self.conv_paddings, x, paddings)

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output."""
        return compute_conv_transpose_paddings(paddings, **time_axis(self))


class Conv3DTranspose(BaseConvTranspose):
    """Transposed convolution over three axes."""

    @config_class
    class Config(BaseConvTranspose.Config):
        """Configures a Conv3DTranspose; fields as in `Conv2DTranspose.Config`."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int, int] = (1, 1, 1)
        strides: tuple[int, int, int] = (1, 1, 1)
        padding: Required[ConvPaddingType] = REQUIRED
        dilation: tuple[int, int, int] = (1, 1, 1)
        bias: bool = True

    _num_axes = 3

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch depth height width input_dim"]`."""
        return self._convolve(x)
