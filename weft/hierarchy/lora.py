"""Low-rank adapters: a frozen linear map plus a small trained one.

    y = layer(x) + (alpha / rank) * lora_up(lora_down(dropout(x)))

`lora_down` maps to `rank` dimensions, `lora_up` from there to the outputs (Hu et al., 2022). The
weight of `lora_up` is initialized to 0, so that untrained adapters change nothing. A layer with an
adapter has two children, "layer", with the state of the layer without adapter, and "adapter". A
learner trains only the adapters with

    update_rules = [(".*/adapter/.*", UpdateType.ALL_UPDATES), (".*", UpdateType.NO_UPDATE)]

and `merge_adapters` adds the trained adapters to the weights of the layers.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from weft.config import REQUIRED, Required, config_class
from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.kv_cache import KVState
from weft.hierarchy.linear import Linear
from weft.hierarchy.lora_adapter import (
    PROJECTIONS,
    LoraDownFusedLinear,
    LoraDownMultiheadLinear,
    LoraFusedQKVAdapter,
    LoraLinearAdapter,
    LoraMultiheadOutputAdapter,
    LoraUpFusedLinear,
    LoraUpGroupedLinear,
)
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.qkv_linear import (
    BaseQKVLinear,
    FusedGroupedQKVLinear,
    FusedQKVLinear,
    MultiheadOutputLinear,
)
from weft.typing import Tensor

__all__ = [
    "LoraDownFusedLinear",
    "LoraDownMultiheadLinear",
    "LoraFusedQKVAdapter",
    "LoraFusedQKVLinear",
    "LoraLinear",
    "LoraLinearAdapter",
    "LoraMultiheadOutputAdapter",
    "LoraMultiheadOutputLinear",
    "LoraUpFusedLinear",
    "LoraUpGroupedLinear",
    "merge_adapters",
]


def _check_is_a(layer: Any, cls: type, path: str, instead: str) -> None:
    """Raises LayerConfigError for the config of a layer that this adapter does not fit."""
    if not issubclass(layer.klass, cls):
        raise LayerConfigError(
            f"{path}: layer is a {layer.klass.__name__}, which this adapter does not fit; "
            f"expected a {cls.__name__}. {instead}"
        )


class _BesideAdapter(BaseLayer):
    """Layer that adds the outputs of the children "layer" and "adapter", created by subclasses."""

    _delta_subscripts: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer and the adapter."""
        return self.layer(x) + self.adapter(x)

    @nowrap
    def merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the layer alone, with the adapter merged into its weight."""
        entries: Any = state
        delta = self.adapter.delta(entries["adapter"], self._delta_subscripts)
        return _plus(entries["layer"], delta)


class LoraLinear(_BesideAdapter):
    """`Linear` with an adapter.

    Example:
      >>> cfg = LoraLinear.default_config().set(name="lora", input_dim=8, output_dim=6)
      >>> _ = cfg.adapter.set(rank=2, alpha=4.0)
      >>> specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
      >>> specs["layer"]["weight"].shape, specs["adapter"]["lora_down"]["weight"].shape
      ((8, 6), (8, 2))
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LoraLinear; set `rank` and `alpha` of `adapter`."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        layer: Linear.Config = Linear.default_config()
        adapter: LoraLinearAdapter.Config = LoraLinearAdapter.default_config()

    _delta_subscripts = "...ir,...ro->...io"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dims = {"input_dim": cfg.input_dim, "output_dim": cfg.output_dim}
        _check_is_a(
            cfg.layer,
            Linear,
            self.path(),
            "For attention, use LoraFusedQKVLinear and LoraMultiheadOutputLinear.",
        )
        self._add_child("layer", cfg.layer.set(**dims))
        self._add_child("adapter", cfg.adapter.set(**dims))


class LoraMultiheadOutputLinear(_BesideAdapter):
    """`MultiheadOutputLinear` with an adapter, for `output_linear` of an attention layer."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a LoraMultiheadOutputLinear; set `rank` and `alpha` of `adapter`."""

        model_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        layer: MultiheadOutputLinear.Config = MultiheadOutputLinear.default_config()
        adapter: LoraMultiheadOutputAdapter.Config = LoraMultiheadOutputAdapter.default_config()

    _delta_subscripts = "...rnh,...rm->...mnh"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_is_a(
            cfg.layer,
            MultiheadOutputLinear,
            self.path(),
            "For other layers, use LoraLinear and LoraFusedQKVLinear.",
        )
        layer = cfg.layer.set(
            model_dim=cfg.model_dim, num_heads=cfg.num_heads, per_head_dim=cfg.per_head_dim
        )
        self._add_child("layer", layer)
        adapter = cfg.adapter.set(
            input_dim=cfg.num_heads * cfg.per_head_dim,
            output_dim=cfg.model_dim,
            num_heads=cfg.num_heads,
        )
        self._add_child("adapter", adapter)


