"""Lazy imports: the names that packages offer, and the packages of extras.

A package's `__init__.pyi` imports each name that it offers, for type checkers and readers; at run
time the module of a name is imported when the name is first used. Names that no package offers may
still lead somewhere, by the door.
"""

import ast
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft._distribution import DISTRIBUTION
from weft._door import current_door

_ROOT = Path(__file__).parent
_TRAIN_PACKAGES = (
    "grain",
    "orbax",
    "safetensors",
    "tensorboard",
    "tensorboardX",
    "xxhash",
)


@functools.cache
def _offered(package: str) -> Mapping[str, tuple[str, str]]:
    """Returns the names that a package of Weft offers, each with its module and its name there."""
    stub = _ROOT.joinpath(*package.split(".")[1:], "__init__.pyi")
    if not stub.exists():
        return {}
    offered: dict[str, tuple[str, str]] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                offered[alias.asname or alias.name] = (
                    str(node.module),
                    alias.name,
                )
    return offered


class _Package(types.ModuleType):
    """Package with functions that a submodule of the same name does not replace."""

    def __setattr__(self, name: str, value: object) -> None:
        module, _ = _offered(self.__name__).get(name, (self.__name__, name))
        if module == self.__name__ or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


def lazy_exports(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package of Weft.

    The package's `__init__.pyi` is the table of its names.
    """
    package_module = sys.modules[package]
    package_module.__class__ = _Package
    offered = _offered(package)

    def get(name: str) -> object:
        if name not in offered:
            return current_door().find_attribute(package, name)
        module_name, name_there = offered[name]
        # Of the package itself, only submodules are offered.
        module = (
            None
            if module_name == package
            else importlib.import_module(module_name)
        )
        if hasattr(module, name_there):
            value = getattr(module, name_there)
        else:
            value = importlib.import_module(f"{module_name}.{name_there}")
        vars(package_module)[name] = value  # the next use does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(package_module), *offered})

    return get, names, sorted(offered)


def _packages_of(parts: list[str]) -> Iterator[str]:
    """Yields the packages of Weft that a dotted name may begin with, the outermost first."""
    if parts[0] == "weft":
        for end in range(2, len(parts)):
            yield ".".join(parts[:end])


def public_name(module: str, name: str) -> str:
    """Returns the shortest dotted name under which a package offers an object of a module."""
    first, *attributes = name.split(".")
    for package in _packages_of(module.split(".")):
        for offered_name, origin in _offered(package).items():
            if origin == (module, first):
                return ".".join([package, offered_name, *attributes])
    return f"{current_door().public_path(module)}.{name}"


def defining_name(name: str) -> str:
    """Returns the dotted name of an object that begins with the module that defines it.

    `name` may be that of an earlier version, or begin with a package that offers the object.
    """
    name = current_door().current_name(name)
    parts = name.split(".")
    for package in _packages_of(parts):
        first, *attributes = parts[package.count(".") + 1 :]
        module, name_there = _offered(package).get(first, (package, ""))
        if module != package:
            return ".".join([module, name_there, *attributes])
    return name


class _MissingPackages:
    """Last finder, which finds nothing: it names the extra if a module of Weft needs a package."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> None:
        if name not in _TRAIN_PACKAGES:
            return
        frame = sys._getframe(1)
        while frame.f_back and str(frame.f_globals.get("__name__")).startswith(
            "importlib"
        ):
            frame = frame.f_back
        importer = str(frame.f_globals.get("__name__"))
        if importer.startswith("weft.") and importer != __name__:
            error = ModuleNotFoundError(f"No module named {name!r}", name=name)
            raise _missing_extra(importer, name, "train", error)


def name_missing_extras() -> None:
    """Lets imports of missing packages name their extra; called once, when `weft` is imported."""
    sys.meta_path.append(_MissingPackages())  # pyright: ignore[reportArgumentType]


def import_extra(
    module: str, extra: str, *, needed_by: str, package: str = ""
) -> Any:
    """Imports a module of one of Weft's extras.

    Args:
        package: Name of the package that has the module, if it differs.

    Raises MissingExtraError if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing_extra(
            needed_by, package or module, extra, error
        ) from error


def _missing_extra(
    needed_by: str, package: str, extra: str, error: ImportError
) -> ImportError:
    from weft.errors import MissingExtraError

    return MissingExtraError(
        f"{needed_by} needs the package {package}, which cannot be imported ({error}); install it "
        f"with `pip install '{DISTRIBUTION}[{extra}]'`"
    )
