"""States of models that generate, with the weights of linear maps and embeddings in int8."""

import copy
import functools
from typing import Any

import jax

from weft import functional
from weft.hierarchy.attention.qkv_linear import (
    FusedQKVLinear,
    MultiheadInputLinear,
    MultiheadOutputLinear,
)
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.decoder import LmHead
from weft.hierarchy.layers.embedding import Embedding
from weft.hierarchy.layers.linear import Linear

# Not of subclasses, which may do something else with their weight.
_INPUT_AXES: dict[type, tuple[int, ...]] = {
    Linear: (0,),
    MultiheadInputLinear: (0,),
    MultiheadOutputLinear: (1, 2),
    Embedding: (1,),
    LmHead: (1,),
}


def with_int8_weights(layer: BaseLayer, state: Any) -> Any:
    """Returns a copy of a layer's state with an `Int8Weight` in place of each such weight."""
    new_state = copy.copy(state)  # a stack stays marked as one
    input_axes = _INPUT_AXES.get(type(layer))
    if input_axes is not None:
        new_state["weight"] = functional.int8_weight(
            state["weight"], input_axes
        )
    for name, child in layer.children.items():
        if not isinstance(child, BaseLayer) or name not in state:
            continue
        convert = functools.partial(with_int8_weights, child)
        if _projects_stacked(layer, child):
            weight = functional.int8_weight(state[name]["weight"], (1,))
            new_state[name] = {**state[name], "weight": weight}
            continue
        for _ in layer._stacked_sizes(name):
            convert = jax.vmap(convert)
        new_state[name] = convert(state[name])
    return new_state


def _projects_stacked(layer: BaseLayer, child: BaseLayer) -> bool:
    """Returns whether one product is that of all weights which are stacked."""
    is_fused = isinstance(layer, FusedQKVLinear)
    return is_fused and type(child) is MultiheadInputLinear
