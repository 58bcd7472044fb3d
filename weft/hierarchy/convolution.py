"""Convolutions, transposed convolutions and max pooling.

Inputs are `(batch, *spatial, input_dim)`. Parameters: `weight` of shape
`(*window, input_dim / num_input_dim_groups, output_dim)`, and `bias`. See
`weft.functional.conv_shape` for the named paddings.

Convolutions over time may take paddings, `Num[Array, "batch time"]`, 1 for padding and 0 elsewhere.
They zero padded positions of their inputs and outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from weft import errors, functional
from weft.config import REQUIRED, Required
from weft.config.configurable import ConfigT, HasConfig
from weft.functional import arrays
from weft.hierarchy import param_init, parameter_spec
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import Module, nowrap
from weft.typing import ActivationName, MeshAxes, PartitionSpec, Tensor

ConvPaddingType = functional.ConvPadding
"""How a convolution pads: "SAME", "VALID" or "CAUSAL", or `(left, right)` per spatial axis."""


class BaseConv(BaseLayer):
    """Base of the convolutions over any number of spatial axes.

    A subclass declares `output_dim`, `window`, `strides`, `padding`, `dilation` and `bias`, and
    inherits parameters and `output_shape`.
    """

    class Config(BaseLayer.Config):
        """Configures a BaseConv.

        Each of `num_input_dim_groups` is convolved separately; `input_dim` is depthwise.
        """

        input_dim: Required[int] = REQUIRED
        num_input_dim_groups: int = 1

    _num_axes: ClassVar[int] = 0  # number of spatial axes
    _output_mesh_axis: ClassVar[str | None] = "model"

    @classmethod
    def default_config(cls: "type[HasConfig[ConfigT]]") -> ConfigT:
        """Returns a config whose weight is sharded over the mesh axis "model" by outputs.

        Those of `Conv2D` and `Conv3D` are replicated.
        """
        cfg: Any = super().default_config()
        conv: type[BaseConv] = cfg.klass
        # The axes of the window and of the inputs come before that of the outputs.
        mesh_axes = (None,) * (conv._num_axes + 1) + (conv._output_mesh_axis,)
        return cfg.set(param_partition_spec=mesh_axes)

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        groups = cfg.num_input_dim_groups
        for name in ("input_dim", "output_dim"):
            size = getattr(cfg, name, groups)
            if size % groups:
                raise errors.LayerConfigError(
                    f"{self.path()}: {name}={size} is not divisible by "
                    f"num_input_dim_groups={groups}; change one of them."
                )

    def _window_sizes(self) -> dict[str, Any]:
        cfg, n = self.config, self._num_axes
        names = ("window", "strides", "dilation")
        sizes = {
            name: functional.per_axis(getattr(cfg, name), n) for name in names
        }
        return {**sizes, "padding": cfg.padding}

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (*self._window_sizes()["window"], *self._channels())
        factors = (None,) * self._num_axes + ("row", "col")
        specs = parameter_spec.weight_and_bias_specs(
            cfg, shape, factors, bias_axes=slice(-1, None)
        )
        if cfg.bias:  # also if the weight's last axis is that of inputs
            specs["bias"] = dataclasses.replace(
                specs["bias"], shape=(cfg.output_dim,)
            )
        return specs

    def _channels(self) -> tuple[int, int]:
        cfg = self.config
        return cfg.input_dim // cfg.num_input_dim_groups, cfg.output_dim

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch *spatial input_dim"]`."""
        cfg, params, options = (
            self.config,
            self.parameters,
            self._window_sizes(),
        )
        del options["window"]
        bias = params["bias"] if cfg.bias else None
        y = self._conv(
            x,
            params["weight"],
            bias,
            groups=cfg.num_input_dim_groups,
            **options,
        )
        return self._add_tensor_stats("outputs", y)

    def _conv(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return functional.conv(x, *args, **kwargs)

    _out_sizes = staticmethod(functional.conv_output_shape)
    _out_paddings = staticmethod(functional.compute_conv_paddings)

    @nowrap
    def output_shape(
        self, *, input_shape: Sequence[int | None]
    ) -> list[int | None]:
        """Returns the shape of the output; raises ArgumentShapeError for a wrong rank or channels.

        `input_shape` is `(batch, *spatial, input_dim)`, None for unknown sizes.
        """
        batch, *spatial, channels = input_shape
        if len(spatial) != self._num_axes or channels not in (
            None,
            self.config.input_dim,
        ):
            raise errors.ArgumentShapeError(
                f"{self.path()}: input_shape={tuple(input_shape)} must be (batch, "
                f"{self._num_axes} spatial sizes, {self.config.input_dim} channels)."
            )
        return [
            batch,
            *self._out_sizes(spatial, **self._window_sizes()),
            self.config.output_dim,
        ]


class Conv1D(BaseConv):
    """Convolution over time.

    >>> cfg = Conv1D.default_config().set(input_dim=2, output_dim=4, window=3, padding="SAME")
    >>> cfg.set(name="conv").instantiate(parent=None).output_shape(input_shape=(None, 9, 2))
    [None, 9, 4]
    """

    class Config(BaseConv.Config):
        """Configures a Conv1D; specs that are None leave layouts to the compiler."""

        output_dim: Required[int] = REQUIRED
        window: Required[int] = REQUIRED
        strides: int = 1
        """The step between two outputs."""
        padding: ConvPaddingType = ((0, 0),)
        """One of "SAME", "VALID", "CAUSAL", or one pair (left, right) in a tuple."""
        dilation: int | None = None
        """The step between two positions of a window; None is 1."""
        bias: bool = True
        input_partition_spec: PartitionSpec | MeshAxes | None = None
        output_partition_spec: PartitionSpec | MeshAxes | None = None

    _num_axes = 1

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch time input_dim"]`.

        Returns `Float[Array, "batch out_time output_dim"]`.
        """
        y = super().forward(
            parameter_spec.maybe_shard(x, self.config.input_partition_spec)
        )
        return parameter_spec.maybe_shard(y, self.config.output_partition_spec)


class Conv2D(BaseConv):
    """Convolution over height and width."""

    class Config(BaseConv.Config):
        """Configures a Conv2D as a Conv1D, with sizes per axis; for "CAUSAL", time is the first."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int] = (1, 1)
        strides: tuple[int, int] = (1, 1)
        padding: ConvPaddingType = ((0, 0), (0, 0))
        dilation: tuple[int, int] | None = None
        bias: bool = True

    _num_axes = 2
    _output_mesh_axis = None


class Conv3D(BaseConv):
    """Convolution over three axes, such as those of a video or a volume."""

    class Config(BaseConv.Config):
        """Configures a Conv3D; fields as in `Conv2D.Config`."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int, int] = (1, 1, 1)
        strides: tuple[int, int, int] = (1, 1, 1)
        padding: ConvPaddingType = ((0, 0), (0, 0), (0, 0))
        dilation: tuple[int, int, int] | None = None
        bias: bool = True

    _num_axes = 3
    _output_mesh_axis = None


def zero_padding(x: Tensor, paddings: Tensor) -> Tensor:
    """Returns `x`, `Num[Array, "batch time *rest"]`, with zeros at padded positions."""
    is_real = (paddings == 0).reshape(*paddings.shape, *[1] * (x.ndim - 2))
    return jnp.where(is_real, x, jnp.zeros((), x.dtype))


def convolve_with_paddings(
    convolve: Callable[[Tensor], Tensor],
    x: Tensor,
    paddings: Tensor,
    out_paddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolves `x`, `Num[Array, "batch time *rest"]`, without its padding.

    Returns the output and its paddings.
    """
    return zero_padding(
        convolve(zero_padding(x, paddings)), out_paddings
    ), out_paddings


class PaddedConv(BaseConv):
    """Base of the convolutions over time, and possibly other axes, of padded sequences."""

    def forward(self, x: Tensor, *, paddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time *out_spatial output_dim"]` and its paddings.

        `x` is `Float[Array, "batch time *spatial input_dim"]`.
        """
        return convolve_with_paddings(
            super().forward, x, paddings, self.conv_paddings(paddings)
        )

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output, by the window along the first spatial axis."""
        sizes = self._window_sizes()
        padding = sizes["padding"]
        return self._out_paddings(
            paddings,
            window=sizes["window"][0],
            stride=sizes["strides"][0],
            conv_padding=padding if isinstance(padding, str) else padding[:1],
            dilation=sizes["dilation"][0],
            anchor=self.config.anchor,
        )


class Conv1DWithPadding(PaddedConv, Conv1D):
    """Convolution over time for padded sequences."""

    class Config(Conv1D.Config):
        """Configures a Conv1DWithPadding.

        `anchor` is the position in the window whose padding an output gets; None is the first that
        is not in the convolution's own padding.
        """

        anchor: int | None = None


class Conv2DWith1DPadding(PaddedConv, Conv2D):
    """Convolution over time and another axis for padded sequences."""

    class Config(Conv2D.Config):
        """Configures a Conv2DWith1DPadding; for `anchor` see `Conv1DWithPadding`."""

        anchor: int | None = None


class StackOverTime(BaseLayer):
    """Layer without parameters that concatenates consecutive vectors into fewer, larger ones."""

    class Config(BaseLayer.Config):
        """Configures a StackOverTime."""

        stride: Required[int] = REQUIRED
        """Number of vectors to concatenate."""
        padding: str | tuple[int, int] = "VALID"
        """One of "SAME", "VALID", "CAUSAL" or a pair (left, right), for lengths that `stride` does
        not divide. "VALID" drops the last vectors."""

    def _explicit_padding(self) -> tuple[tuple[int, int], ...]:
        cfg = self.config
        padding = (
            cfg.padding
            if isinstance(cfg.padding, str)
            else (tuple(cfg.padding),)
        )
        return functional.conv_explicit_padding(
            window=(cfg.stride,), strides=(cfg.stride,), padding=padding
        )

    def forward(
        self, inputs: Tensor, *, paddings: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns `Float[Array, "batch out_time stride*dim"]` and its paddings.

        `inputs` are `Float[Array, "batch time dim"]`.
        """
        return convolve_with_paddings(
            self._stack, inputs, paddings, self.conv_paddings(paddings)
        )

    def _stack(self, x: Tensor) -> Tensor:
        x = jnp.pad(x, ((0, 0), *self._explicit_padding(), (0, 0)))
        stride = self.config.stride
        count = x.shape[1] // stride
        x = arrays.gathered(x[:, : count * stride], 1, 2)
        batch, _, dim = x.shape
        return arrays.reshaped(
            x, (batch, count, stride * dim), arrays.explicit_spec(x)[:1]
        )

    def conv_paddings(self, paddings: Tensor) -> Tensor:
        """Returns the paddings of the output: those of the first vector of each."""
        stride = self.config.stride
        return functional.compute_conv_paddings(
            paddings,
            window=stride,
            stride=stride,
            conv_padding=self._explicit_padding(),
        )

    @nowrap
    def output_shape(
        self, *, input_shape: Sequence[int | None]
    ) -> list[int | None]:
        """Returns the shape of the output from `(batch, time, dim)`, None for unknown sizes."""
        batch, time, dim = input_shape
        stride = self.config.stride
        (out_time,) = functional.conv_output_shape(
            (time,),
            window=(stride,),
            strides=(stride,),
            padding=self._explicit_padding(),
        )
        return [batch, out_time, None if dim is None else dim * stride]


class BaseConvTranspose(BaseConv):
    """Base of the transposed convolutions over any number of spatial axes."""

    def _conv(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return functional.conv_transpose(x, *args, **kwargs)

    _out_sizes = staticmethod(functional.conv_transpose_output_shape)
    _out_paddings = staticmethod(functional.compute_conv_transpose_paddings)


class Conv1DTranspose(PaddedConv, BaseConvTranspose):
    """Transposed convolution over time, optionally of padded sequences."""

    class Config(BaseConvTranspose.Config):
        """Configures a Conv1DTranspose."""

        output_dim: Required[int] = REQUIRED
        window: int = 1
        strides: int = 1
        """Number of outputs per input."""
        padding: Required[ConvPaddingType] = REQUIRED
        """One of "SAME", "VALID", "CAUSAL", or one pair (left, right) in a tuple."""
        dilation: int = 1
        """The step between two positions of a window."""
        bias: bool = True
        anchor: int | None = None
        """As for `Conv1DWithPadding`."""

    _num_axes = 1

    def forward(
        self, x: Tensor, *, paddings: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `Float[Array, "batch out_time output_dim"]`, and its paddings or None.

        `x` is `Float[Array, "batch time input_dim"]`; `paddings` None means it has none.
        """
        if paddings is None:
            return BaseConv.forward(self, x), None
        return super().forward(x, paddings=paddings)


class Conv2DTranspose(BaseConvTranspose):
    """Transposed convolution over height and width."""

    class Config(BaseConvTranspose.Config):
        """Configures a Conv2DTranspose as a Conv1DTranspose, with sizes per axis."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int] = (1, 1)
        strides: tuple[int, int] = (1, 1)
        padding: Required[ConvPaddingType] = REQUIRED
        """For "CAUSAL", time is the first axis."""
        dilation: tuple[int, int] = (1, 1)
        bias: bool = True
        transpose_kernel: bool = False
        """Whether the weight is flipped, with its last two axes exchanged, as that of the
        convolution whose gradient this is."""

    _num_axes = 2

    def _conv(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super()._conv(
            x, *args, transpose_kernel=self.config.transpose_kernel, **kwargs
        )

    def _channels(self) -> tuple[int, int]:
        cfg = self.config
        if not cfg.transpose_kernel:
            return super()._channels()
        return cfg.output_dim // cfg.num_input_dim_groups, cfg.input_dim

    def _compute_fan_axes(
        self, name: str, spec: ParameterSpec
    ) -> param_init.FanAxes | None:
        if name == "weight" and self.config.transpose_kernel:
            return param_init.FanAxes(in_axis=-1, out_axis=-2)
        return super()._compute_fan_axes(name, spec)


class Conv2DTransposeWith1DPadding(PaddedConv, Conv2DTranspose):
    """Transposed convolution over time and another axis for padded sequences."""

    class Config(Conv2DTranspose.Config):
        """Configures a Conv2DTransposeWith1DPadding; for `anchor` see `Conv1DWithPadding`."""

        anchor: int | None = None


class Conv3DTranspose(BaseConvTranspose):
    """Transposed convolution over three axes."""

    class Config(BaseConvTranspose.Config):
        """Configures a Conv3DTranspose; fields as in `Conv2DTranspose.Config`."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int, int] = (1, 1, 1)
        strides: tuple[int, int, int] = (1, 1, 1)
        padding: Required[ConvPaddingType] = REQUIRED
        dilation: tuple[int, int, int] = (1, 1, 1)
        bias: bool = True

    _num_axes = 3


class MaxPool2D(BaseLayer):
    """Max pooling without padding."""

    class Config(BaseLayer.Config):
        """Configures a MaxPool2D; both fields have one entry per axis."""

        window: tuple[int, int] = (2, 2)
        strides: tuple[int, int] = (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the maxima of each window of `x`, `Num[Array, "batch height width channels"]`."""
        cfg = self.config
        return functional.max_pool(x, cfg.window, strides=cfg.strides)

    @nowrap
    def output_shape(
        self, *, input_shape: Sequence[int | None]
    ) -> list[int | None]:
        """Returns the shape of the output; sizes may be None if unknown."""
        cfg = self.config
        batch, *spatial, channels = input_shape
        out = functional.conv_output_shape(
            spatial, window=cfg.window, strides=cfg.strides, padding="VALID"
        )
        return [batch, *out, channels]


class SqueezeExcitation(BaseLayer):
    """Scales each channel by a gate computed from the means of all channels (Hu et al., 2018).

    With `se_ratio=0` and no `num_reduced_filters`, it is the identity.
    """

    class Config(BaseLayer.Config):
        """Configures a SqueezeExcitation."""

        input_dim: Required[int] = REQUIRED
        se_ratio: float = 0.0
        """Hidden size of the gate, as a fraction of `input_dim`."""
        num_reduced_filters: int | None = None
        """Hidden size of the gate; None goes by `se_ratio`."""
        activation: ActivationName = "nn.relu"
        gating: ActivationName = "nn.sigmoid"
        param_partition_spec: Any = (None, None, None, "model")

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        reduced = cfg.num_reduced_filters
        if reduced is None and cfg.se_ratio > 0:
            reduced = max(1, int(cfg.input_dim * cfg.se_ratio))
        self._reduced = reduced
        self._activation = functional.get_activation_fn(cfg.activation)
        self._gating = functional.get_activation_fn(cfg.gating)
        if reduced:
            conv = Conv2D.default_config().set(
                param_partition_spec=cfg.param_partition_spec
            )
            self._add_child(
                "reduce",
                conv.clone(input_dim=cfg.input_dim, output_dim=reduced),
            )
            self._add_child(
                "expand",
                conv.clone(input_dim=reduced, output_dim=cfg.input_dim),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Scales the channels of `inputs`, `Float[Array, "batch height width input_dim"]`."""
        if not self._reduced:
            return inputs
        squeezed = jnp.mean(inputs, axis=(1, 2), keepdims=True)
        return inputs * self._gating(
            self.expand(self._activation(self.reduce(squeezed)))
        )
