"""Rules for dotted names in config texts.

Texts are untrusted: neither reading nor instantiating one may run code of its choice. A dotted name
is therefore valid in three cases only:

- it is listed in `weft.config.vocabulary`, and used as the list permits;
- it is a configurable class, or a config class, of Weft or of an imported module. A class with
  effects outside of the run lists in `_needs_allow` the fields that a text may not set;
- the reader allows it: `allow=("my_package",)` trusts everything that the package or module
  defines, or the one named function or class.

A text imports no modules, except listed ones, public modules of Weft, and allowed ones. Names
resolve through modules to their own definitions, not to modules that they import.
"""

import enum
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal

from weft.config.configurable import Configurable, needs_allow
from weft.config.names import did_you_mean
from weft.config.values import ConfigNode
from weft.config.vocabulary import BUILTINS, ENUMS, RECORDS, TARGETS, VALUES
from weft.errors import ConfigReferenceError

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
_MODULES = frozenset(
    module
    for name in VALUES | TARGETS | RECORDS | ENUMS
    for module in [name[:i] for i, char in enumerate(name) if char == "."]
)
# Their modules start processes or run commands.
_NOT_IMPORTABLE = ("weft.cli", "weft.launch")


def reference_to(obj: Any) -> str | None:
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
        if not _is_private(module) and _find(module, name.split(".")) is obj:
            return f"{module}.{name}"
    # Many libraries export definitions of private modules from public ones.
    package = module.partition(".")[0]
    for public in sorted(_loaded_modules(package), key=lambda n: (n.count("."), n)):
        for namespace in _namespaces(public):
            # Other objects have no name of their own.
            members = vars(_find(public, namespace))
            candidates = [name] if name else [n for n, x in members.items() if x is obj]
            for candidate in candidates:
                if _find(public, [*namespace, candidate]) is obj:
                    return ".".join([public, *namespace, candidate])
    return None


def _loaded_modules(package: str) -> list[str]:
    return [
        name
        for name in list(sys.modules)
        if name.partition(".")[0] == package and not _is_private(name)
    ]


def _namespaces(module: str) -> list[list[str]]:
    members = getattr(sys.modules.get(module), "__dict__", {})
    nested = [name for name, x in members.items() if isinstance(x, types.SimpleNamespace)]
    return [[], *([name] for name in nested)]


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split(".")) and module != "__main__"


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


_ABSENT = object()


def _find(module: str, names: Sequence[str]) -> Any:
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

    Raises:
        ConfigReferenceError: if the name does not exist, or the text may not use it so.
    """
    if name in BUILTINS:
        return BUILTINS[name]
    module, rest = _split(name, allow)
    found = _find(module, rest) if module else _ABSENT
    if found is not _ABSENT and _may_use(found, name, allow, use):
        return found
    raise ConfigReferenceError(_refusal(found, name, module, allow, use))


def is_allowed(cls: type, allow: Sequence[str]) -> bool:
    """Returns whether the reader of a text trusts a class or its module."""
    return _within(f"{cls.__module__}.{cls.__qualname__}", allow)


def _may_use(found: Any, name: str, allow: Sequence[str], use: Use) -> bool:
    if name in _LISTED[use] or (_within(name, allow) and _is_at_home(found, name)):
        return True
    if use == "value" and isinstance(found, enum.Enum):
        return name.rpartition(".")[0] in ENUMS
    # Calling such a class would bypass the checks of its config fields.
    return use == "value" and _is_configurable(found) and not _acts_outside(found, allow)


def _refusal(found: Any, name: str, module: str, allow: Sequence[str], use: Use) -> str:
    if found is not _ABSENT and _acts_outside(found, allow):
        return (
            f"a text may not name {name!r}: {found.__qualname__} has effects outside of the "
            f"run, such as connections or commands. {_how_to_allow(name)}"
        )
    if found is not _ABSENT and _within(name, allow):
        return f"a text may not name {name!r}: {name.rpartition('.')[0]} only imports it."
    if name in TARGETS:
        return (
            f"a text may not name {name!r} here, because it reads files. Write it as "
            f"config_for_function({name})(…), or set this value in a program."
        )
    known = sorted(VALUES | TARGETS | RECORDS)
    home, _, last = name.rpartition(".")
    near = [entry for entry in known if entry.rpartition(".")[0] == home]
    if module and _within(name, ("weft", *allow)):
        near += [f"{module}.{n}" for n, x in vars(sys.modules[module]).items() if _is_public(n, x)]
    elsewhere = [entry for entry in known if entry.rpartition(".")[2] == last]
    fix = (
        f" Did you mean {elsewhere[0]!r}?"
        if elsewhere and name not in elsewhere
        else f" {did_you_mean(name, near)}"
        if found is _ABSENT and near
        else ""
    )
    return (
        f"a text may not name {name!r}{_AS[use]}: it is neither listed in weft.config.vocabulary "
        f"nor a configurable class of an imported module.{fix} {_how_to_allow(name)}"
    )


_AS = {
    "value": "",
    "target": " as a target of a config",
    "partial": " as a target of functools.partial",
    "record": " as a record",
}


def _how_to_allow(name: str) -> str:
    return (
        f"If you trust it, allow it: from_text(…, allow=({name!r},)), or --allow {name} on the "
        "command line."
    )


def _is_public(name: str, found: Any) -> bool:
    return not name.startswith("_") and _is_configurable(found)


def _split(name: str, allow: Sequence[str]) -> tuple[str, list[str]]:
    """Splits a dotted name into the module, imported if it is listed, and the rest."""
    names = name.split(".")
    if any(part.startswith("__") for part in names[1:]):
        return "", names
    for end in range(len(names) - 1, 0, -1):
        module = ".".join(names[:end])
        if _is_private(module) and not _within(module, allow):
            continue
        if module in sys.modules or _import(module, allow):
            return module, names[end:]
    return "", names


def _import(module: str, allow: Sequence[str]) -> bool:
    of_weft = _within(module, ("weft",)) and not _within(module, _NOT_IMPORTABLE)
    if not (module in _MODULES or of_weft or _within(module, allow)) or _is_private(module):
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and _within(module, (error.name,)):
            return False  # no such module
        raise ConfigReferenceError(f"{module} cannot be imported: {error}.") from None
    return True


def _is_configurable(found: Any) -> bool:
    # A Configurable or a config class is intended to be configured.
    return isinstance(found, type) and issubclass(found, ConfigNode | Configurable)


def _acts_outside(cls: type, allow: Sequence[str]) -> bool:
    return isinstance(cls, type) and needs_allow(cls) is True and not is_allowed(cls, allow)


def _is_at_home(found: Any, name: str) -> bool:
    """Returns whether an object is defined in the package that it was found in."""
    if isinstance(found, types.ModuleType | types.SimpleNamespace):
        return False
    owner = found if hasattr(found, "__module__") else type(found)
    home = str(getattr(owner, "__module__", "")).partition(".")[0]
    package = name.partition(".")[0]
    return home.removesuffix("lib") == package.removesuffix("lib")
