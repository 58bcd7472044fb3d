"""Modules in the attributes of modules.

A module in a field of another module, directly or in lists, dicts and those fields of a
`struct.dataclass` that are children of its pytree, becomes its submodule when the other is bound,
named by the attribute and its place in the containers. The original remains unbound: its copy is
bound. A module in several places is one submodule, named by the first place. Within a container the
order is that of the names as text: the key "a" precedes "b", however the dict was filled, and the
index 10 precedes 2.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from weft.core.frozen_dict import FrozenDict
from weft.struct import child_names

if TYPE_CHECKING:
    from weft.linen.module import Module


def map_submodules(
    fn: Callable[[str, "Module"], Any], value: Any, is_module: Callable[[Any], bool], at: str = ""
) -> Any:
    """Maps the modules in an attribute's value; lists become tuples, and dicts frozen dicts.

    Args:
        fn: maps the name of a module's place and the module to the replacement.
        at: name of the place.
    """
    if is_module(value):
        return fn(at, value)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        items = _map_items(fn, zip(names, value, strict=True), is_module, at)
        if isinstance(value, tuple) and all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping) and isinstance(value, dict | FrozenDict):
        items = _map_items(fn, value.items(), is_module, at)
        return FrozenDict(zip(value, items, strict=True))
    names, holder = child_names(type(value)), cast(Any, value)
    before = [getattr(value, name) for name in names]
    items = _map_items(fn, zip(names, before, strict=True), is_module, at)
    changed = {n: a for n, a, b in zip(names, items, before, strict=True) if a is not b}
    return holder.replace(**changed) if changed else value


def _map_items(
    fn: Callable[[str, "Module"], Any],
    items: Iterable[tuple[Any, Any]],
    is_module: Callable[[Any], bool],
    at: str,
) -> list[Any]:
    """Maps a container's values in the order of their names; returns them in their own."""
    named = [(f"{at}_{name}", value) for name, value in items]
    mapped: list[Any] = [None] * len(named)
    for i in sorted(range(len(named)), key=lambda i: named[i][0]):
        mapped[i] = map_submodules(fn, named[i][1], is_module, named[i][0])
    return mapped
