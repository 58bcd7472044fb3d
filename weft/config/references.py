"""Functions and classes that config texts may name.

Texts are untrusted: neither reading nor instantiating one may run code of its choice. A dotted name
is therefore valid in three cases only:

- it is listed in `references.txt`, and used as the list permits;
- it is a configurable class, or a config class, of Weft or of an imported module. A class with
  effects outside of the run lists in `_needs_allow` the fields that a text may not set;
- the reader allows it: `allow=("my_package",)` trusts everything that the package or module
  defines, or the one named function or class.

A text imports no modules, except listed ones, public modules of Weft, and allowed ones. Names
resolve through modules to their own definitions, not to modules that they import.

Each listed function was reviewed: `tests/config/test_effects.py` calls it with all kinds of
arguments that a text can contain, and checks that it writes no files, starts no processes, opens no
connections and reads no pickles. Not listed are whole modules, and functions that apply an argument
to others (`map`, `jit`, `partial_eval`, `inject_hyperparams`) or load code. A line has the use, a
module, and names in it. The uses are `value` (harmless with any arguments, also in
`functools.partial` and as targets of configs), `target` (only to be configured, since they read
files that the text names, as data), `record` (classes whose fields a text fills without a
constructor, and number types) and `enum`.
"""

import enum
import importlib
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from weft._lazy import defining_name, public_name
from weft.config.configurable import Configurable, needs_allow
from weft.config.values import ConfigNode, Value
from weft.errors import ConfigReferenceError, did_you_mean

_BUILTINS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    object,
)
BUILTINS = types.MappingProxyType({cls.__name__: cls for cls in _BUILTINS})


def _read_list(use: str) -> frozenset[str]:
    """Returns the dotted names with this use."""
    text = (
        Path(__file__).with_name("references.txt").read_text(encoding="utf-8")
    )
    dotted_names: set[str] = set()
    for line in text.splitlines():
        use_of_line, module, *names = line.split()
        if use_of_line == use:
            dotted_names.update(f"{module}.{name}" for name in names)
    return frozenset(dotted_names)


VALUES = _read_list("value")
TARGETS = _read_list("target")
# `ml_dtypes.bfloat16(1.5)` is a record and not a value: some strings make it crash the process.
# Its dtype is numpy.dtype('bfloat16') or jax.numpy.bfloat16.
RECORDS = _read_list("record")
ENUMS = _read_list("enum")

Use = Literal["value", "target", "partial", "record"]
"""Use of a name by a text: as a value or config class, configured with `config_for_function` or
`config_for_class`, with bound arguments, or as a record.
"""

_LISTED = {
    "value": VALUES,
    "target": VALUES | TARGETS,
    "partial": VALUES,
    "record": RECORDS,
}


def _modules_of(names: Iterable[str]) -> frozenset[str]:
    """Returns all packages and modules with which dotted names begin."""
    modules: set[str] = set()
    for name in names:
        parts = name.split(".")
        modules.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(modules)


_MODULES = _modules_of(VALUES | TARGETS | RECORDS | ENUMS)
# Their modules start processes or run commands.
_NOT_IMPORTABLE = ("weft.cli", "weft.launch")


def reference_to(obj: Value) -> str | None:
    """Returns the public dotted name of a class or function, or None.

    >>> reference_to(int), reference_to(lambda: 1)
    ('int', None)
    """
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not callable(obj) or not isinstance(module, str):
        return None
    if isinstance(name, str):
        if "<" in name:
            return None
        if BUILTINS.get(name) is obj:
            return name
        if (
            not _is_private(module)
            and _lookup_in_module(module, name.split(".")) is obj
        ):
            return public_name(module, name)
    # Many libraries export definitions of private modules from public ones.
    package = module.partition(".")[0]
    public_modules: list[str] = []
    for loaded_module in list(sys.modules):
        if _is_in_packages(loaded_module, (package,)) and not _is_private(
            loaded_module
        ):
            public_modules.append(loaded_module)
    public_modules.sort(
        key=lambda module: (module.count("."), module)
    )  # the shortest first
    for public_module in public_modules:
        for namespace in _namespaces(public_module):
            if name:
                names = [name]
            else:  # an object without a name of its own
                members = vars(_lookup_in_module(public_module, namespace))
                names = [
                    member for member, value in members.items() if value is obj
                ]
            for candidate in names:
                if (
                    _lookup_in_module(public_module, [*namespace, candidate])
                    is obj
                ):
                    return ".".join([public_module, *namespace, candidate])
    return None


