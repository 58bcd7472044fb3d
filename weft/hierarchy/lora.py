"""Low-rank adapters: a frozen linear map plus a small trained one.

    y = layer(x) + (alpha / rank) * lora_up(lora_down(dropout(x)))

`lora_down` maps to `rank` dimensions, `lora_up` from there to the outputs (Hu et al., 2022). The
weight of `lora_up` is initialized to 0, so that untrained adapters change nothing. A layer with an
adapter has two children, "layer", with the state of the layer without adapter, and "adapter". A
learner trains only the adapters with

    update_rules = [(".*/adapter/.*", UpdateType.ALL_UPDATES), (".*", UpdateType.NO_UPDATE)]

and `merge_adapters` adds the trained adapters to the weights of the layers.

    set_lora_recursively(cfg, rank=8, alpha=16.0)

replaces the projections of every attention in a config by a `LoraFusedQKVLinear`, its output by a
`LoraMultiheadOutputLinear`, and each linear map of a feed-forward layer by a `LoraLinear`.
`base_state` and `with_base_state` separate a state from its adapters, and join them again.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from weft.config import REQUIRED, ConfigBase, InstantiableConfig, Required
from weft.errors import ArgumentValueError, LayerConfigError
from weft.functional import project
from weft.hierarchy import param_init
from weft.hierarchy.attention import kv_cache, qkv_linear
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.config_setters import for_each_config, is_config_of
from weft.hierarchy.layers.linear import Dropout, Linear
from weft.hierarchy.module import Module, nowrap
from weft.typing import NestedTensor, PyTree, Shape, Tensor

PROJECTIONS = ("query", "key", "value")


def _normal_init() -> Any:
    return param_init.normal_weights("fan_in")


def _zeros_init() -> Any:
    zeros = param_init.ConstantInitializer.default_config().set(value=0.0)
    return param_init.initializer_of_weights(zeros)


class WeightOnlyLinear(BaseLayer):
    """Map with one weight and no bias. A subclass defines the weight's shape and the map."""

    _sizes: ClassVar[tuple[str, ...]]  # config fields of the sizes of the weight's axes
    _fan_axes: ClassVar[param_init.FanAxes]
    _subscripts: ClassVar[str]

    def _weight_shape(self) -> Shape:
        return tuple(getattr(self.config, name) for name in self._sizes)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape, mesh_axes = self._weight_shape(), self.config.param_partition_spec
        return {"weight": ParameterSpec(shape, mesh_axes=mesh_axes, fan_axes=self._fan_axes)}

    def forward(self, inputs: Tensor) -> Any:
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
        return [project(self._subscripts, x, w) for x, w in zip(inputs, weights, strict=True)]


class LoraDownMultiheadLinear(qkv_linear.MultiheadOutputLinear):
    """Map from the heads to the rank, which is the weight's first axis, `model_dim`."""


