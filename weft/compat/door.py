"""The door: how programs written for Flax, AXLearn or an earlier version find what they import.

`MODULES` has the modules here by the paths that programs import. Such a path leads to the module
itself, so there is one `weft.traverse_util`, whose objects are the same under each name. Other
paths of Flax (`flax/paths.txt`) and AXLearn (`axlearn/paths.txt`), and names of earlier versions
(`moved_names.txt`), lead to objects in the rest of Weft: the module of such a path has no names of
its own.
"""

import functools
import importlib.util
import opcode
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from weft import _door
from weft.compat.axlearn import hints
from weft.compat.axlearn.paths import axlearn_paths
from weft.compat.flax.paths import FlaxModule, flax_modules
from weft.compat.moved import moved_names

MODULES = {
    "weft.as_flax": "weft.compat.flax.as_flax",
    "weft.configurations": "weft.compat.flax.configurations",
    "weft.core.nn": "weft.compat.flax.core_nn",
    "weft.cursor": "weft.compat.flax.cursor",
    "weft.ids": "weft.compat.flax.ids",
    "weft.io": "weft.compat.flax.io",
    "weft.jax_utils": "weft.compat.flax.jax_utils",
    "weft.nnx.bridge": "weft.compat.flax.nnx_bridge",
    "weft.nnx.compat": "weft.compat.flax.nnx_compat",
    "weft.training": "weft.compat.flax.training",
    "weft.traverse_util": "weft.compat.flax.traverse_util",
    "weft.utils": "weft.compat.axlearn.utils",
}


_PATHS = {module: path for path, module in MODULES.items()}


@functools.cache
def new_names() -> Mapping[str, str]:
    """Returns the names in this version of modules and objects that have others elsewhere."""
    return {**moved_names(), **axlearn_paths()}


def _replace_start(name: str, replacements: Mapping[str, str]) -> str:
    """Returns a dotted name with the longest of the names that it may begin with replaced."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        start = replacements.get(".".join(parts[:end]))
        if start is not None:
            return ".".join([start, *parts[end:]])
    return name


def current_name(name: str) -> str:
    """Returns the dotted name, in this version, of a module or an object of another layout.

    >>> current_name("weft.vdict.VDict")
    'weft.struct.VDict'
    """
    if not name.startswith("weft."):
        return name
    return _replace_start(name, new_names())


class CompatDoor(_door.Door):
    """Door to the tables of this package."""

    def find_attribute(self, module: str, name: str) -> object:
        """Returns what a module has neither defined nor offered: a submodule, or from elsewhere."""
        module = self.public_path(module)
        elsewhere = flax_modules().get(module, FlaxModule()).elsewhere
        if name in elsewhere:
            return pkgutil.resolve_name(elsewhere[name])
        if name.startswith("__"):
            return super().find_attribute(module, name)
        full_name = f"{module}.{name}"
        if (
            full_name in flax_modules()
        ):  # has more names than the module of an earlier version
            return importlib.import_module(full_name)
        new_name = new_names().get(full_name)
        if new_name is not None:
            owner_name, _, attribute = new_name.rpartition(".")
            owner = pkgutil.resolve_name(owner_name)
            if hasattr(owner, attribute):
                found = getattr(owner, attribute)
            else:
                found = importlib.import_module(new_name)
            is_module = isinstance(found, types.ModuleType)
            if is_module and full_name in _modules_of_moved_names():
                # Its names are not all in the module that has replaced it.
                return importlib.import_module(full_name)
            return found
        _check_axlearn_module(full_name, _left_out_error)
        is_package = hasattr(sys.modules.get(module), "__path__")
        if is_package and importlib.util.find_spec(full_name):
            return importlib.import_module(full_name)
        for place in _places(module):
            if hasattr(place, name):
                return getattr(place, name)
        advice = hints.instead_of_name(module, name)
        if advice is not None:
            raise _left_out_error(
                f"{module} has no {name!r} of AXLearn: {advice}."
            )
        return super().find_attribute(module, name)

    def current_name(self, name: str) -> str:
        """Returns the dotted name, in this version, of a module or an object."""
        return _replace_start(current_name(name), MODULES)

    def public_path(self, module: str) -> str:
        """Returns the path by which programs import a module."""
        return _replace_start(module, _PATHS)

    def hint_for_name(self, owner: str, name: str) -> str | None:
        """Returns a sentence on what to write instead of a name of AXLearn's, or None."""
        return hints.hint_for_name(owner, name)

    def hint_for_error(self, error: Exception) -> str | None:
        """Returns a sentence on what to write instead of an argument of AXLearn's, or None."""
        return hints.hint_for_error(error)

    def config_of_layer(self, layer: object) -> Any:
        """Returns the config of a hierarchy layer for one of another library, or for its config."""
        # Here, since `weft.interop` is above the packages whose layers it knows, and imports JAX.
        from weft.interop.hierarchy import as_child_config

        return as_child_config(layer)