def _namespaces(module: str) -> list[list[str]]:
    """Returns the names of a module that lead to its names: none, and those of its namespaces."""
    namespaces: list[list[str]] = [[]]
    for name, value in getattr(sys.modules.get(module), "__dict__", {}).items():
        if isinstance(value, types.SimpleNamespace):
            namespaces.append([name])
    return namespaces


def _is_private(module: str) -> bool:
    if module == "__main__":
        return False
    return any(part.startswith("_") for part in module.split("."))


def _is_in_packages(name: str, packages: Sequence[str]) -> bool:
    return any(
        name == package or name.startswith(f"{package}.")
        for package in packages
    )


_ABSENT = object()


def _lookup_in_module(module: str, names: Sequence[str]) -> Value:
    """Looks up names in a loaded module without running properties or `__getattr__`."""
    obj: Any = sys.modules.get(module, _ABSENT)
    for name in names:
        if isinstance(obj, enum.EnumMeta) and name in obj.__members__:
            obj = obj.__members__[name]
        elif isinstance(obj, type):
            obj = _lookup_in_class(obj, name)
        elif isinstance(obj, types.ModuleType | types.SimpleNamespace):
            obj = vars(obj).get(name, _ABSENT)
        else:
            return _ABSENT
    return obj


def _lookup_in_class(cls: type, name: str) -> Value:
    for base in cls.__mro__:
        if name in vars(base):
            attribute = vars(base)[name]
            if isinstance(attribute, staticmethod):
                return attribute.__func__
            return attribute
    return _ABSENT


def resolve_reference(
    name: str, *, allow: Sequence[str] = (), use: Use = "value"
) -> Value:
    """Returns the class, function or enum member of a dotted name.

    Raises ConfigReferenceError if the name does not exist, or the text may not use it so.
    """
    if name in BUILTINS:
        return BUILTINS[name]
    module, attributes = _split_reference(defining_name(name), allow)
    obj = _lookup_in_module(module, attributes) if module else _ABSENT
    if obj is not _ABSENT:
        qualified_name = ".".join(attributes)
        # The list, or the reader, may have the object under any of its names.
        names = {
            name,
            f"{module}.{qualified_name}",
            public_name(module, qualified_name),
        }
        for candidate in sorted(names):
            if _is_permitted(obj, candidate, allow, use):
                return obj
    raise ConfigReferenceError(_refusal(obj, name, module, allow, use))


def is_record(name: str) -> bool:
    """Returns whether a dotted name is that of a listed record."""
    return name in RECORDS or defining_name(name) in RECORDS


def is_allowed(cls: type, allow: Sequence[str]) -> bool:
    """Returns whether the reader of a text trusts a class or its module."""
    return _is_in_packages(f"{cls.__module__}.{cls.__qualname__}", allow)


def _is_permitted(
    obj: Value, name: str, allow: Sequence[str], use: Use
) -> bool:
    if name in _LISTED[use]:
        return True
    if _is_in_packages(name, allow) and _is_defined_in_package(obj, name):
        return True
    if use != "value":
        # Calling a configurable class would bypass the checks of its config fields.
        return False
    if isinstance(obj, enum.Enum):
        return name.rpartition(".")[0] in ENUMS
    return _is_configurable(obj) and not _has_outside_effects(obj, allow)


