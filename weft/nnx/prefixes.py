"""Tree prefixes of objects, with entries by filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft.errors import ObjectArgumentError, StateFilterError
from weft.nnx.filters import Path, predicates, shown_filters
from weft.nnx.graph import key_of
from weft.nnx.state import shown_path
from weft.nnx.variables import Variable


def prefix(node: Any, filter_map: Any, /, *, graph: bool | None = None) -> Any:
    """Returns a prefix of a tree with an entry for each variable and array, chosen by filters.

    It is usable as `in_axes`, `in_shardings` and `in_specs`. `filter_map` maps filters to entries,
    or is an `nnx.StateAxes` or a function of a path and a variable or value.

    Raises:
        StateFilterError: if no filter matches a value.
        ObjectArgumentError: if `filter_map` has another type.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> model = nnx.Dict(w=nnx.Param(jnp.ones((3, 2))), n=nnx.BatchStat(jnp.ones(())))
        >>> axes = prefix(model, {nnx.Param: 0, ...: None})
        >>> jax.vmap(lambda m: m.w.sum() + m.n, in_axes=(axes,))(model)
        Array([3., 3., 3.], dtype=float32)
    """
    said = _function(filter_map)

    def at(path: Any, x: Any) -> Any:
        return said(tuple(map(key_of, path)), x)

    is_variable = lambda x: isinstance(x, Variable)  # noqa: E731
    return jax.tree_util.tree_map_with_path(at, node, is_leaf=is_variable)


def _function(filter_map: Any) -> Callable[[Path, Any], Any]:
    if isinstance(filter_map, Mapping):
        filters = list(filter_map)
        return _by_filter(filters, list(filter_map.values()))
    if callable(getattr(filter_map, "map_prefix", None)):
        return filter_map.map_prefix
    if callable(filter_map):
        return filter_map
    raise ObjectArgumentError(
        f"prefix was given {filter_map!r}; give a dict from filters to entries, such as "
        "{nnx.Param: 0, ...: None}, or a function of a path and a value."
    )


def _by_filter(filters: list[Any], values: list[Any]) -> Callable[[Path, Any], Any]:
    matching = predicates(filters)

    def said(path: Path, x: Any) -> Any:
        for matches, value in zip(matching, values, strict=True):
            if matches(path, x):
                return value
        raise StateFilterError(
            f"no filter matches {shown_path(path)!r}, a {type(x).__name__}; the filters are "
            f"{shown_filters(filters)}; add `...` as the last."
        )

    return said
