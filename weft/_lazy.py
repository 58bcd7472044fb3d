"""Lazy imports: names that packages offer, names that have moved, paths of Flax, and extras.

`moved_names.txt` has the names of earlier versions, and `flax_paths.txt` the modules of Flax that
are laid out differently in Weft: after a module's name come the names that lead elsewhere, as
`name=module:name`, and the modules that have its other names, searched in order.
`axlearn_differences.txt` has what differs from AXLearn on purpose, with what to write instead, and
`axlearn_modules.txt` the modules of AXLearn that Weft does not have, with what to use instead.
"""

import ast
import enum
import functools
import importlib.util
import opcode
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_TRAIN_PACKAGES = ("grain", "orbax", "safetensors", "tensorboard", "tensorboardX", "xxhash")


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
            return _other_attribute(package, name)
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


@functools.cache
def _flax_paths() -> Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]]:
    """Returns for modules of Flax the names that lead elsewhere, and where the others are."""
    lines = (_ROOT / "flax_paths.txt").read_text(encoding="utf-8").splitlines()
    return {
        module: (
            dict(place.split("=") for place in places if "=" in place),
            tuple(place for place in places if "=" not in place),
        )
        for module, *places in map(str.split, lines)
    }


@functools.cache
def axlearn_differences() -> Mapping[str, str]:
    """Returns what to write instead of names, fields and defaults of AXLearn that Weft lacks.

    Keys are dotted names, such as `weft.trainer.trainer.SpmdTrainer.recorder` for a config field.
    """
    lines = (_ROOT / "axlearn_differences.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(" # ") for line in lines)


_AXLEARN_PACKAGES = ("weft", "weft.hierarchy", "weft.input", "weft.trainer")
"""Packages that programs of AXLearn name in place of `axlearn` and `axlearn.common`."""


@functools.cache
def axlearn_modules() -> Mapping[str, str]:
    """Returns what to use instead of modules and packages of AXLearn that Weft does not have."""
    lines = (_ROOT / "axlearn_modules.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(" # ") for line in lines)


def _missing_axlearn_module(name: str) -> str | None:
    """Returns why there is no module of this name, if it is one of AXLearn's; else None."""
    package, _, last = name.rpartition(".")
    instead = axlearn_modules().get(last) if package in _AXLEARN_PACKAGES else None
    if instead is None:
        return None
    parent = sys.modules.get(package)
    if PathFinder.find_spec(name, getattr(parent, "__path__", None)) is not None:
        return None  # another module of this name
    return f"{package} has no module {last!r} of AXLearn: {instead}."


def axlearn_hint(owner: str, name: str) -> str | None:
    """Returns what to write instead of a name in a module, or below it, or of a class's field."""
    for known, instead in axlearn_differences().items():
        place, _, last = known.rpartition(".")
        if last == name and (f"{place}.".startswith(f"{owner}.") or place.endswith(f".{owner}")):
            return instead
    return None


class AxlearnEnumType(enum.EnumType):
    """Type of enums that say what to write instead of AXLearn's members that they lack."""

    def __getattr__(cls, name: str) -> Any:
        instead = None if name.startswith("_") else axlearn_hint(cls.__name__, name)
        if instead:
            raise AttributeError(f"{cls.__name__} has no {name!r} of AXLearn: {instead}.")
        found = getattr(super(), "__getattr__", None)  # of Python 3.11, for members
        if found is not None:
            return found(name)
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


def _places(module: str) -> tuple[str, ...]:
    current, (_, places) = current_name(module), _flax_paths().get(module, ({}, ()))
    return places if current == module else (current, *places)


def _other_attribute(module: str, name: str) -> object:
    """Returns what a module has neither defined nor offered: a submodule, or what is elsewhere."""
    if elsewhere := _flax_paths().get(module, ({}, ()))[0].get(name):
        return pkgutil.resolve_name(elsewhere)
    if not name.startswith("__"):
        full_name = f"{module}.{name}"
        if full_name in _flax_paths():  # has more names than the module of an earlier version
            return importlib.import_module(full_name)
        if moved := _moved_names().get(full_name):
            return pkgutil.resolve_name(":".join(moved.rsplit(".", 1)))
        if why := _missing_axlearn_module(full_name):
            raise _left_out_error(why)
        if hasattr(sys.modules.get(module), "__path__") and importlib.util.find_spec(full_name):
            return importlib.import_module(full_name)
        for place in map(pkgutil.resolve_name, _places(module)):
            if hasattr(place, name):
                return getattr(place, name)
        if instead := axlearn_hint(module, name):
            raise _left_out_error(f"{module} has no {name!r} of AXLearn: {instead}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _left_out_error(text: str) -> Exception:
    from weft.errors import LeftOutError

    return LeftOutError(text) if _is_from_import() else AttributeError(text)


def _is_from_import() -> bool:
    """Returns whether a name is for `from module import name`, which hides AttributeErrors."""
    frame = sys._getframe(1)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _other_names(module: str) -> list[str]:
    elsewhere, _ = _flax_paths().get(module, ({}, ()))
    names = {name for place in _places(module) for name in dir(pkgutil.resolve_name(place))}
    public = (name for name in names if not name.startswith("_"))
    return sorted({*vars(sys.modules[module]), *elsewhere, *public})


class _OtherModules:
    """Finder and loader of modules of earlier versions and of Flax, whose names are elsewhere.

    A module that exists, but lacks some of these names, gets a `__getattr__` for them.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name not in _other_modules():
            if why := _missing_axlearn_module(name):
                from weft.errors import LeftOutError

                raise LeftOutError(why)
            return None
        spec = None if name in _moved_names() else PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            if name not in _moved_names() and name not in _flax_paths():
                return None
            return importlib.util.spec_from_loader(name, self, is_package=True)  # pyright: ignore[reportArgumentType]
        spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)
        return spec

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: types.ModuleType) -> None:
        importlib.import_module(current_name(module.__name__))
        _execute(lambda _: None, module)


@functools.cache
def _other_modules() -> frozenset[str]:
    with_renamed_objects = (name.rpartition(".")[0] for name in _moved_names())
    with_differences = (name.rpartition(".")[0] for name in axlearn_differences())
    return frozenset([*_moved_names(), *with_renamed_objects, *_flax_paths(), *with_differences])


def _execute(load: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    load(module)
    vars(module).setdefault("__getattr__", functools.partial(_other_attribute, module.__name__))
    vars(module).setdefault("__dir__", functools.partial(_other_names, module.__name__))


def install_finders() -> None:
    """Makes modules importable by earlier names and those of Flax; called once, by `weft`."""
    sys.meta_path.insert(0, _OtherModules())  # pyright: ignore[reportArgumentType]
    sys.meta_path.append(_MissingPackages())  # pyright: ignore[reportArgumentType]


class _MissingPackages:
    """Last finder, which finds nothing: it names the extra if a module of Weft needs a package."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name not in _TRAIN_PACKAGES:
            return
        frame = sys._getframe(1)
        while frame.f_back and str(frame.f_globals.get("__name__")).startswith("importlib"):
            frame = frame.f_back
        importer = str(frame.f_globals.get("__name__"))
        if importer.startswith("weft.") and importer != __name__:
            error = ModuleNotFoundError(f"No module named {name!r}", name=name)
            raise _missing_extra(importer, name, "train", error)


def import_extra(module: str, extra: str, *, needed_by: str, package: str = "") -> Any:
    """Imports a module of one of Weft's extras.

    Args:
        package: Name of the package that has the module, if it differs.

    Raises MissingExtraError if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing_extra(needed_by, package or module, extra, error) from error


def _missing_extra(needed_by: str, package: str, extra: str, error: ImportError) -> ImportError:
    from weft.errors import MissingExtraError

    return MissingExtraError(
        f"{needed_by} needs the package {package}, which cannot be imported ({error}); install it "
        f"with `pip install 'weft[{extra}]'`"
    )
