"""Lazy imports of a package's modules, so that users of one need not wait for the others."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_demand(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
        modules: names to import from each module, which is an attribute of the package, too.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in places and name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = importlib.import_module(f"{package}.{places.get(name, name)}")
        if name in places:
            value = getattr(value, name)
            setattr(sys.modules[package], name, value)  # so that it is asked for once
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *modules})

    return get, names