def _refusal(
    obj: Value, name: str, module: str, allow: Sequence[str], use: Use
) -> str:
    if obj is not _ABSENT and _has_outside_effects(obj, allow):
        return (
            f"a text may not name {name!r}: {obj.__qualname__} has effects outside of the "
            f"run, such as connections or commands. {_allow_hint(name)}"
        )
    if _is_in_packages(name, ("__main__",)):
        return (
            f"a text may not name {name!r}: it is defined in the program that wrote the text, and "
            "others cannot import it. Define it in a module of its own, such as my_module.py, "
            "which the program imports."
        )
    if obj is not _ABSENT and _is_in_packages(name, allow):
        return f"a text may not name {name!r}: {name.rpartition('.')[0]} only imports it."
    if name in TARGETS:
        return (
            f"a text may not name {name!r} here, because it reads files. Write it as "
            f"config_for_function({name})(…), or set this value in a program."
        )
    return (
        f"a text may not name {name!r}{_AS[use]}: it is neither listed in weft.config.references "
        f"nor a configurable class of an imported module."
        f"{_similar_names(name, module, allow, exists=obj is not _ABSENT)} {_allow_hint(name)}"
    )


def _similar_names(
    name: str, module: str, allow: Sequence[str], *, exists: bool
) -> str:
    """Returns a sentence with names that a text may have meant, or nothing."""
    package, _, last_part = name.rpartition(".")
    namesakes: list[str] = []
    neighbors: list[str] = []
    for listed_name in sorted(VALUES | TARGETS | RECORDS):
        listed_package, _, listed_last_part = listed_name.rpartition(".")
        if listed_last_part == last_part:
            namesakes.append(listed_name)
        if listed_package == package:
            neighbors.append(listed_name)
    if namesakes and name not in namesakes:
        return f" Did you mean {namesakes[0]!r}?"
    if module and _is_in_packages(name, ("weft", *allow)):
        for member, value in vars(sys.modules[module]).items():
            if not member.startswith("_") and _is_configurable(value):
                neighbors.append(f"{module}.{member}")
    if exists or not neighbors:
        return ""
    return f" {did_you_mean(name, neighbors)}"


_AS = {
    "value": "",
    "target": " as a target of a config",
    "partial": " as a target of functools.partial",
    "record": " as a record",
}


def _allow_hint(name: str) -> str:
    return (
        f"If you trust it, allow it: from_text(…, allow=({name!r},)), or --allow {name} on the "
        "command line."
    )


def _split_reference(name: str, allow: Sequence[str]) -> tuple[str, list[str]]:
    """Splits a dotted name into the module, imported if it is listed, and the rest."""
    names = name.split(".")
    if any(part.startswith("__") for part in names[1:]):
        return "", names
    for end in range(len(names) - 1, 0, -1):
        module = ".".join(names[:end])
        if _is_private(module) and not _is_in_packages(module, allow):
            continue
        if module in sys.modules or _import_if_listed(module, allow):
            return module, names[end:]
    return "", names


def _import_if_listed(module: str, allow: Sequence[str]) -> bool:
    is_of_weft = _is_in_packages(module, ("weft",))
    is_listed = module in _MODULES or (
        is_of_weft and not _is_in_packages(module, _NOT_IMPORTABLE)
    )
    if _is_private(module) or not (is_listed or _is_in_packages(module, allow)):
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and _is_in_packages(module, (error.name,)):
            return False  # no such module
        raise ConfigReferenceError(
            f"{module} cannot be imported: {error}."
        ) from None
    return True


def _is_configurable(obj: Value) -> bool:
    # A Configurable or a config class is intended to be configured.
    return isinstance(obj, type) and issubclass(obj, ConfigNode | Configurable)


def _has_outside_effects(cls: type, allow: Sequence[str]) -> bool:
    return (
        isinstance(cls, type)
        and needs_allow(cls) is True
        and not is_allowed(cls, allow)
    )


def _is_defined_in_package(obj: Value, name: str) -> bool:
    """Returns whether an object is defined in the package with which its name begins."""
    if isinstance(obj, types.ModuleType | types.SimpleNamespace):
        return False
    owner = obj if hasattr(obj, "__module__") else type(obj)
    defining_package = str(getattr(owner, "__module__", "")).partition(".")[0]
    package = name.partition(".")[0]
    # `jaxlib` is a part of `jax`.
    return defining_package.removesuffix("lib") == package.removesuffix("lib")
