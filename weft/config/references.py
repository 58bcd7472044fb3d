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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from weft._lazy import defining_name, public_name
from weft.config.configurable import Configurable, needs_allow
from weft.config.values import ConfigNode
from weft.errors import ConfigReferenceError, did_you_mean

_BUILTINS = bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object
BUILTINS = types.MappingProxyType({cls.__name__: cls for cls in _BUILTINS})


def _listed(use: str) -> frozenset[str]:
    text = Path(__file__).with_name("references.txt").read_text(encoding="utf-8")
    lines = (line.split() for line in text.splitlines())
    return frozenset(f"{module}.{n}" for its, module, *names in lines if its == use for n in names)


# `ml_dtypes.bfloat16(1.5)` is a record and not a value: some strings make it crash the process.
# Its dtype is numpy.dtype('bfloat16') or jax.numpy.bfloat16.
VALUES, TARGETS, RECORDS, ENUMS = map(_listed, ("value", "target", "record", "enum"))

Use = Literal["value", "target", "partial", "record"]
"""Use of a name by a text: as a value or config class, configured with `config_for_function` or
`config_for_class`, with bound arguments, or as a record.
"""

_LISTED = {"value": VALUES, "target": VALUES | TARGETS, "partial": VALUES, "record": RECORDS}
_MODULES = frozenset(
    module
    for name in VALUES | TARGETS | RECORDS | ENUMS
    for module in [name[:i] for i, char in enumerate(name) if char == "."]
)
# Their modules start processes or run commands.
_NOT_IMPORTABLE = ("weft.cli", "weft.launch")


def reference_to(obj: object) -> str | None:
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
        if not _is_private(module) and _lookup_in_module(module, name.split(".")) is obj:
            return public_name(module, name)
    # Many libraries export definitions of private modules from public ones.
    package = module.partition(".")[0]
    loaded = [n for n in list(sys.modules) if _is_in_packages(n, (package,)) and not _is_private(n)]
    for public in sorted(loaded, key=lambda n: (n.count("."), n)):
        for namespace in _namespaces(public):
            # Other objects have no name of their own.
            members = vars(_lookup_in_module(public, namespace))
            candidates = [name] if name else [n for n, x in members.items() if x is obj]
            for candidate in candidates:
                if _lookup_in_module(public, [*namespace, candidate]) is obj:
                    return ".".join([public, *namespace, candidate])
    return None


def _namespaces(module: str) -> list[list[str]]:
    members = getattr(sys.modules.get(module), "__dict__", {})
    nested = [name for name, x in members.items() if isinstance(x, types.SimpleNamespace)]
    return [[], *([name] for name in nested)]


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split(".")) and module != "__main__"


