"""Adapters of low-rank adaptation; see `weft.hierarchy.lora`."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from weft.config import REQUIRED, InstantiableConfig, Required, config_class
from weft.errors import LayerConfigError
from weft.functional import project
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.dropout import Dropout
from weft.hierarchy.linear import Linear
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.param_init import (
    PARAM_REGEXP_WEIGHT,
    ConstantInitializer,
    DefaultInitializer,
    FanAxes,
    WeightInitializer,
)
from weft.hierarchy.qkv_linear import BaseMultiheadLinear
from weft.typing import NestedTensor, Shape, Tensor

PROJECTIONS = ("query", "key", "value")


def _weights(initializer: Any) -> Any:
    return DefaultInitializer.default_config().set(
        init_by_param_name={PARAM_REGEXP_WEIGHT: initializer}
    )


def _normal() -> Any:
    return _weights(WeightInitializer.default_config().set(fan="fan_in", distribution="normal"))


def _zeros() -> Any:
    return _weights(ConstantInitializer.default_config().set(value=0.0))


class _WeightAlone(BaseLayer):
    """Map with one weight and no bias. A subclass defines the weight's shape and the map."""

    _fan_axes: ClassVar[FanAxes]
    _subscripts: ClassVar[str]

    def _weight_shape(self) -> Shape:
        raise NotImplementedError(type(self))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        weight = ParameterSpec(
            self._weight_shape(),
            mesh_axes=self.config.param_partition_spec,
            fan_axes=self._fan_axes,
        )
        return {"weight": weight}

    def forward(self, inputs: Tensor) -> Any:
        return project(self._subscripts, inputs, self.parameters["weight"])


class LoraDownFusedLinear(_WeightAlone):
    """Several maps of one input to few dimensions.

    Maps `Float[Array, "batch time input_dim"]` to
    `Float[Array, "num_enabled batch time output_dim"]`.

    Parameters: `weight` of shape (num_enabled, input_dim, output_dim).
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LoraDownFusedLinear.

        Attributes:
          output_dim: the rank.
          num_enabled: the number of maps.
        """

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        num_enabled: Required[int] = REQUIRED

    _fan_axes = FanAxes(in_axis=1, out_axis=2, batch_axis=0)
    _subscripts = "btd,ndr->nbtr"

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose weight is replicated."""
        return super().default_config().set(param_partition_spec=(None, None, None))

    def _weight_shape(self) -> Shape:
        cfg = self.config
        return (cfg.num_enabled, cfg.input_dim, cfg.output_dim)


class LoraUpFusedLinear(_WeightAlone):
    """Several maps from few dimensions to heads, each with its own input.

    Maps `Float[Array, "num_enabled batch time input_dim"]` to
    `Float[Array, "num_enabled batch time num_heads per_head_dim"]`.

    Parameters: `weight` of shape (num_enabled, input_dim, num_heads, per_head_dim).
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LoraUpFusedLinear.

        Attributes:
          input_dim: the rank.
          num_enabled: the number of maps.
        """

        input_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        num_enabled: Required[int] = REQUIRED

    _fan_axes = FanAxes(in_axis=1, out_axis=(2, 3), batch_axis=0)
    _subscripts = "nbtr,nrkh->nbtkh"

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose weight is sharded over the mesh axis "model" by heads."""
        return super().default_config().set(param_partition_spec=(None, None, "model", None))

    def _weight_shape(self) -> Shape:
        cfg = self.config
        return (cfg.num_enabled, cfg.input_dim, cfg.num_heads, cfg.per_head_dim)


