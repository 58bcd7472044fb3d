"""Modules in the attributes of modules: how they are found, named and taken over.

A module that is given to another one as a field, alone or in lists and dicts, becomes its submodule
when the other is bound, under the attribute's name and its place in the containers. The module that
was given stays as it was: its copy is bound. One module in several places is one submodule.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weft.core.frozen_dict import FrozenDict

if TYPE_CHECKING:
    from weft.linen.module import Module


def map_submodules(
    fn: Callable[[str, "Module"], Any], value: Any, is_module: Callable[[Any], bool], at: str = ""
) -> Any:
    """Maps the modules in an attribute's value; lists become tuples, and dicts frozen dicts.

    Args:
        fn: from the name that a module has by its place, and the module, to what replaces it.
        value: the attribute's value.
        is_module: what is a module.
        at: the name of the place.
    """
    if is_module(value):
        return fn(at, value)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        items = [
            map_submodules(fn, v, is_module, f"{at}_{name}")
            for name, v in zip(names, value, strict=True)
        ]
        if isinstance(value, tuple) and all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping) and isinstance(value, dict | FrozenDict):
        items = {k: map_submodules(fn, v, is_module, f"{at}_{k}") for k, v in value.items()}
        return FrozenDict(items)
    return value