class BaseLoraAdapter(BaseLayer):
    """Base of the adapters of linear layers. A subclass sets the dimensions of its children."""

    class Config(BaseLayer.Config):
        """Configures an adapter; see the formula in the module docstring.

        The surrounding layer sets `input_dim` and `output_dim`.
        """

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        rank: Required[int] = REQUIRED
        alpha: Required[float] = REQUIRED
        lora_dropout: InstantiableConfig = Dropout.default_config()
        lora_down: InstantiableConfig = Linear.default_config().set(
            bias=False, param_init=_normal_init(), param_partition_spec=(None, None)
        )
        lora_up: InstantiableConfig = Linear.default_config().set(
            bias=False, param_init=_zeros_init()
        )

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
        self._add_child("lora_down", self._down())
        self._add_child("lora_up", cfg.lora_up.set(input_dim=cfg.rank, output_dim=cfg.output_dim))

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
        return self.lora_up(self.lora_down(self.lora_dropout(inputs))) * self.scale()

    @nowrap
    def delta(self, state: NestedTensor, subscripts: str) -> Tensor:
        """Returns the equivalent term to add to the layer's weight.

        `state` may have leading axes of layers. `subscripts` are those of both weights and the
        result, as for an einsum.
        """
        down, up = _weights(state)
        return self._product(down, up, subscripts)

    def _product(self, down: Tensor, up: Tensor, subscripts: str) -> Tensor:
        product = project(subscripts, down.astype(jnp.float32), up.astype(jnp.float32))
        return self.scale() * product


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
        lora_down: InstantiableConfig = LoraDownMultiheadLinear.default_config().set(
            bias=False, param_init=_normal_init()
        )

    def _down(self) -> InstantiableConfig:
        cfg = self.config
        per_head_dim = cfg.input_dim // cfg.num_heads
        return cfg.lora_down.set(
            model_dim=cfg.rank, num_heads=cfg.num_heads, per_head_dim=per_head_dim
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
        lora_down: InstantiableConfig = LoraDownFusedLinear.default_config().set(
            param_init=_normal_init()
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
            input_dim=cfg.input_dim, output_dim=cfg.rank, num_enabled=num_enabled
        )
        num_heads_by_projection = self._num_heads_by_projection()
        if set(num_heads_by_projection) == {cfg.num_heads}:
            up = cfg.lora_up.set(num_enabled=num_enabled, num_heads=cfg.num_heads)
        else:
            up = LoraUpGroupedLinear.default_config().set(
                num_heads=num_heads_by_projection, param_init=cfg.lora_up.param_init
            )
        per_head_dim = cfg.output_dim // cfg.num_heads
        self._add_child("lora_down", down)
        self._add_child("lora_up", up.set(input_dim=cfg.rank, per_head_dim=per_head_dim))

    def _num_heads_by_projection(self) -> list[int]:
        cfg = self.config
        num_kv_heads = cfg.num_heads if cfg.num_kv_heads is None else cfg.num_kv_heads
        return [cfg.num_heads if name == "query" else num_kv_heads for name in self.enabled()]

    def forward(self, inputs: Tensor) -> Sequence[Tensor]:
        """Returns the terms to add to the projections with an adapter."""
        terms = self.lora_up(self.lora_down(self.lora_dropout(inputs)))
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
            deltas[name] = self._product(down[..., i, :, :], projection_up, "...ir,...rkh->...ikh")
        return deltas

    @nowrap
    def enabled(self) -> list[str]:
        """Returns the projections with an adapter, in the order of the weights' first axis."""
        return [name for name in PROJECTIONS if self.config.enable_lora.get(name)]


def _check_layer_class(adapted: BaseLayer, cls: type, instead: str) -> None:
    layer_class: type = adapted.config.layer.klass
    if not issubclass(layer_class, cls):
        raise LayerConfigError(
            f"{adapted.path()}: layer is a {layer_class.__name__}, which this adapter does not "
            f"fit; expected a {cls.__name__}. {instead}"
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
        return _add_to_weight(state["layer"], delta)


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
            self, Linear, "For attention, use LoraFusedQKVLinear and LoraMultiheadOutputLinear."
        )
        layer = cfg.layer.set(input_dim=cfg.input_dim, output_dim=cfg.output_dim)
        self._add_child("layer", layer)
        adapter = cfg.adapter.set(input_dim=cfg.input_dim, output_dim=cfg.output_dim)
        self._add_child("adapter", adapter)


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
        adapter: LoraMultiheadOutputAdapter.Config = LoraMultiheadOutputAdapter.default_config()

    _delta_subscripts = "...rnh,...rm->...mnh"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        instead = "For other layers, use LoraLinear and LoraFusedQKVLinear."
        _check_layer_class(self, qkv_linear.MultiheadOutputLinear, instead)
        layer = cfg.layer.set(model_dim=cfg.model_dim, num_heads=cfg.num_heads)
        self._add_child("layer", layer.set(per_head_dim=cfg.per_head_dim))
        adapter = cfg.adapter.set(output_dim=cfg.model_dim, num_heads=cfg.num_heads)
        self._add_child("adapter", adapter.set(input_dim=cfg.num_heads * cfg.per_head_dim))


class LoraFusedQKVLinear(qkv_linear.BaseQKVLinear):
    """Projections to queries, keys and values with an adapter.

    In a `RoFormerQKVLinear` this is the `input_linear`, since the adapter applies before rotation.
    """

    class Config(qkv_linear.BaseQKVLinear.Config):
        """Configures a LoraFusedQKVLinear."""

        layer: qkv_linear.BaseQKVLinear.Config = qkv_linear.FusedQKVLinear.default_config()
        """The projections, in one weight or several. If keys and values come from another layer,
        only queries can have an adapter."""
        adapter: LoraFusedQKVAdapter.Config = LoraFusedQKVAdapter.default_config()
        """Set its `rank`, `alpha` and `enable_lora`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        instead = "For other layers, use LoraLinear and LoraMultiheadOutputLinear."
        _check_layer_class(self, qkv_linear.BaseQKVLinear, instead)
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
        of_keys = [name for name in adapter.enabled() if name != "query"]
        if of_keys and layer.is_kv_sharing(layer.config):
            raise LayerConfigError(
                f"{self.path()}: layer is a {type(layer).__name__}, whose keys and values come "
                f"from another layer, and enable_lora has {of_keys}; enable only 'query'."
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
            query, key=key, value=value, kv_state=kv_state, query_positions=query_positions
        )
        added = zip(enabled, self.adapter(query), strict=True)
        return projected._replace(**{name: getattr(projected, name) + x for name, x in added})

    @nowrap
    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the layer alone, with the adapter merged into its weights.

        A layer of unknown weights raises LayerConfigError.
        """
        deltas = self.adapter.deltas(state["adapter"])
        layer, base = self.layer, copy.copy(state["layer"])
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
                base[f"{name[0]}_proj"] = _add_to_weight(base[f"{name[0]}_proj"], delta)
        else:
            raise LayerConfigError(
                f"{self.path()}: the weights of a {type(layer).__name__} are unknown, so an "
                "adapter cannot be merged into them; its state has "
                f"{sorted(map(str, base))}, expected 'qkv_proj' or 'q_proj'."
            )
        return base


def _add_deltas(parts: Iterable[Tensor], deltas: Mapping[str, Tensor]) -> list[Tensor]:
    return [part + deltas.get(name, 0) for name, part in zip(PROJECTIONS, parts, strict=True)]


def _replace_weight(state: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    new = copy.copy(state)  # a stack stays marked as one
    new["weight"] = weight.astype(state["weight"].dtype)
    return new


def _add_to_weight(state: dict[str, Any], delta: Tensor) -> dict[str, Any]:
    return _replace_weight(state, state["weight"] + delta)


_ADAPTED_LAYERS = (LoraLinear, LoraMultiheadOutputLinear, LoraFusedQKVLinear)


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
    if isinstance(layer, _ADAPTED_LAYERS):
        return layer.merged(state)
    new: Any = copy.copy(state)  # a stack stays marked as one
    for name, child in layer.children.items():
        if isinstance(child, BaseLayer) and name in new:
            new[name] = merge_adapters(child, new[name])
    return new


def set_lora_recursively(
    cfg: ConfigBase,
    *,
    rank: int,
    alpha: float,
    dropout_rate: float = 0.0,
    attention: bool = True,
    feed_forward: bool = True,
) -> None:
    """Adds adapters to the linear maps of every attention and feed-forward layer, in place.

    If keys and values come from another layer, only the projection to queries gets an adapter.

    Args:
      alpha: their outputs are multiplied by `alpha / rank`.

    Raises LayerConfigError if there is no layer to adapt.

    >>> from weft.hierarchy.attention.transformer import TransformerLayer
    >>> cfg = TransformerLayer.default_config()
    >>> set_lora_recursively(cfg, rank=2, alpha=4.0)
    >>> cfg.feed_forward.linear1.klass.__name__
    'LoraLinear'
    """
    done = []

    def with_adapter(layer: Any, kind: Any) -> Any:
        done.append(layer)
        new = kind.default_config().set(layer=layer)
        new.adapter.set(rank=rank, alpha=alpha)
        new.adapter.lora_dropout.rate = dropout_rate
        return new

    def add(config: Any) -> None:
        if attention and is_config_of(config, MultiheadAttention):
            if is_config_of(config.output_linear, qkv_linear.MultiheadOutputLinear):
                config.output_linear = with_adapter(config.output_linear, LoraMultiheadOutputLinear)
            is_wrapped = hasattr(config.input_linear, "input_linear")
            holder = config.input_linear if is_wrapped else config
            if not is_config_of(holder.input_linear, LoraFusedQKVLinear):
                layer = holder.input_linear
                own = not layer.klass.is_kv_sharing(layer)
                holder.input_linear = with_adapter(layer, LoraFusedQKVLinear)
                holder.input_linear.adapter.enable_lora = {"query": True, "key": own, "value": own}
        if feed_forward and is_config_of(config, TransformerFeedForwardLayer):
            for name in ("linear1", "linear2"):
                if is_config_of(getattr(config, name), Linear):
                    setattr(config, name, with_adapter(getattr(config, name), LoraLinear))

    for_each_config(cfg, add)
    if not done:
        raise LayerConfigError(
            f"{cfg._label()} has no attention and no feed-forward layer to which an adapter could "
            f"be added (attention={attention}, feed_forward={feed_forward}). "
            "Pass the config of a transformer."
        )


def without_lora(cfg: Any) -> Any:
    """Returns a copy of the config without adapters, for the result of `merge_adapters`."""
    new = cfg.clone()

    def remove(config: Any) -> None:
        for name, value in config.items():
            if is_config_of(value, _ADAPTED_LAYERS):
                setattr(config, name, value.layer)

    for_each_config(new, remove)
    return new


def base_state(state: dict[str, Any]) -> Any:
    """Returns a copy of a state without adapters, which are dropped, not merged.

    `state` can also consist of shapes, specs or shardings.

    >>> adapter = {"lora_down": 2, "lora_up": 3}
    >>> base_state({"linear": {"layer": {"weight": 1}, "adapter": adapter}})
    {'linear': {'weight': 1}}
    """
    if not isinstance(state, dict):
        return state
    if _has_adapter(state):
        return state["layer"]
    new = copy.copy(state)  # a stack stays marked as one
    new.update({name: base_state(child) for name, child in state.items()})
    return new


def with_base_state(state: dict[str, Any], base: dict[str, Any]) -> Any:
    """Returns a copy of a state with adapters, with the other parameters from `base`.

    >>> state = {"linear": {"layer": {"weight": 1}, "adapter": {"lora_down": 2, "lora_up": 3}}}
    >>> with_base_state(state, {"linear": {"weight": 4}})["linear"]["layer"]
    {'weight': 4}
    """
    if not isinstance(state, dict):
        return base
    new = copy.copy(state)
    if _has_adapter(state):
        new["layer"] = base
    else:
        new.update({name: with_base_state(child, base[name]) for name, child in state.items()})
    return new


def _has_adapter(state: dict[str, Any]) -> bool:
    adapter = state.get("adapter")
    return (
        state.keys() == {"layer", "adapter"}
        and isinstance(adapter, dict)
        and ({"lora_down", "lora_up"} <= adapter.keys())
    )