class LoraUpGroupedLinear(_WeightAlone):
    """Several maps from few dimensions to different numbers of heads.

    Parameters: `weight` of shape (input_dim, all heads, per_head_dim). The maps' heads are
    concatenated, and replicated, since their sum may not be divisible.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LoraUpGroupedLinear.

        Attributes:
          input_dim: the rank.
          num_heads: the number of heads of each map.
        """

        input_dim: Required[int] = REQUIRED
        num_heads: Required[Sequence[int]] = REQUIRED
        per_head_dim: Required[int] = REQUIRED

    _fan_axes = FanAxes(in_axis=0, out_axis=(1, 2))
    _subscripts = "...r,rkh->...kh"

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose weight is replicated."""
        return super().default_config().set(param_partition_spec=(None, None, None))

    def _weight_shape(self) -> Shape:
        cfg = self.config
        return (cfg.input_dim, sum(cfg.num_heads), cfg.per_head_dim)

    @nowrap
    def split(self, weight: Tensor) -> list[Tensor]:
        """Splits the weight, which may have leading axes of layers, by map."""
        return jnp.split(weight, np.cumsum(self.config.num_heads[:-1]), axis=-2)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """Applies every map to its input, `Float[Array, "num_maps batch time input_dim"]`.

        Returns:
          `Float[Array, "batch time heads per_head_dim"]` per map.
        """
        weights = self.split(self.parameters["weight"])
        return [project(self._subscripts, x, w) for x, w in zip(inputs, weights, strict=True)]


class LoraDownMultiheadLinear(BaseMultiheadLinear):
    """Map from the heads to the rank, which is the weight's first axis, `model_dim`."""

    _subscripts = "...nh,rnh->...r"
    _fan_axes = FanAxes(in_axis=(1, 2), out_axis=0)

    def _bias_spec(self, mesh_axes: Any) -> ParameterSpec:
        return ParameterSpec((self.config.model_dim,), mesh_axes=mesh_axes[:1])


class BaseLoraAdapter(BaseLayer):
    """Base of the adapters of linear layers. A subclass sets the dimensions of its children."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures an adapter.

        Attributes:
          input_dim: set by the surrounding layer.
          output_dim: set by the surrounding layer.
          rank: the number of dimensions between the two maps.
          alpha: the outputs are multiplied by `alpha / rank`.
          lora_dropout: of the inputs.
          lora_down: to the rank.
          lora_up: from the rank; its weight is initialized to 0.
        """

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        rank: Required[int] = REQUIRED
        alpha: Required[float] = REQUIRED
        lora_dropout: InstantiableConfig = Dropout.default_config()
        lora_down: InstantiableConfig = Linear.default_config().set(
            bias=False, param_init=_normal(), param_partition_spec=(None, None)
        )
        lora_up: InstantiableConfig = Linear.default_config().set(bias=False, param_init=_zeros())

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.rank < 1:
            raise LayerConfigError(
                f"{self.path()}: rank={cfg.rank} leaves no dimensions; expected at least 1. For a "
                "layer without an adapter, use the layer itself."
            )
        self._add_child("lora_dropout", cfg.lora_dropout)
        self._add_maps()

    def _add_maps(self) -> None:
        cfg = self.config
        self._add_child(
            "lora_down", cfg.lora_down.set(input_dim=cfg.input_dim, output_dim=cfg.rank)
        )
        self._add_child("lora_up", cfg.lora_up.set(input_dim=cfg.rank, output_dim=cfg.output_dim))

    @nowrap
    def scale(self) -> float:
        """Returns the factor of the outputs."""
        return self.config.alpha / self.config.rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the term to add to the layer's outputs."""
        return self.lora_up(self.lora_down(self.lora_dropout(inputs))) * self.scale()

    @nowrap
    def delta(self, state: NestedTensor, subscripts: str) -> Tensor:
        """Returns the equivalent term to add to the layer's weight.

        Args:
          state: of the adapter, optionally with leading axes of layers.
          subscripts: of both weights and the result, as for an einsum.
        """
        entries: Any = state
        down, up = (entries[name]["weight"] for name in ("lora_down", "lora_up"))
        return self._product(down, up, subscripts)

    @nowrap
    def _product(self, down: Tensor, up: Tensor, subscripts: str) -> Tensor:
        down, up = down.astype(jnp.float32), up.astype(jnp.float32)
        return self.scale() * project(subscripts, down, up)


class LoraLinearAdapter(BaseLoraAdapter):
    """Adapter of a `Linear`."""


