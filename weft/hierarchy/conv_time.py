"""Convolutions over time for padded sequences.

Paddings are `Num[Array, "batch time"]`, 1 for padding and 0 elsewhere. Layers zero padded positions
of their inputs and outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.functional import compute_conv_paddings, conv_explicit_padding, conv_output_shape
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.conv_layers import BaseConv, Conv1D, Conv2D
from weft.hierarchy.module import nowrap
from weft.typing import Tensor


def zero_padding(x: Tensor, paddings: Tensor) -> Tensor:
    """Returns `x`, `Num[Array, "batch time *rest"]`, with zeros at padded positions."""
    live = (paddings == 0).reshape(*paddings.shape, *[1] * (x.ndim - 2))
    return jnp.where(live, x, jnp.zeros((), x.dtype))


def convolve_with_paddings(
    convolve: Callable[[Tensor], Tensor],
    conv_paddings: Callable[[Tensor], Tensor],
    x: Tensor,
    paddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolves `x` without its padding, and returns the output and its paddings.

    Args:
        convolve: from `x` to the output.
        conv_paddings: from `paddings` to those of the output.
        x: `Num[Array, "batch time *rest"]`.
        paddings: `Num[Array, "batch time"]`.
    """
    y = convolve(zero_padding(x, paddings))
    out_paddings = conv_paddings(paddings)
    return zero_padding(y, out_paddings), out_paddings


def time_axis(layer: BaseConv) -> dict[str, Any]:
    """Returns a convolution's window along its first spatial axis, for `compute_conv_paddings`."""
    sizes = layer._window_sizes()
    padding = sizes["padding"]
    return {
        "window": sizes["window"][0],
        "stride": sizes["strides"][0],
        "conv_padding": padding if isinstance(padding, str) else padding[:1],
        "dilation": sizes["dilation"][0],
        "anchor": layer.config.anchor,
    }


class Conv1DWithPadding(Conv1D):
    """Convolution over time for padded sequences."""

    @config_class
    class Config(Conv1D.Config):
        """Configures a Conv1DWithPadding.

        Attributes:
            anchor: the position in the window whose padding an output gets; None is the first that
                is not in the convolution's own padding.
        """

        anchor: int | None = None

    def forward(self, x: Tensor, *, paddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time output_dim"]` and its paddings.

        Args:
            x: `Float[Array, "batch time input_dim"]`.
            paddings: `Num[Array, "batch time"]`, 1 for padding.
        """
        return convolve_with_paddings(super().forward, self.conv_paddings, x, paddings)

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output."""
        return compute_conv_paddings(paddings, **time_axis(self))


class Conv2DWith1DPadding(Conv2D):
    """Convolution over time and another axis for padded sequences."""

    @config_class
    class Config(Conv2D.Config):
        """Configures a Conv2DWith1DPadding; for `anchor` see `Conv1DWithPadding`."""

        anchor: int | None = None

    def forward(self, x: Tensor, *, paddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time out_width output_dim"]` and its paddings.

        Args:
            x: `Float[Array, "batch time width input_dim"]`.
            paddings: `Num[Array, "batch time"]`, 1 for padding.
        """
        return convolve_with_paddings(super().forward, self.conv_paddings, x, paddings)

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output."""
        return compute_conv_paddings(paddings, **time_axis(self))


class StackOverTime(BaseLayer):
    """Layer without parameters that concatenates consecutive vectors into fewer, larger ones."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a StackOverTime.

        Attributes:
            stride: number of vectors to concatenate.
            padding: "SAME", "VALID", "CAUSAL" or a pair (left, right), for lengths that `stride`
                does not divide. "VALID" drops the last vectors.
        """

        stride: Required[int] = REQUIRED
        padding: str | tuple[int, int] = "VALID"

    def _explicit_padding(self) -> tuple[tuple[int, int], ...]:
        cfg = self.config
        padding = cfg.padding if isinstance(cfg.padding, str) else (tuple(cfg.padding),)
        return conv_explicit_padding(window=(cfg.stride,), strides=(cfg.stride,), padding=padding)

    def forward(self, inputs: Tensor, *, paddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time stride*dim"]` and its paddings.

        Args:
            inputs: `Float[Array, "batch time dim"]`.
            paddings: `Num[Array, "batch time"]`, 1 for padding.
        """
        return convolve_with_paddings(self._stack, self.conv_paddings, inputs, paddings)

    def _stack(self, x: Tensor) -> Tensor:
        x = jnp.pad(x, ((0, 0), *self._explicit_padding(), (0, 0)))
        stride = self.config.stride
        count = x.shape[1] // stride
        return x[:, : count * stride].reshape(x.shape[0], count, stride * x.shape[2])

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output: those of the first vector of each."""
        stride = self.config.stride
        return compute_conv_paddings(
            paddings, window=stride, stride=stride, conv_padding=self._explicit_padding()
        )

    @nowrap
    def output_shape(self, *, input_shape: Sequence[int | None]) -> list[int | None]:
        """Returns the shape of the output from `(batch, time, dim)`, None for unknown sizes."""
        batch, time, dim = input_shape
        stride = self.config.stride
        (out_time,) = conv_output_shape(
            (time,), window=(stride,), strides=(stride,), padding=self._explicit_padding()
        )
        return [batch, out_time, None if dim is None else dim * stride]