_DOOR = CompatDoor()


def open_door() -> None:
    """Makes other names importable; called once, when `weft` is imported."""
    _door.set_door(_DOOR)
    sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
    if any(name.startswith(("FLAX_", "NNX_")) for name in os.environ):
        importlib.import_module(
            MODULES["weft.configurations"]
        )  # reads its flags from there


def _places(module: str) -> list[object]:
    """Returns the modules, or objects, that have the names that a module lacks."""
    names = flax_modules().get(module, FlaxModule()).modules
    new_name = current_name(module)
    if new_name != module:
        names = (new_name, *names)
    return [pkgutil.resolve_name(_DOOR.public_path(name)) for name in names]


def _other_names(module: str) -> list[str]:
    """Returns what `dir` says of such a module."""
    names = {
        *vars(sys.modules[module]),
        *flax_modules().get(module, FlaxModule()).elsewhere,
    }
    for place in _places(module):
        names.update(name for name in dir(place) if not name.startswith("_"))
    return sorted(names)


def _check_axlearn_module(name: str, error: Callable[[str], Exception]) -> None:
    """Raises an error with what to use instead if a module is one of AXLearn's that Weft lacks."""
    advice = hints.instead_of_module(name)
    if advice is None:
        return
    package, _, module = name.rpartition(".")
    parent = sys.modules.get(package)
    if PathFinder.find_spec(name, getattr(parent, "__path__", None)) is None:
        raise error(f"{package} has no module {module!r} of AXLearn: {advice}.")


def _left_out_error(text: str) -> Exception:
    from weft.errors import LeftOutError

    if _is_from_import():
        return LeftOutError(text)
    return AttributeError(text)


def _is_from_import() -> bool:
    """Returns whether a name is for `from module import name`, which hides AttributeErrors."""
    # The first frame of another module than this one and those that ask the door.
    frame = sys._getframe(1)
    internal = (__name__, "weft._lazy")
    while (
        frame.f_globals.get("__name__") in internal and frame.f_back is not None
    ):
        frame = frame.f_back
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


@functools.cache
def _modules_of_moved_names() -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in new_names())


@functools.cache
def _modules_with_other_names() -> frozenset[str]:
    names = {*new_names(), *flax_modules(), *_modules_of_moved_names()}
    names.update(name.rpartition(".")[0] for name in hints.differences())
    return frozenset(names)


class _Finder:
    """Finder of modules whose path is not that of their file, or whose names are elsewhere."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: object = None,
    ) -> ModuleSpec | None:
        if not name.startswith("weft."):
            return None
        module = _replace_start(name, MODULES)
        if module != name and _exists(module):
            return importlib.util.spec_from_loader(name, _SameModule(module))  # pyright: ignore[reportArgumentType]
        if name not in _modules_with_other_names():
            _check_axlearn_module(name, _missing_module_error)
            return None
        is_moved = name in new_names()
        if not is_moved:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = functools.partial(
                    _execute, spec.loader.exec_module
                )
                return spec
        if is_moved or name in flax_modules():
            return importlib.util.spec_from_loader(
                name,
                _OtherNames(),  # pyright: ignore[reportArgumentType]
                is_package=True,
            )
        return None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent has no modules
        return False


def _missing_module_error(text: str) -> Exception:
    from weft.errors import LeftOutError

    return LeftOutError(text)


class _SameModule:
    """Loader of a module that has another path, too."""

    def __init__(self, module: str):
        self._module = module
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._module)
        self._spec = module.__spec__
        _add_other_names(spec.name, module)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = (
            self._spec
        )  # Python has replaced it by that of the other path


class _OtherNames:
    """Loader of a module that has no file: its names are elsewhere."""

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: types.ModuleType) -> None:
        new_name = current_name(module.__name__)
        if new_name != module.__name__:
            importlib.import_module(new_name)
        _add_other_names(module.__name__, module)


def _execute(
    load: Callable[[types.ModuleType], None], module: types.ModuleType
) -> None:
    load(module)
    _add_other_names(module.__name__, module)


def _add_other_names(path: str, module: types.ModuleType) -> None:
    if path in _modules_with_other_names():
        vars(module).setdefault(
            "__getattr__", functools.partial(_DOOR.find_attribute, path)
        )
        vars(module).setdefault(
            "__dir__", functools.partial(_other_names, path)
        )