class LoraMultiheadOutputAdapter(BaseLoraAdapter):
    """Adapter of a `MultiheadOutputLinear`."""

    @config_class
    class Config(BaseLoraAdapter.Config):
        """Configures a LoraMultiheadOutputAdapter; the `num_heads` heads share `input_dim`."""

        num_heads: Required[int] = REQUIRED

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config that maps down from heads."""
        down = LoraDownMultiheadLinear.default_config().set(bias=False, param_init=_normal())
        cfg = super().default_config().set(lora_down=down)
        cfg.lora_up.param_partition_spec = (None, None)
        return cfg

    def _add_maps(self) -> None:
        cfg = self.config
        down = cfg.lora_down.set(
            model_dim=cfg.rank,
            num_heads=cfg.num_heads,
            per_head_dim=cfg.input_dim // cfg.num_heads,
        )
        self._add_child("lora_down", down)
        self._add_child("lora_up", cfg.lora_up.set(input_dim=cfg.rank, output_dim=cfg.output_dim))


class LoraFusedQKVAdapter(BaseLoraAdapter):
    """Adapter of projections to queries, keys and values."""

    @config_class
    class Config(BaseLoraAdapter.Config):
        """Configures a LoraFusedQKVAdapter.

        Attributes:
          num_heads: the number of heads, which share `output_dim`.
          num_kv_heads: the number of heads of keys and values, None for `num_heads`. If it differs
            and keys or values have an adapter, `lora_up` becomes a `LoraUpGroupedLinear` and keeps
            only its `param_init`.
          enable_lora: which of "query", "key" and "value" have an adapter; omitted ones have
            none.
        """

        num_heads: Required[int] = REQUIRED
        num_kv_heads: int | None = None
        enable_lora: Required[dict[str, bool]] = REQUIRED

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config that maps up to the heads of several projections."""
        return (
            super()
            .default_config()
            .set(
                lora_down=LoraDownFusedLinear.default_config().set(param_init=_normal()),
                lora_up=LoraUpFusedLinear.default_config().set(param_init=_zeros()),
            )
        )

    def _add_maps(self) -> None:
        cfg = self.config
        if unknown := sorted(cfg.enable_lora.keys() - set(PROJECTIONS)):
            raise LayerConfigError(
                f"{self.path()}: enable_lora has {unknown}; its keys are 'query', 'key' and "
                "'value'."
            )
        if not self.enabled():
            raise LayerConfigError(
                f"{self.path()}: enable_lora={cfg.enable_lora} enables nothing; enable one of "
                "'query', 'key' and 'value', or use the layer without an adapter."
            )
        n, heads = len(self.enabled()), self._heads()
        down = cfg.lora_down.set(input_dim=cfg.input_dim, output_dim=cfg.rank, num_enabled=n)
        if set(heads) == {cfg.num_heads}:
            up = cfg.lora_up.set(num_enabled=n, num_heads=cfg.num_heads)
        else:
            up = LoraUpGroupedLinear.default_config().set(
                num_heads=heads, param_init=cfg.lora_up.param_init
            )
        per_head_dim = cfg.output_dim // cfg.num_heads
        self._add_child("lora_down", down)
        self._add_child("lora_up", up.set(input_dim=cfg.rank, per_head_dim=per_head_dim))

    @nowrap
    def _heads(self) -> list[int]:
        cfg = self.config
        of_kv = cfg.num_heads if cfg.num_kv_heads is None else cfg.num_kv_heads
        return [cfg.num_heads if name == "query" else of_kv for name in self.enabled()]

    def forward(self, inputs: Tensor) -> Sequence[Tensor]:
        """Returns the terms to add to the projections with an adapter."""
        added = self.lora_up(self.lora_down(self.lora_dropout(inputs)))
        return [x * self.scale() for x in added]

    @nowrap
    def deltas(self, state: NestedTensor) -> dict[str, Tensor]:
        """Returns the equivalent terms to add to the weights, by projection; see `delta`."""
        entries: Any = state
        down, up = (entries[name]["weight"] for name in ("lora_down", "lora_up"))
        if isinstance(self.lora_up, LoraUpGroupedLinear):
            ups = self.lora_up.split(up)
        else:
            ups = [up[..., i, :, :, :] for i in range(len(self.enabled()))]
        return {
            name: self._product(down[..., i, :, :], ups[i], "...ir,...rkh->...ikh")
            for i, name in enumerate(self.enabled())
        }

    @nowrap
    def enabled(self) -> list[str]:
        """Returns the projections with an adapter, in the order of the weights' first axis."""
        return [name for name in PROJECTIONS if self.config.enable_lora.get(name)]
