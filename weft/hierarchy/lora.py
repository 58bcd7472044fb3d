"""Low-rank adapters: a frozen linear map plus a small trained one.

    y = layer(x) + (alpha / rank) * lora_up(lora_down(dropout(x)))

`lora_down` maps to `rank` dimensions, `lora_up` from there to the outputs (Hu et al., 2022). The
weight of `lora_up` is initialized to 0, so that untrained adapters change nothing. A layer with an
adapter has two children, "layer", with the state of the layer without adapter, and "adapter". A
learner trains only the adapters with

    update_rules = [(".*/adapter/.*", UpdateType.ALL_UPDATES), (".*", UpdateType.NO_UPDATE)]

and `merge_adapters` adds the trained adapters to the weights of the layers; `unmerge_adapters`
subtracts them again.

    set_lora_recursively(cfg, rank=8, alpha=16.0)

replaces the projections of every attention in a config by a `LoraFusedQKVLinear`, its output by a
`LoraMultiheadOutputLinear`, and each linear map of a feed-forward layer by a `LoraLinear`.
With `targets=[…, "experts"]`, each expert of a mixture gets adapters too (`LoraExperts`).
A frozen layer may be stored in 8 or 4 bits (`weft.hierarchy.stored_weight`).
`base_state` and `with_base_state` separate a state from its adapters, and join them again.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import REQUIRED, ConfigBase, InstantiableConfig, Required
from weft.errors import ArgumentValueError, LayerConfigError, did_you_mean
from weft.functional import project
from weft.hierarchy import param_init
from weft.hierarchy.attention import kv_cache, qkv_linear
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.config_setters import for_each_config, is_config_of
from weft.hierarchy.layers.linear import Dropout, Linear
from weft.hierarchy.mixture_of_experts.feed_forward import (
    TransformerFeedForwardMoE,
)
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.stored_weight import dequantized_state
from weft.typing import DType, NestedTensor, PyTree, Shape, Tensor

ConfigT = TypeVar("ConfigT", bound=ConfigBase)

PROJECTIONS = ("query", "key", "value")

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "linear1", "linear2")
"""Linear maps of a transformer layer that can have adapters."""

EXPERTS = "experts"
"""Target of the weights of all experts of a mixture, which has to be named: each expert gets
adapters of its own."""


class AdapterFactors(NamedTuple):
    """The two matrices of an adapter of one weight, whatever the layout of the weight.

    Those of experts have an axis of experts before the last two.

    Attributes:
        down: `Float[Array, "*layers inputs rank"]`.
        up: `Float[Array, "*layers rank outputs"]`.
        scale: factor of their product.
        weight_shape: shape of the weight of one layer, or one expert.
        input_axes: axes of the weight that are inputs; the others are outputs.
    """

    down: Tensor
    up: Tensor
    scale: float
    weight_shape: Shape
    input_axes: tuple[int, ...]


def _normal_init() -> param_init.DefaultInitializer.Config:
    return param_init.normal_weights("fan_in")


def _zeros_init() -> param_init.DefaultInitializer.Config:
    zeros = param_init.ConstantInitializer.default_config().set(value=0.0)
    return param_init.initializer_of_weights(zeros)


class WeightOnlyLinear(BaseLayer):
    """Map with one weight and no bias. A subclass defines the weight's shape and the map."""

    # Config fields of the sizes of the weight's axes.
    _sizes: ClassVar[tuple[str, ...]]
    _fan_axes: ClassVar[param_init.FanAxes]
    _subscripts: ClassVar[str]

    def _weight_shape(self) -> Shape:
        return tuple(getattr(self.config, name) for name in self._sizes)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        weight = ParameterSpec(
            self._weight_shape(),
            mesh_axes=self.config.param_partition_spec,
            fan_axes=self._fan_axes,
        )
        return {"weight": weight}

    def forward(self, inputs: Tensor) -> Tensor | list[Tensor]:
        return project(self._subscripts, inputs, self.parameters["weight"])


class LoraDownFusedLinear(WeightOnlyLinear):
    """Several maps of one input to few dimensions.

    Maps `Float[Array, "batch time input_dim"]` to
    `Float[Array, "num_enabled batch time output_dim"]`.

    Parameters: `weight` of shape (num_enabled, input_dim, output_dim).
    """

    class Config(BaseLayer.Config):
        """Configures a LoraDownFusedLinear: `num_enabled` maps to the rank, `output_dim`."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        num_enabled: Required[int] = REQUIRED
        param_partition_spec: Any = (None, None, "model")

    _sizes = ("num_enabled", "input_dim", "output_dim")
    _fan_axes = param_init.FanAxes(in_axis=1, out_axis=2, batch_axis=0)
    _subscripts = "btd,ndr->nbtr"


class LoraUpFusedLinear(WeightOnlyLinear):
    """Several maps from few dimensions to heads, each with its own input.

    Maps `Float[Array, "num_enabled batch time input_dim"]` to
    `Float[Array, "num_enabled batch time num_heads per_head_dim"]`.

    Parameters: `weight` of shape (num_enabled, input_dim, num_heads, per_head_dim).
    """

    class Config(BaseLayer.Config):
        """Configures a LoraUpFusedLinear: `num_enabled` maps from the rank, `input_dim`."""

        input_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        num_enabled: Required[int] = REQUIRED
        param_partition_spec: Any = (None, None, "model", None)

    _sizes = ("num_enabled", "input_dim", "num_heads", "per_head_dim")
    _fan_axes = param_init.FanAxes(in_axis=1, out_axis=(2, 3), batch_axis=0)
    _subscripts = "nbtr,nrkh->nbtkh"


class LoraUpGroupedLinear(WeightOnlyLinear):
    """Several maps from few dimensions to different numbers of heads.

    Parameters: `weight` of shape (input_dim, all heads, per_head_dim). The maps' heads are
    concatenated, and replicated, since their sum may not be divisible.
    """

    class Config(BaseLayer.Config):
        """Configures a LoraUpGroupedLinear: maps from the rank, `input_dim`, to `num_heads`."""

        input_dim: Required[int] = REQUIRED
        num_heads: Required[Sequence[int]] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        param_partition_spec: Any = (None, None, None)

    _fan_axes = param_init.FanAxes(in_axis=0, out_axis=(1, 2))
    _subscripts = "...r,rkh->...kh"

    def _weight_shape(self) -> Shape:
        cfg = self.config
        return (cfg.input_dim, sum(cfg.num_heads), cfg.per_head_dim)

    @nowrap
    def split(self, weight: Tensor) -> list[Tensor]:
        """Splits the weight, which may have leading axes of layers, by map."""
        return jnp.split(weight, np.cumsum(self.config.num_heads[:-1]), axis=-2)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """Applies every map to its input, `Float[Array, "num_maps batch time input_dim"]`.

        Returns `Float[Array, "batch time heads per_head_dim"]` per map.
        """
        weights = self.split(self.parameters["weight"])
        outputs: list[Tensor] = []
        for x, weight in zip(inputs, weights, strict=True):
            outputs.append(project(self._subscripts, x, weight))
        return outputs


class LoraDownMultiheadLinear(qkv_linear.MultiheadOutputLinear):
    """Map from the heads to the rank, which is the weight's first axis, `model_dim`."""


