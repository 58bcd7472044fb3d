"""State with the description of its graph."""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import ObjectArgumentError
from weft.nnx.graph import GraphDef
from weft.nnx.state import State, _flatten_state, _flatten_state_with_keys


class GraphState(State):
    """State, complete or partial, with the description of its object.

    Raises:
        ObjectArgumentError: if an argument has another type.

    Example:
        >>> from weft import nnx
        >>> whole = GraphState(*nnx.split(nnx.Dict(w=nnx.Param(1.0))))
        >>> nnx.merge(jax.tree.map(lambda x: x + 1, whole)).w.get_value()
        2.0
    """

    _graphdef: GraphDef

    def __init__(self, _graphdef: GraphDef, _state: State):
        if not isinstance(_graphdef, GraphDef) or not isinstance(_state, State):
            raise ObjectArgumentError(
                f"GraphState was given a {type(_graphdef).__name__} and a {type(_state).__name__}; "
                "give a description and a state, as nnx.split returns them."
            )
        super().__init__(_state, _copy=False)
        object.__setattr__(self, "_graphdef", _graphdef)

    @property
    def _state(self) -> State:
        return State(self._mapping, _copy=False)

    def __reduce__(self) -> Any:
        return GraphState, (self._graphdef, self._state)


def _flatten(state: GraphState) -> tuple[tuple[Any, ...], Any]:
    values, keys = _flatten_state(state)
    return values, (state._graphdef, keys)


def _flatten_with_keys(state: GraphState) -> tuple[Any, Any]:
    values, keys = _flatten_state_with_keys(state)
    return values, (state._graphdef, keys)


def _unflatten(fixed: Any, values: Any) -> GraphState:
    graphdef, keys = fixed
    return GraphState(graphdef, State(dict(zip(keys, values, strict=True)), _copy=False))


jax.tree_util.register_pytree_with_keys(GraphState, _flatten_with_keys, _unflatten, _flatten)