class LoraFusedQKVLinear(BaseQKVLinear):
    """Projections to queries, keys and values with an adapter.

    In a `RoFormerQKVLinear` this is the `input_linear`, since the adapter applies before rotation.
    """

    @config_class
    class Config(BaseQKVLinear.Config):
        """Configures a LoraFusedQKVLinear.

        Attributes:
          layer: the projections, in one weight or several. If keys and values come from another
            layer, only queries can have an adapter.
          adapter: set its `rank`, `alpha` and `enable_lora`.
        """

        layer: BaseQKVLinear.Config = FusedQKVLinear.default_config()
        adapter: LoraFusedQKVAdapter.Config = LoraFusedQKVAdapter.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        _check_is_a(
            cfg.layer,
            BaseQKVLinear,
            self.path(),
            "For other layers, use LoraLinear and LoraMultiheadOutputLinear.",
        )
        if hasattr(cfg.layer, "input_linear"):
            raise LayerConfigError(
                f"{self.path()}: layer is a {cfg.layer.klass.__name__}, which changes queries "
                "and keys after projecting them, so an adapter cannot be added to its outputs. Set "
                "input_linear of that layer to a LoraFusedQKVLinear instead."
            )
        layer: Any = self._add_child(
            "layer",
            cfg.layer.set(
                query_dim=cfg.query_dim,
                key_dim=cfg.key_dim,
                value_dim=cfg.value_dim,
                num_heads=cfg.num_heads,
                per_head_dim=cfg.per_head_dim,
            ),
        )
        adapter: Any = self._add_child(
            "adapter",
            cfg.adapter.set(
                input_dim=cfg.query_dim,
                output_dim=cfg.num_heads * cfg.per_head_dim,
                num_heads=cfg.num_heads,
                num_kv_heads=layer.num_kv_heads,
            ),
        )
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
        kv_state: KVState | None = None,
        query_positions: Tensor | None = None,
    ) -> BaseQKVLinear.Output:
        """Projects; see `BaseQKVLinear.forward`.

        Raises:
          ArgumentValueError: if keys or values have an adapter but another input than queries.
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
        entries: Any = state
        deltas = self.adapter.deltas(entries["adapter"])
        layer, base = self.layer, copy.copy(entries["layer"])
        if isinstance(layer, FusedQKVLinear):
            parts = jnp.unstack(base["qkv_proj"]["weight"], axis=-4)
            weight = jnp.stack(_sums(parts, deltas), axis=-4)
            base["qkv_proj"] = _with_weight(base["qkv_proj"], weight)
        elif isinstance(layer, FusedGroupedQKVLinear):
            heads = self.config.num_heads
            ends = (heads, heads + layer.num_kv_heads)
            parts = jnp.split(base["qkv_proj"]["weight"], ends, axis=-2)
            weight = jnp.concatenate(_sums(parts, deltas), axis=-2)
            base["qkv_proj"] = _with_weight(base["qkv_proj"], weight)
        elif "q_proj" in base:
            for name, delta in deltas.items():
                base[f"{name[0]}_proj"] = _plus(base[f"{name[0]}_proj"], delta)
        else:
            raise LayerConfigError(
                f"{self.path()}: the weights of a {type(layer).__name__} are unknown, so an "
                "adapter cannot be merged into them; its state has "
                f"{sorted(base)}, expected 'qkv_proj' or 'q_proj'."
            )
        return base


def _sums(parts: Iterable[Tensor], deltas: Mapping[str, Tensor]) -> list[Tensor]:
    return [part + deltas.get(name, 0) for name, part in zip(PROJECTIONS, parts, strict=True)]


def _with_weight(state: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    new = copy.copy(state)  # a stack stays marked as one
    new["weight"] = weight.astype(state["weight"].dtype)
    return new


def _plus(state: dict[str, Any], delta: Tensor) -> dict[str, Any]:
    return _with_weight(state, state["weight"] + delta)


def merge_adapters(layer: BaseLayer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an equivalent model without adapters; `state` is not changed.

    The adapters' dropout is ignored.

    Example:
      >>> import jax
      >>> from weft.hierarchy.module import functional
      >>> cfg = LoraLinear.default_config().set(name="lora", input_dim=2, output_dim=2)
      >>> _ = cfg.adapter.set(rank=1, alpha=1.0)
      >>> layer = cfg.instantiate(parent=None)
      >>> state = layer.initialize_parameters_recursively(jax.random.PRNGKey(0))
      >>> sorted(merge_adapters(layer, state))
      ['bias', 'weight']
    """
    if isinstance(layer, LoraLinear | LoraMultiheadOutputLinear | LoraFusedQKVLinear):
        return layer.merged(state)
    new: Any = copy.copy(state)  # a stack stays marked as one
    for name, child in layer.children.items():
        if isinstance(child, BaseLayer) and name in new:
            new[name] = merge_adapters(child, new[name])
    return new