class BaseLoraAdapter(BaseLayer):
    """Base of the adapters of linear layers. A subclass sets the dimensions of its children."""

    class Config(BaseLayer.Config):
        """Configures an adapter of a layer.

        The layer's output becomes `layer(x) + (alpha / rank) * lora_up(lora_down(dropout(x)))`.
        The surrounding layer sets `input_dim` and `output_dim`.
        """

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        rank: Required[int] = REQUIRED
        alpha: Required[float] = REQUIRED
        lora_dropout: InstantiableConfig = Dropout.default_config()
        lora_down: InstantiableConfig = Linear.default_config().set(
            bias=False,
            param_init=_normal_init(),
            param_partition_spec=(None, None),
        )
        lora_up: InstantiableConfig = Linear.default_config().set(
            bias=False, param_init=_zeros_init()
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_rank(self)
        self._add_child("lora_dropout", cfg.lora_dropout)
        self._add_maps()

    def _add_maps(self) -> None:
        cfg = self.config
        self._add_child("lora_down", self._down())
        self._add_child(
            "lora_up",
            cfg.lora_up.set(input_dim=cfg.rank, output_dim=cfg.output_dim),
        )

    def _down(self) -> InstantiableConfig:
        """Returns the config of `lora_down`."""
        cfg = self.config
        return cfg.lora_down.set(input_dim=cfg.input_dim, output_dim=cfg.rank)

    @nowrap
    def scale(self) -> float:
        """Returns the factor of the outputs."""
        return self.config.alpha / self.config.rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the term to add to the layer's outputs."""
        low_rank = self.lora_down(self.lora_dropout(inputs))
        return self.lora_up(low_rank) * self.scale()

    @nowrap
    def delta(self, state: NestedTensor, subscripts: str) -> Tensor:
        """Returns the equivalent term to add to the layer's weight.

        `state` may have leading axes of layers. `subscripts` are those of both weights and the
        result, as for an einsum.
        """
        down, up = _weights(state)
        return self._product(down, up, subscripts)

    def _product(self, down: Tensor, up: Tensor, subscripts: str) -> Tensor:
        product = project(
            subscripts, down.astype(jnp.float32), up.astype(jnp.float32)
        )
        return self.scale() * product


def _check_rank(adapter: BaseLayer) -> None:
    rank = adapter.config.rank
    if rank < 1:
        raise LayerConfigError(
            f"{adapter.path()}: rank={rank} leaves no dimensions; expected at least 1. For a layer "
            "without an adapter, use the layer itself."
        )


def _weights(state: PyTree) -> tuple[Tensor, Tensor]:
    """Returns the weights of both maps of an adapter with this state."""
    return state["lora_down"]["weight"], state["lora_up"]["weight"]


class LoraLinearAdapter(BaseLoraAdapter):
    """Adapter of a `Linear`."""


class LoraMultiheadOutputAdapter(BaseLoraAdapter):
    """Adapter of a `MultiheadOutputLinear`."""

    class Config(BaseLoraAdapter.Config):
        """Configures a LoraMultiheadOutputAdapter; the `num_heads` heads share `input_dim`."""

        num_heads: Required[int] = REQUIRED
        lora_down: InstantiableConfig = (
            LoraDownMultiheadLinear.default_config().set(
                bias=False, param_init=_normal_init()
            )
        )

    def _down(self) -> InstantiableConfig:
        cfg = self.config
        per_head_dim = cfg.input_dim // cfg.num_heads
        return cfg.lora_down.set(
            model_dim=cfg.rank,
            num_heads=cfg.num_heads,
            per_head_dim=per_head_dim,
        )


class LoraFusedQKVAdapter(BaseLoraAdapter):
    """Adapter of projections to queries, keys and values."""

    class Config(BaseLoraAdapter.Config):
        """Configures a LoraFusedQKVAdapter."""

        num_heads: Required[int] = REQUIRED
        """The number of heads, which share `output_dim`."""
        num_kv_heads: int | None = None
        """The number of heads of keys and values, None for `num_heads`. If it differs and keys or
        values have an adapter, `lora_up` becomes a `LoraUpGroupedLinear` and keeps only its
        `param_init`."""
        enable_lora: Required[dict[str, bool]] = REQUIRED
        """Which of "query", "key" and "value" have an adapter; omitted ones lack it."""
        lora_down: InstantiableConfig = (
            LoraDownFusedLinear.default_config().set(param_init=_normal_init())
        )
        lora_up: InstantiableConfig = LoraUpFusedLinear.default_config().set(
            param_init=_zeros_init()
        )

    def _add_maps(self) -> None:
        cfg = self.config
        unknown_keys = sorted(cfg.enable_lora.keys() - set(PROJECTIONS))
        if unknown_keys:
            raise LayerConfigError(
                f"{self.path()}: enable_lora has {unknown_keys}; its keys are 'query', 'key' and "
                "'value'."
            )
        if not self.enabled():
            raise LayerConfigError(
                f"{self.path()}: enable_lora={cfg.enable_lora} enables nothing; enable one of "
                "'query', 'key' and 'value', or use the layer without an adapter."
            )
        num_enabled = len(self.enabled())
        down = cfg.lora_down.set(
            input_dim=cfg.input_dim,
            output_dim=cfg.rank,
            num_enabled=num_enabled,
        )
        num_heads_of_enabled = self._num_heads_of_enabled()
        if set(num_heads_of_enabled) == {cfg.num_heads}:
            up = cfg.lora_up.set(
                num_enabled=num_enabled, num_heads=cfg.num_heads
            )
        else:
            up = LoraUpGroupedLinear.default_config().set(
                num_heads=num_heads_of_enabled,
                param_init=cfg.lora_up.param_init,
            )
        per_head_dim = cfg.output_dim // cfg.num_heads
        self._add_child("lora_down", down)
        self._add_child(
            "lora_up", up.set(input_dim=cfg.rank, per_head_dim=per_head_dim)
        )

    def _num_heads_of_enabled(self) -> list[int]:
        """Returns the number of heads of each projection with an adapter."""
        cfg = self.config
        num_kv_heads = cfg.num_kv_heads
        if num_kv_heads is None:
            num_kv_heads = cfg.num_heads
        num_heads: list[int] = []
        for name in self.enabled():
            num_heads.append(cfg.num_heads if name == "query" else num_kv_heads)
        return num_heads

    def forward(self, inputs: Tensor) -> Sequence[Tensor]:
        """Returns the terms to add to the projections with an adapter."""
        low_rank = self.lora_down(self.lora_dropout(inputs))
        terms = self.lora_up(low_rank)
        return [term * self.scale() for term in terms]

    @nowrap
    def deltas(self, state: NestedTensor) -> dict[str, Tensor]:
        """Returns the equivalent terms to add to the weights, by projection; see `delta`."""
        down, up = _weights(state)
        deltas: dict[str, Tensor] = {}
        for i, name in enumerate(self.enabled()):
            if isinstance(self.lora_up, LoraUpGroupedLinear):
                projection_up = self.lora_up.split(up)[i]
            else:
                projection_up = up[..., i, :, :, :]
            deltas[name] = self._product(
                down[..., i, :, :], projection_up, "...ir,...rkh->...ikh"
            )
        return deltas

    @nowrap
    def enabled(self) -> list[str]:
        """Returns the projections with an adapter, in the order of the weights' first axis."""
        enable_lora = self.config.enable_lora
        return [name for name in PROJECTIONS if enable_lora.get(name)]


def _check_layer_class(adapted: BaseLayer, cls: type, advice: str) -> None:
    layer_class: type = adapted.config.layer.klass
    if not issubclass(layer_class, cls):
        raise LayerConfigError(
            f"{adapted.path()}: layer is a {layer_class.__name__}, which this adapter does not "
            f"fit; expected a {cls.__name__}. {advice}"
        )


class AdaptedLinear(BaseLayer):
    """Layer that adds the outputs of the children "layer" and "adapter", created by subclasses."""

    _delta_subscripts: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer and the adapter."""
        return self.layer(x) + self.adapter(x)

    @nowrap
    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the layer alone, with the adapter merged into its weight."""
        delta = self.adapter.delta(state["adapter"], self._delta_subscripts)
        return _add_to_weight(dequantized_state(state["layer"]), delta)

    @nowrap
    def factors(self, state: dict[str, Any]) -> dict[str, AdapterFactors]:
        """Returns the adapters of a state, by the paths of their weights in the layer."""
        down, up = _weights(state["adapter"])
        return {"weight": self._factors(down, up)}

    @nowrap
    def with_factors(
        self, state: dict[str, Any], factors: Mapping[str, AdapterFactors]
    ) -> dict[str, Any]:
        """Returns a state with other adapters: the inverse of `factors`."""
        down, up = _weights(state["adapter"])
        new = factors["weight"]
        return _replace_factors(
            state, new.down.reshape(down.shape), new.up.reshape(up.shape)
        )

    def _factors(self, down: Tensor, up: Tensor) -> AdapterFactors:
        raise NotImplementedError(type(self))


class LoraLinear(AdaptedLinear):
    """`Linear` with an adapter.

    >>> cfg = LoraLinear.default_config().set(name="lora", input_dim=8, output_dim=6)
    >>> _ = cfg.adapter.set(rank=2, alpha=4.0)
    >>> specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    >>> specs["layer"]["weight"].shape, specs["adapter"]["lora_down"]["weight"].shape
    ((8, 6), (8, 2))
    """

    class Config(BaseLayer.Config):
        """Configures a LoraLinear; set `rank` and `alpha` of `adapter`."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        layer: Linear.Config = Linear.default_config()
        adapter: LoraLinearAdapter.Config = LoraLinearAdapter.default_config()

    _delta_subscripts = "...ir,...ro->...io"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_layer_class(
            self,
            Linear,
            "For attention, use LoraFusedQKVLinear and LoraMultiheadOutputLinear.",
        )
        layer = cfg.layer.set(
            input_dim=cfg.input_dim, output_dim=cfg.output_dim
        )
        self._add_child("layer", layer)
        adapter = cfg.adapter.set(
            input_dim=cfg.input_dim, output_dim=cfg.output_dim
        )
        self._add_child("adapter", adapter)

    def _factors(self, down: Tensor, up: Tensor) -> AdapterFactors:
        cfg = self.config
        shape = (cfg.input_dim, cfg.output_dim)
        return AdapterFactors(down, up, self.adapter.scale(), shape, (0,))


class LoraMultiheadOutputLinear(AdaptedLinear):
    """`MultiheadOutputLinear` with an adapter, for `output_linear` of an attention layer."""

    class Config(BaseLayer.Config):
        """Configures a LoraMultiheadOutputLinear; set `rank` and `alpha` of `adapter`."""

        model_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        layer: qkv_linear.MultiheadOutputLinear.Config = (
            qkv_linear.MultiheadOutputLinear.default_config()
        )
        adapter: LoraMultiheadOutputAdapter.Config = (
            LoraMultiheadOutputAdapter.default_config()
        )

    _delta_subscripts = "...rnh,...rm->...mnh"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        advice = "For other layers, use LoraLinear and LoraFusedQKVLinear."
        _check_layer_class(self, qkv_linear.MultiheadOutputLinear, advice)
        layer = cfg.layer.set(model_dim=cfg.model_dim, num_heads=cfg.num_heads)
        self._add_child("layer", layer.set(per_head_dim=cfg.per_head_dim))
        adapter = cfg.adapter.set(
            output_dim=cfg.model_dim, num_heads=cfg.num_heads
        )
        self._add_child(
            "adapter", adapter.set(input_dim=cfg.num_heads * cfg.per_head_dim)
        )

    def _factors(self, down: Tensor, up: Tensor) -> AdapterFactors:
        cfg = self.config
        # (…, rank, heads, dim) → (…, heads × dim, rank)
        down = down.reshape(*down.shape[:-2], -1).swapaxes(-1, -2)
        shape = (cfg.model_dim, cfg.num_heads, cfg.per_head_dim)
        return AdapterFactors(down, up, self.adapter.scale(), shape, (1, 2))

    @nowrap
    def with_factors(
        self, state: dict[str, Any], factors: Mapping[str, AdapterFactors]
    ) -> dict[str, Any]:
        down, up = _weights(state["adapter"])
        new = factors["weight"]
        new_down = new.down.swapaxes(-1, -2).reshape(down.shape)
        return _replace_factors(state, new_down, new.up.reshape(up.shape))


class LoraFusedQKVLinear(qkv_linear.BaseQKVLinear):
    """Projections to queries, keys and values with an adapter.

    In a `RoFormerQKVLinear` this is the `input_linear`, since the adapter applies before rotation.
    """

    class Config(qkv_linear.BaseQKVLinear.Config):
        """Configures a LoraFusedQKVLinear."""

        layer: qkv_linear.BaseQKVLinear.Config = (
            qkv_linear.FusedQKVLinear.default_config()
        )
        """The projections, in one weight or several. If keys and values come from another layer,
        only queries can have an adapter."""
        adapter: LoraFusedQKVAdapter.Config = (
            LoraFusedQKVAdapter.default_config()
        )
        """Set its `rank`, `alpha` and `enable_lora`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        advice = (
            "For other layers, use LoraLinear and LoraMultiheadOutputLinear."
        )
        _check_layer_class(self, qkv_linear.BaseQKVLinear, advice)
        if hasattr(cfg.layer, "input_linear"):
            raise LayerConfigError(
                f"{self.path()}: layer is a {cfg.layer.klass.__name__}, which changes queries "
                "and keys after projecting them, so an adapter cannot be added to its outputs. Set "
                "input_linear of that layer to a LoraFusedQKVLinear instead."
            )
        layer: Any = self._add_child("layer", self._with_dims(cfg.layer))
        adapter_cfg = cfg.adapter.set(
            input_dim=cfg.query_dim,
            output_dim=cfg.num_heads * cfg.per_head_dim,
            num_heads=cfg.num_heads,
            num_kv_heads=layer.num_kv_heads,
        )
        adapter: Any = self._add_child("adapter", adapter_cfg)
        enabled_kv = [name for name in adapter.enabled() if name != "query"]
        if enabled_kv and layer.is_kv_sharing(layer.config):
            raise LayerConfigError(
                f"{self.path()}: layer is a {type(layer).__name__}, whose keys and values come "
                f"from another layer, and enable_lora has {enabled_kv}; enable only 'query'."
            )

    @classmethod
    def is_kv_sharing(cls, cfg: Any) -> bool:
        return cfg.layer.klass.is_kv_sharing(cfg.layer)

    @property
    def num_kv_heads(self) -> int:
        return self.layer.num_kv_heads

    def forward(
        self,
        query: Tensor,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        kv_state: kv_cache.KVState | None = None,
        query_positions: Tensor | None = None,
    ) -> qkv_linear.BaseQKVLinear.Output:
        """Projects; see `BaseQKVLinear.forward`.

        Raises ArgumentValueError if keys or values have an adapter but another input than queries.
        """
        enabled = self.adapter.enabled()
        if (key is not None or value is not None) and enabled != ["query"]:
            raise ArgumentValueError(
                f"{self.path()} has one adapter for {', '.join(enabled)} of the same input, and "
                "a separate key or value was passed; set enable_lora={'query': True} in layers "
                "with cross attention."
            )
        projected = self.layer(
            query,
            key=key,
            value=value,
            kv_state=kv_state,
            query_positions=query_positions,
        )
        adapted: dict[str, Tensor] = {}
        for name, term in zip(enabled, self.adapter(query), strict=True):
            adapted[name] = getattr(projected, name) + term
        return projected._replace(**adapted)

    @nowrap
    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the layer alone, with the adapter merged into its weights.

        A layer of unknown weights raises LayerConfigError.
        """
        deltas = self.adapter.deltas(state["adapter"])
        layer = self.layer
        base = dequantized_state(state["layer"])
        if isinstance(layer, qkv_linear.FusedQKVLinear):
            parts = jnp.unstack(base["qkv_proj"]["weight"], axis=-4)
            weight = jnp.stack(_add_deltas(parts, deltas), axis=-4)
            base["qkv_proj"] = _replace_weight(base["qkv_proj"], weight)
        elif isinstance(layer, qkv_linear.FusedGroupedQKVLinear):
            heads = self.config.num_heads
            ends = (heads, heads + layer.num_kv_heads)
            parts = jnp.split(base["qkv_proj"]["weight"], ends, axis=-2)
            weight = jnp.concatenate(_add_deltas(parts, deltas), axis=-2)
            base["qkv_proj"] = _replace_weight(base["qkv_proj"], weight)
        elif "q_proj" in base:
            for name, delta in deltas.items():
                key = f"{name[0]}_proj"
                base[key] = _add_to_weight(base[key], delta)
        else:
            raise LayerConfigError(
                f"{self.path()}: the weights of a {type(layer).__name__} are unknown, so an "
                "adapter cannot be merged into them; its state has "
                f"{sorted(map(str, base))}, expected 'qkv_proj' or 'q_proj'."
            )
        return base

    @nowrap
    def factors(self, state: dict[str, Any]) -> dict[str, AdapterFactors]:
        """Returns the adapters of a state, by the paths of the weights of separate projections."""
        cfg = self.config
        down, _ = _weights(state["adapter"])
        ups = self._ups(state["adapter"])
        factors: dict[str, AdapterFactors] = {}
        for i, name in enumerate(self.adapter.enabled()):
            up = ups[i]
            factors[f"{name[0]}_proj.weight"] = AdapterFactors(
                down[..., i, :, :],
                up.reshape(*up.shape[:-2], -1),
                self.adapter.scale(),
                (cfg.query_dim, up.shape[-2], up.shape[-1]),
                (0,),
            )
        return factors

    @nowrap
    def with_factors(
        self, state: dict[str, Any], factors: Mapping[str, AdapterFactors]
    ) -> dict[str, Any]:
        """Returns a state with other adapters: the inverse of `factors`."""
        _, up = _weights(state["adapter"])
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        for name, like in zip(
            self.adapter.enabled(), self._ups(state["adapter"]), strict=True
        ):
            new = factors[f"{name[0]}_proj.weight"]
            downs.append(new.down)
            ups.append(new.up.reshape(like.shape))
        if isinstance(self.adapter.lora_up, LoraUpGroupedLinear):
            new_up = jnp.concatenate(ups, axis=-2)
        else:
            new_up = jnp.stack(ups, axis=-4)
        new_down = jnp.stack(downs, axis=-3)
        return _replace_factors(state, new_down, new_up.reshape(up.shape))

    def _ups(self, adapter_state: dict[str, Any]) -> list[Tensor]:
        """Returns the weights to heads of each projection, `(…, rank, heads, per_head_dim)`."""
        _, up = _weights(adapter_state)
        if isinstance(self.adapter.lora_up, LoraUpGroupedLinear):
            return self.adapter.lora_up.split(up)
        return [up[..., i, :, :, :] for i in range(up.shape[-4])]


class LoraExpertFactors(BaseLayer):
    """One factor of the adapters of the weights of all experts.

    Parameters: for each weight, one of the same name, (num_experts, inputs, outputs).
    """

    class Config(BaseLayer.Config):
        """Configures a LoraExpertFactors; the surrounding layer sets the shapes and sharding."""

        shapes: Required[dict[str, Shape]] = REQUIRED
        mesh_axes: Required[dict[str, Any]] = REQUIRED

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        specs: dict[str, ParameterSpec] = {}
        for name, shape in cfg.shapes.items():
            specs[name] = ParameterSpec(
                tuple(shape),
                mesh_axes=cfg.mesh_axes[name],
                fan_axes=param_init.FanAxes(
                    in_axis=1, out_axis=2, batch_axis=0
                ),
            )
        return specs

    def forward(self) -> dict[str, Tensor]:
        """Returns the factors by the names of the weights."""
        return {name: self.parameters[name] for name in self.config.shapes}


class LoraExpertsAdapter(BaseLayer):
    """Adapters of the weights of experts; a token passes those of the experts that it chose."""

    class Config(BaseLayer.Config):
        """Configures a LoraExpertsAdapter, which has no dropout."""

        rank: Required[int] = REQUIRED
        alpha: Required[float] = REQUIRED
        weight_specs: Required[dict[str, ParameterSpec]] = REQUIRED
        """Specs of the weights; set by the surrounding layer."""
        lora_down: LoraExpertFactors.Config = (
            LoraExpertFactors.default_config().set(param_init=_normal_init())
        )
        lora_up: LoraExpertFactors.Config = (
            LoraExpertFactors.default_config().set(param_init=_zeros_init())
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_rank(self)
        down_shapes: dict[str, Shape] = {}
        up_shapes: dict[str, Shape] = {}
        down_axes: dict[str, Any] = {}
        up_axes: dict[str, Any] = {}
        for name, spec in cfg.weight_specs.items():
            num_experts, inputs, outputs = spec.shape
            down_shapes[name] = (num_experts, inputs, cfg.rank)
            up_shapes[name] = (num_experts, cfg.rank, outputs)
            entries = tuple(spec.mesh_axes or (None, None, None))
            down_axes[name] = (entries[0], entries[1], None)
            up_axes[name] = (entries[0], None, entries[2])
        self._add_child(
            "lora_down",
            cfg.lora_down.set(shapes=down_shapes, mesh_axes=down_axes),
        )
        self._add_child(
            "lora_up", cfg.lora_up.set(shapes=up_shapes, mesh_axes=up_axes)
        )

    @nowrap
    def scale(self) -> float:
        """Returns the factor of the products."""
        return self.config.alpha / self.config.rank

    def forward(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the factors of the terms to add to the weights, by their names."""
        downs, ups = self.lora_down(), self.lora_up()
        return {name: (downs[name], ups[name] * self.scale()) for name in downs}


class LoraExperts(BaseLayer):
    """Mixture of experts with adapters of the weights of each expert.

    The term of an adapter is the product of an expert's tokens with both factors; its sum with the
    weights is never computed.
    """

    class Config(BaseLayer.Config):
        """Configures a LoraExperts; set `rank` and `alpha` of `adapter`."""

        input_dim: Required[int] = REQUIRED
        layer: TransformerFeedForwardMoE.Config = (
            TransformerFeedForwardMoE.default_config()
        )
        adapter: LoraExpertsAdapter.Config = LoraExpertsAdapter.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_layer_class(
            self, TransformerFeedForwardMoE, "For other layers, use LoraLinear."
        )
        layer: Any = self._add_child(
            "layer", cfg.layer.set(input_dim=cfg.input_dim)
        )
        self._add_child(
            "adapter",
            cfg.adapter.set(weight_specs=layer.expert_weight_specs()),
        )

    def forward(self, inputs: Tensor, paddings: Tensor | None = None) -> Tensor:
        """Applies the layer with the adapters; see `TransformerFeedForwardMoE.forward`."""
        return self.layer(inputs, paddings, low_rank_factors=self.adapter())

    @nowrap
    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the layer alone, with the adapters merged into its weights."""
        merged = copy.copy(state["layer"])
        for name, factors in self.factors(state).items():
            product = jnp.matmul(
                factors.down.astype(jnp.float32), factors.up.astype(jnp.float32)
            )
            weight = merged[name] + factors.scale * product
            merged[name] = weight.astype(merged[name].dtype)
        return merged

    @nowrap
    def factors(self, state: dict[str, Any]) -> dict[str, AdapterFactors]:
        """Returns the adapters of a state, by the names of their weights in the layer."""
        adapter = state["adapter"]
        factors: dict[str, AdapterFactors] = {}
        for name, down in adapter["lora_down"].items():
            up = adapter["lora_up"][name]
            shape = (down.shape[-2], up.shape[-1])
            factors[name] = AdapterFactors(
                down, up, self.adapter.scale(), shape, (0,)
            )
        return factors

    @nowrap
    def with_factors(
        self, state: dict[str, Any], factors: Mapping[str, AdapterFactors]
    ) -> dict[str, Any]:
        """Returns a state with other adapters: the inverse of `factors`."""
        adapter = copy.copy(state["adapter"])
        downs = copy.copy(adapter["lora_down"])
        ups = copy.copy(adapter["lora_up"])
        for name, new in factors.items():
            downs[name] = new.down.astype(downs[name].dtype)
            ups[name] = new.up.astype(ups[name].dtype)
        adapter["lora_down"], adapter["lora_up"] = downs, ups
        new_state = copy.copy(state)  # a stack stays marked as one
        new_state["adapter"] = adapter
        return new_state


def _replace_factors(
    state: dict[str, Any], down: Tensor, up: Tensor
) -> dict[str, Any]:
    adapter = copy.copy(state["adapter"])
    adapter["lora_down"] = _replace_weight(adapter["lora_down"], down)
    adapter["lora_up"] = _replace_weight(adapter["lora_up"], up)
    new_state = copy.copy(state)  # a stack stays marked as one
    new_state["adapter"] = adapter
    return new_state


def _add_deltas(
    parts: Iterable[Tensor], deltas: Mapping[str, Tensor]
) -> list[Tensor]:
    sums: list[Tensor] = []
    for name, part in zip(PROJECTIONS, parts, strict=True):
        sums.append(part + deltas.get(name, 0))
    return sums


def _replace_weight(state: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    new_state = copy.copy(state)  # a stack stays marked as one
    new_state["weight"] = weight.astype(state["weight"].dtype)
    return new_state


def _add_to_weight(state: dict[str, Any], delta: Tensor) -> dict[str, Any]:
    return _replace_weight(state, state["weight"] + delta)


_ADAPTED_LAYERS = (
    LoraLinear,
    LoraMultiheadOutputLinear,
    LoraFusedQKVLinear,
    LoraExperts,
)


def merge_adapters(layer: BaseLayer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an equivalent model without adapters; `state` is not changed.

    The adapters' dropout is ignored.

    >>> from weft.hierarchy.module import functional
    >>> cfg = LoraLinear.default_config().set(name="lora", input_dim=2, output_dim=2)
    >>> _ = cfg.adapter.set(rank=1, alpha=1.0)
    >>> layer = cfg.instantiate(parent=None)
    >>> state = layer.initialize_parameters_recursively(jax.random.PRNGKey(0))
    >>> sorted(merge_adapters(layer, state))
    ['bias', 'weight']
    """

    def merge(path: str, adapted: Any, adapted_state: dict[str, Any]) -> Any:
        return adapted.merged(adapted_state)

    return map_adapted_layers(layer, dequantized_state(state), merge)


def unmerge_adapters(
    layer: BaseLayer, merged_state: PyTree, state: dict[str, Any]
) -> dict[str, Any]:
    """Returns the state with adapters whose `merge_adapters` is `merged_state`, up to rounding.

    Args:
      layer: the model with adapters.
      state: a state of it with the adapters to subtract.

    >>> cfg = LoraLinear.default_config().set(name="lora", input_dim=2, output_dim=2)
    >>> _ = cfg.adapter.set(rank=1, alpha=1.0)
    >>> layer = cfg.instantiate(parent=None)
    >>> state = layer.initialize_parameters_recursively(jax.random.PRNGKey(0))
    >>> unmerged = unmerge_adapters(layer, merge_adapters(layer, state), state)
    >>> bool(jnp.allclose(unmerged["layer"]["weight"], state["layer"]["weight"]))
    True
    """
    merged_with_adapters = with_base_state(state, merged_state)
    base = merge_adapters(layer, _negated(merged_with_adapters))
    return with_base_state(state, base)


def _negated(state: PyTree) -> PyTree:
    """Returns a state whose adapters have the opposite effect."""
    if not isinstance(state, dict):
        return state
    new_state = copy.copy(state)  # a stack stays marked as one
    if _has_adapter(state):
        adapter = copy.copy(state["adapter"])
        adapter["lora_up"] = jax.tree.map(jnp.negative, adapter["lora_up"])
        new_state["layer"] = _negated(state["layer"])
        new_state["adapter"] = adapter
        return new_state
    for name, child in state.items():
        new_state[name] = _negated(child)
    return new_state


def map_adapted_layers(
    layer: BaseLayer,
    state: dict[str, Any],
    fn: Callable[[str, Any, dict[str, Any]], Any],
    path: str = "",
) -> dict[str, Any]:
    """Returns a copy of a state with those of layers with adapters replaced.

    Args:
      fn: function of the path of such a layer, the layer and its state.
    """
    new_state = copy.copy(state)  # a stack stays marked as one
    if isinstance(layer, _ADAPTED_LAYERS):
        # An expert that all tokens pass has adapters within a layer with adapters.
        new_state["layer"] = map_adapted_layers(
            layer.layer, state["layer"], fn, path
        )
        return fn(path, layer, new_state)
    for name, child in layer.children.items():
        if isinstance(child, BaseLayer) and name in state:
            child_path = f"{path}.{name}".lstrip(".")
            new_state[name] = map_adapted_layers(
                child, state[name], fn, child_path
            )
    return new_state


def set_lora_recursively(
    cfg: ConfigBase,
    *,
    rank: int,
    alpha: float,
    dropout_rate: float = 0.0,
    attention: bool = True,
    feed_forward: bool = True,
    targets: Collection[str] | None = None,
    dtype: DType | None = None,
) -> None:
    """Adds adapters to the linear maps of every attention and feed-forward layer, in place.

    If keys and values come from another layer, only the projection to queries gets an adapter.

    Args:
      alpha: their outputs are multiplied by `alpha / rank`.
      targets: which of `LORA_TARGETS` get one, and `EXPERTS` if each expert does; None for all of
        `LORA_TARGETS`.
      dtype: of the adapters' weights, None for that of the layers.

    Raises LayerConfigError if there is no layer to adapt, or no such target.

    >>> from weft.hierarchy.attention.transformer import TransformerLayer
    >>> cfg = TransformerLayer.default_config()
    >>> set_lora_recursively(cfg, rank=2, alpha=4.0)
    >>> cfg.feed_forward.linear1.klass.__name__
    'LoraLinear'
    """
    num_adapted = 0
    adapted_targets = LORA_TARGETS if targets is None else tuple(targets)
    all_targets = (*LORA_TARGETS, EXPERTS)
    for target in adapted_targets:
        if target not in all_targets:
            raise LayerConfigError(
                f"no linear map of a transformer layer is called {target!r}; adapters can be at "
                f"{', '.join(all_targets)}. {did_you_mean(target, all_targets)}"
            )
    is_query, is_key, is_value, is_output = (
        target in adapted_targets for target in LORA_TARGETS[:4]
    )

    def with_adapter(
        layer: InstantiableConfig, adapted_class: type[BaseLayer]
    ) -> InstantiableConfig:
        nonlocal num_adapted
        num_adapted += 1
        adapted: Any = adapted_class.default_config()
        adapted.layer = layer
        adapted.adapter.set(rank=rank, alpha=alpha, dtype=dtype)
        if adapted_class is not LoraExperts:
            adapted.adapter.lora_dropout.rate = dropout_rate
        return adapted

    def add_to_attention(config: InstantiableConfig) -> None:
        output_linear = config.output_linear
        if is_output and is_config_of(
            output_linear, qkv_linear.MultiheadOutputLinear
        ):
            config.output_linear = with_adapter(
                output_linear, LoraMultiheadOutputLinear
            )
        # A projection that rotates is around the one that gets the adapter.
        is_wrapped = hasattr(config.input_linear, "input_linear")
        parent = config.input_linear if is_wrapped else config
        layer = parent.input_linear
        if is_config_of(layer, LoraFusedQKVLinear):
            return
        projects_kv = not layer.klass.is_kv_sharing(layer)
        enable_lora = {
            "query": is_query,
            "key": is_key and projects_kv,
            "value": is_value and projects_kv,
        }
        if any(enable_lora.values()):
            parent.input_linear = with_adapter(layer, LoraFusedQKVLinear)
            parent.input_linear.adapter.enable_lora = enable_lora

    def add(config: InstantiableConfig) -> None:
        if attention and is_config_of(config, MultiheadAttention):
            add_to_attention(config)
        if feed_forward and is_config_of(config, TransformerFeedForwardLayer):
            for name in ("linear1", "linear2"):
                layer = getattr(config, name)
                if name in adapted_targets and is_config_of(layer, Linear):
                    setattr(config, name, with_adapter(layer, LoraLinear))

    num_mixtures = 0

    def add_to_experts(config: InstantiableConfig) -> None:
        nonlocal num_mixtures
        if is_config_of(config, LoraExperts):
            return
        for name, value in config.items():
            if is_config_of(value, TransformerFeedForwardMoE):
                num_mixtures += 1
                setattr(config, name, with_adapter(value, LoraExperts))

    for_each_config(cfg, add)
    if EXPERTS in adapted_targets:
        for_each_config(cfg, add_to_experts)
        if not num_mixtures:
            raise LayerConfigError(
                f"{cfg._label()} has no mixture of experts, and targets has {EXPERTS!r}; leave it "
                "out."
            )
    if not num_adapted:
        raise LayerConfigError(
            f"{cfg._label()} has no attention and no feed-forward layer to which an adapter could "
            f"be added (attention={attention}, feed_forward={feed_forward}). "
            "Pass the config of a transformer."
        )


def without_lora(cfg: ConfigT) -> ConfigT:
    """Returns a copy of the config without adapters, for the result of `merge_adapters`.

    Its weights are stored in the layers' dtypes.
    """
    base_cfg = cfg.clone()

    def remove(config: InstantiableConfig) -> None:
        # Not `getattr`: a config looks for similar names of fields that it lacks.
        if "weight_format" in config:
            config.set(weight_format=None)
        for name, value in config.items():
            if is_config_of(value, _ADAPTED_LAYERS):
                setattr(config, name, value.layer)

    for_each_config(base_cfg, remove)
    return base_cfg


def base_state(state: PyTree) -> PyTree:
    """Returns a copy of a state without adapters, which are dropped, not merged.

    `state` can also consist of shapes, specs or shardings.

    >>> adapter = {"lora_down": 2, "lora_up": 3}
    >>> base_state({"linear": {"layer": {"weight": 1}, "adapter": adapter}})
    {'linear': {'weight': 1}}
    """
    if not isinstance(state, dict):
        return state
    if _has_adapter(state):
        return base_state(state["layer"])
    new_state = copy.copy(state)  # a stack stays marked as one
    for name, child in state.items():
        new_state[name] = base_state(child)
    return new_state


def with_base_state(state: PyTree, base: PyTree) -> PyTree:
    """Returns a copy of a state with adapters, with the other parameters from `base`.

    >>> state = {"linear": {"layer": {"weight": 1}, "adapter": {"lora_down": 2, "lora_up": 3}}}
    >>> with_base_state(state, {"linear": {"weight": 4}})["linear"]["layer"]
    {'weight': 4}
    """
    if not isinstance(state, dict):
        return base
    new_state = copy.copy(state)  # a stack stays marked as one
    if _has_adapter(state):
        new_state["layer"] = base
        # Not the base's own leaves: theirs may be stored in another way.
        if adapter_state(state["layer"]):
            new_state["layer"] = with_base_state(state["layer"], base)
        return new_state
    for name, child in state.items():
        new_state[name] = with_base_state(child, base[name])
    return new_state


def adapter_state(state: PyTree) -> dict[str, Any]:
    """Returns the adapters of a state, nested as there; `state` may also consist of shapes.

    >>> state = {"linear": {"layer": {"weight": 1}, "adapter": {"lora_down": 2, "lora_up": 3}}}
    >>> adapter_state({**state, "norm": {"scale": 4}})
    {'linear': {'adapter': {'lora_down': 2, 'lora_up': 3}}}
    """
    adapters = copy.copy(state)  # a stack stays marked as one
    if _has_adapter(state):
        inner_adapters = adapter_state(state["layer"])
        if inner_adapters:
            adapters["layer"] = inner_adapters
        else:
            del adapters["layer"]
        return adapters
    for name, child in state.items():
        child_adapters: Any = {}
        if isinstance(child, dict):
            child_adapters = adapter_state(child)
        if child_adapters:
            adapters[name] = child_adapters
        else:
            del adapters[name]
    return adapters


def with_adapter_state(base: PyTree, adapters: PyTree) -> dict[str, Any]:
    """Returns a state of its base and its adapters: the inverse of both.

    >>> adapters = {"linear": {"adapter": {"lora_down": 2, "lora_up": 3}}}
    >>> with_adapter_state({"linear": {"weight": 1}, "norm": 4}, adapters)["linear"]["layer"]
    {'weight': 1}
    """
    if _is_adapter(adapters.get("adapter")):
        layer = with_adapter_state(base, adapters.get("layer", {}))
        return {"layer": layer, "adapter": adapters["adapter"]}
    state = copy.copy(base)  # a stack stays marked as one
    for name, child in adapters.items():
        state[name] = with_adapter_state(base[name], child)
    return state


def _has_adapter(state: dict[str, PyTree]) -> bool:
    if state.keys() != {"layer", "adapter"}:
        return False
    return _is_adapter(state["adapter"])


def _is_adapter(state: PyTree) -> bool:
    return isinstance(state, dict) and {"lora_down", "lora_up"} <= state.keys()
