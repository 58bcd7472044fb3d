"""Functions that add adapters to a model's config, and remove them.

    set_lora_recursively(cfg, rank=8, alpha=16.0)

replaces the projections of every attention by a `LoraFusedQKVLinear`, its output by a
`LoraMultiheadOutputLinear`, and each linear map of a feed-forward layer by a `LoraLinear`.
`base_state` and `with_base_state` separate a state from its adapters, and join them again.
"""

import copy
from typing import Any

from weft.config import ConfigBase
from weft.errors import LayerConfigError
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.attention.qkv_linear import MultiheadOutputLinear
from weft.hierarchy.config_setters import for_each_config, is_config_of
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.lora import LoraFusedQKVLinear, LoraLinear, LoraMultiheadOutputLinear

_ADAPTED_LAYERS = (LoraLinear, LoraMultiheadOutputLinear, LoraFusedQKVLinear)


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
            if is_config_of(config.output_linear, MultiheadOutputLinear):
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