def _is_in_packages(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


_ABSENT = object()


def _lookup_in_module(module: str, names: Sequence[str]) -> Any:
    """Looks up names in a loaded module without running properties or `__getattr__`."""
    found: Any = sys.modules.get(module, _ABSENT)
    for name in names:
        if isinstance(found, enum.EnumMeta) and name in found.__members__:
            found = found.__members__[name]
        elif isinstance(found, type):
            found = next((vars(c)[name] for c in found.__mro__ if name in vars(c)), _ABSENT)
            found = found.__func__ if isinstance(found, staticmethod) else found
        elif isinstance(found, types.ModuleType | types.SimpleNamespace):
            found = vars(found).get(name, _ABSENT)
        else:
            return _ABSENT
    return found


def resolve_reference(name: str, *, allow: Sequence[str] = (), use: Use = "value") -> Any:
    """Returns the class, function or enum member of a dotted name.

    Raises ConfigReferenceError if the name does not exist, or the text may not use it so.
    """
    if name in BUILTINS:
        return BUILTINS[name]
    module, rest = _split_reference(defining_name(name), allow)
    found = _lookup_in_module(module, rest) if module else _ABSENT
    if found is not _ABSENT:
        names = {name, f"{module}.{'.'.join(rest)}", public_name(module, ".".join(rest))}
        if any(_is_permitted(found, n, allow, use) for n in sorted(names)):
            return found
    raise ConfigReferenceError(_refusal(found, name, module, allow, use))


def is_record(name: str) -> bool:
    """Returns whether a dotted name is that of a listed record."""
    return name in RECORDS or defining_name(name) in RECORDS


def is_allowed(cls: type, allow: Sequence[str]) -> bool:
    """Returns whether the reader of a text trusts a class or its module."""
    return _is_in_packages(f"{cls.__module__}.{cls.__qualname__}", allow)


def _is_permitted(found: Any, name: str, allow: Sequence[str], use: Use) -> bool:
    if name in _LISTED[use] or (
        _is_in_packages(name, allow) and _is_defined_in_package(found, name)
    ):
        return True
    if use == "value" and isinstance(found, enum.Enum):
        return name.rpartition(".")[0] in ENUMS
    # Calling such a class would bypass the checks of its config fields.
    return use == "value" and _is_configurable(found) and not _has_outside_effects(found, allow)


def _refusal(found: Any, name: str, module: str, allow: Sequence[str], use: Use) -> str:
    if found is not _ABSENT and _has_outside_effects(found, allow):
        return (
            f"a text may not name {name!r}: {found.__qualname__} has effects outside of the "
            f"run, such as connections or commands. {_allow_hint(name)}"
        )
    if found is not _ABSENT and _is_in_packages(name, allow):
        return f"a text may not name {name!r}: {name.rpartition('.')[0]} only imports it."
    if name in TARGETS:
        return (
            f"a text may not name {name!r} here, because it reads files. Write it as "
            f"config_for_function({name})(…), or set this value in a program."
        )
    known = sorted(VALUES | TARGETS | RECORDS)
    home, _, last = name.rpartition(".")
    near = [entry for entry in known if entry.rpartition(".")[0] == home]
    if module and _is_in_packages(name, ("weft", *allow)):
        members = vars(sys.modules[module]).items()
        near += [f"{module}.{n}" for n, x in members if n[0] != "_" and _is_configurable(x)]
    elsewhere = [entry for entry in known if entry.rpartition(".")[2] == last]
    fix = (
        f" Did you mean {elsewhere[0]!r}?"
        if elsewhere and name not in elsewhere
        else f" {did_you_mean(name, near)}"
        if found is _ABSENT and near
        else ""
    )
    return (
        f"a text may not name {name!r}{_AS[use]}: it is neither listed in weft.config.references "
        f"nor a configurable class of an imported module.{fix} {_allow_hint(name)}"
    )


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
    of_weft = _is_in_packages(module, ("weft",)) and not _is_in_packages(module, _NOT_IMPORTABLE)
    if not (module in _MODULES or of_weft or _is_in_packages(module, allow)) or _is_private(module):
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and _is_in_packages(module, (error.name,)):
            return False  # no such module
        raise ConfigReferenceError(f"{module} cannot be imported: {error}.") from None
    return True


def _is_configurable(found: object) -> bool:
    # A Configurable or a config class is intended to be configured.
    return isinstance(found, type) and issubclass(found, ConfigNode | Configurable)


def _has_outside_effects(cls: type, allow: Sequence[str]) -> bool:
    return isinstance(cls, type) and needs_allow(cls) is True and not is_allowed(cls, allow)


def _is_defined_in_package(found: object, name: str) -> bool:
    """Returns whether an object is defined in the package that it was found in."""
    if isinstance(found, types.ModuleType | types.SimpleNamespace):
        return False
    owner = found if hasattr(found, "__module__") else type(found)
    home = str(getattr(owner, "__module__", "")).partition(".")[0]
    package = name.partition(".")[0]
    return home.removesuffix("lib") == package.removesuffix("lib")
