"""Convolution layers.

Inputs are `(batch, *spatial, input_dim)`. Parameters: `weight` of shape
`(*window, input_dim / num_input_dim_groups, output_dim)`, and `bias`. See
`weft.functional.conv_shape` for the named paddings.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from weft.config import REQUIRED, Required, config_class
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.functional import ConvPadding, conv, conv_output_shape
from weft.hierarchy.base_layer import BaseLayer, FactorizationSpec, ParameterSpec
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.sharding import maybe_shard
from weft.typing import MeshAxes, PartitionSpec, Tensor

ConvPaddingType = ConvPadding


class BaseConv(BaseLayer):
    """Base of the convolutions over any number of spatial axes.

    A subclass declares `output_dim`, `window`, `strides`, `padding`, `dilation` and `bias`, and
    inherits parameters and `output_shape`.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseConv.

        Attributes:
            input_dim: the number of input channels.
            num_input_dim_groups: number of groups of channels, each convolved separately; input_dim
                for a depthwise convolution.
        """

        input_dim: Required[int] = REQUIRED
        num_input_dim_groups: int = 1

    _num_axes: ClassVar[int] = 0  # number of spatial axes

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose weight is sharded over the mesh axis "model" by outputs."""
        cfg = super().default_config()
        return cfg.set(param_partition_spec=(None,) * (cls._num_axes + 1) + ("model",))

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        groups = cfg.num_input_dim_groups
        for name in ("input_dim", "output_dim"):
            size = getattr(cfg, name, groups)
            if size % groups:
                raise LayerConfigError(
                    f"{self.path()}: {name}={size} is not divisible by "
                    f"num_input_dim_groups={groups}; change one of them."
                )

    def _per_axis(self, name: str) -> tuple[int, ...]:
        value = getattr(self.config, name)
        if value is None:
            return (1,) * self._num_axes
        return (value,) if isinstance(value, int) else tuple(value)

    def _window_sizes(self) -> dict[str, Any]:
        return {
            "window": self._per_axis("window"),
            "strides": self._per_axis("strides"),
            "padding": self.config.padding,
            "dilation": self._per_axis("dilation"),
        }

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (*self._per_axis("window"), *self._channels())
        mesh_axes = cfg.param_partition_spec or (None,) * len(shape)
        specs = {
            "weight": ParameterSpec(
                shape=shape,
                mesh_axes=mesh_axes,
                factorization=FactorizationSpec((None,) * self._num_axes + ("row", "col")),
            )
        }
        if cfg.bias:
            specs["bias"] = ParameterSpec(shape=(cfg.output_dim,), mesh_axes=(mesh_axes[-1],))
        return specs

    def _channels(self) -> tuple[int, int]:
        cfg = self.config
        return cfg.input_dim // cfg.num_input_dim_groups, cfg.output_dim

    def _bias(self) -> Tensor | None:
        return self.parameters["bias"] if self.config.bias else None

    def _convolve(self, x: Tensor) -> Tensor:
        sizes = self._window_sizes()
        y = conv(
            x,
            self.parameters["weight"],
            self._bias(),
            strides=sizes["strides"],
            padding=sizes["padding"],
            dilation=sizes["dilation"],
            groups=self.config.num_input_dim_groups,
        )
        self._add_tensor_stats("outputs", y)
        return y

    def _out_spatial(self, in_spatial: Sequence[int | None]) -> tuple[int | None, ...]:
        return conv_output_shape(in_spatial, **self._window_sizes())

    @nowrap
    def output_shape(self, *, input_shape: Sequence[int | None]) -> list[int | None]:
        """Returns the shape of the output; raises ArgumentShapeError for a wrong rank or channels.

        Args:
            input_shape: `(batch, *spatial, input_dim)`, None for unknown sizes.
        """
        batch, *spatial, channels = input_shape
        if len(spatial) != self._num_axes or channels not in (None, self.config.input_dim):
            raise ArgumentShapeError(
                f"{self.path()}: input_shape={tuple(input_shape)} must be (batch, "
                f"{self._num_axes} spatial sizes, {self.config.input_dim} channels)."
            )
        return [batch, *self._out_spatial(spatial), self.config.output_dim]


class Conv1D(BaseConv):
    """Convolution over time.

    Example:
        >>> cfg = Conv1D.default_config().set(input_dim=2, output_dim=4, window=3, padding="SAME")
        >>> cfg.set(name="conv").instantiate(parent=None).output_shape(input_shape=(None, 9, 2))
        [None, 9, 4]
    """

    @config_class
    class Config(BaseConv.Config):
        """Configures a Conv1D.

        Attributes:
            output_dim: the number of output channels.
            strides: the step between two outputs.
            padding: "SAME", "VALID", "CAUSAL", or one pair (left, right) in a tuple.
            dilation: the step between two positions of a window; None is 1.
            input_partition_spec: the mesh axes of the input; None leaves it to the compiler.
            output_partition_spec: the mesh axes of the output; None leaves it to the compiler.
        """

        output_dim: Required[int] = REQUIRED
        window: Required[int] = REQUIRED
        strides: int = 1
        padding: ConvPaddingType = ((0, 0),)
        dilation: int | None = None
        bias: bool = True
        input_partition_spec: PartitionSpec | MeshAxes | None = None
        output_partition_spec: PartitionSpec | MeshAxes | None = None

    _num_axes = 1

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch time input_dim"]`.

        Returns:
            `Float[Array, "batch out_time output_dim"]`.
        """
        y = self._convolve(maybe_shard(x, self.config.input_partition_spec))
        return maybe_shard(y, self.config.output_partition_spec)


class Conv2D(BaseConv):
    """Convolution over height and width."""

    @config_class
    class Config(BaseConv.Config):
        """Configures a Conv2D, with window sizes, strides and dilations per axis.

        Attributes:
            output_dim: the number of output channels.
            strides: the steps between two outputs.
            padding: "SAME", "VALID", "CAUSAL" (the first axis is time), or a pair (before, after)
                per axis.
            dilation: the steps between two positions of a window; None is 1.
        """

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int] = (1, 1)
        strides: tuple[int, int] = (1, 1)
        padding: ConvPaddingType = ((0, 0), (0, 0))
        dilation: tuple[int, int] | None = None
        bias: bool = True

    _num_axes = 2

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch height width input_dim"]`."""
        return self._convolve(x)


class Conv3D(BaseConv):
    """Convolution over three axes, such as those of a video or a volume."""

    @config_class
    class Config(BaseConv.Config):
        """Configures a Conv3D; fields as in `Conv2D.Config`."""

        output_dim: Required[int] = REQUIRED
        window: tuple[int, int, int] = (1, 1, 1)
        strides: tuple[int, int, int] = (1, 1, 1)
        padding: ConvPaddingType = ((0, 0), (0, 0), (0, 0))
        dilation: tuple[int, int, int] | None = None
        bias: bool = True

    _num_axes = 3

    def forward(self, x: Tensor) -> Tensor:
        """Convolves `Float[Array, "batch depth height width input_dim"]`."""
        return self._convolve(x)
