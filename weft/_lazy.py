"""Lazy imports: names that packages offer, names that have moved, and packages of extras."""

import ast
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent


@functools.cache
def _offered(package: str) -> Mapping[str, tuple[str, str]]:
    """Returns the names that a package of Weft offers, each with its module and its name there."""
    stub = _ROOT.joinpath(*package.split(".")[1:], "__init__.pyi")
    if not stub.exists():
        return {}
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


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

    Its `__init__.pyi` imports each name that it offers, for type checkers and readers. At run time,
    the module of a name is imported when the name is first used.
    """
    this, offered = sys.modules[package], _offered(package)
    this.__class__ = _Package

    def get(name: str) -> object:
        if name not in offered:
            return _moved_attribute(package, name)
        module, its_name = offered[name]
        if module != package and hasattr(found := importlib.import_module(module), its_name):
            value = getattr(found, its_name)
        else:
            value = importlib.import_module(f"{module}.{its_name}")
        vars(this)[name] = value  # the next use does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(this), *offered})

    return get, names, sorted(offered)


def public_name(module: str, name: str) -> str:
    """Returns the shortest dotted name under which a package offers an object of a module."""
    first, *rest = name.split(".")
    parts = module.split(".")
    for end in range(2, len(parts)) if parts[0] == "weft" else ():
        package = ".".join(parts[:end])
        for offered, place in _offered(package).items():
            if place == (module, first):
                return ".".join([package, offered, *rest])
    return f"{module}.{name}"


def defining_name(name: str) -> str:
    """Returns the dotted name of an object that begins with the module that defines it.

    `name` may be that of an earlier version, or begin with a package that offers the object.
    """
    name = current_name(name)
    parts = name.split(".")
    for end in range(2, len(parts)) if parts[0] == "weft" else ():
        package = ".".join(parts[:end])
        module, its_name = _offered(package).get(parts[end], (package, ""))
        if module != package:
            return ".".join([module, its_name, *parts[end + 1 :]])
    return name


@functools.cache
def _moved_names() -> Mapping[str, str]:
    lines = (_ROOT / "moved_names.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines)


def current_name(name: str) -> str:
    """Returns the dotted name, in this version, of a module or an object of an earlier version.

    The longest entry of `moved_names.txt` that `name` begins with applies.
    """
    parts = name.split(".")
    for end in range(len(parts), 1, -1) if parts[0] == "weft" else ():
        if moved := _moved_names().get(".".join(parts[:end])):
            return ".".join([moved, *parts[end:]])
    return name


def _moved_attribute(module: str, name: str) -> object:
    moved = current_name(f"{module}.{name}")
    if moved == f"{module}.{name}" or name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    its_module, _, its_name = moved.rpartition(".")
    return getattr(importlib.import_module(its_module), its_name)


class _MovedModules:
    """Finder and loader of modules of earlier versions; their attributes are those of today.

    A module that exists, but has renamed an object, gets a `__getattr__` for the earlier name.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if not name.startswith("weft."):
            return None
        if name in _moved_names():
            return importlib.util.spec_from_loader(name, self, is_package=True)  # pyright: ignore[reportArgumentType]
        if name not in _modules_with_renamed_objects():
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)
        return spec

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: types.ModuleType) -> None:
        importlib.import_module(current_name(module.__name__))
        vars(module)["__getattr__"] = functools.partial(_moved_attribute, module.__name__)


@functools.cache
def _modules_with_renamed_objects() -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in _moved_names())


def _execute(load: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    load(module)
    get = functools.partial(_moved_attribute, module.__name__)
    vars(module).setdefault("__getattr__", get)


def install_moved_modules() -> None:
    """Makes modules importable by their names in earlier versions; called once, by `weft`."""
    sys.meta_path.insert(0, _MovedModules())  # pyright: ignore[reportArgumentType]


def import_extra(module: str, extra: str, *, needed_by: str, package: str = "") -> Any:
    """Imports a module of one of Weft's extras.

    Args:
        package: Name of the package that has the module, if it differs.

    Raises:
        MissingExtraError: If it cannot be imported.
    """
    from weft.errors import MissingExtraError

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{needed_by} needs the package {package or module}, which cannot be imported "
            f"({error}); install it with `pip install 'weft[{extra}]'`"
        ) from error
