"""The names by which a text may speak of classes and functions, and what it may do with them.

A text may come from a stranger. Reading it must not run code that it chooses, and neither must
instantiating what was read. So there are two questions about a dotted name:

*May the text name it?* What lies in a trusted package may be named, and so may configs and
configurable classes of any module that the program has imported already, since their authors meant
them to be configured. Modules are only imported from a list, never because a text says so.

*May it be called with arguments from the text?* That is what the config of a function or of a
foreign class, and a partial, amount to. Only packages whose functions do nothing but compute are
trusted with that: `numpy.load` may be named, not called.

Whoever reads a text of their own adds packages with `allow`; they are trusted with both.
"""

import enum
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

from weft.config.configurable import Configurable
from weft.config.names import did_you_mean
from weft.config.values import ConfigNode
from weft.errors import ConfigReferenceError

NAMEABLE = ("weft", "jax", "optax", "numpy", "ml_dtypes")
CALLABLE = ("weft", "optax", "jax.nn")
# These start processes, write or delete files, or import modules by names that they are given.
# A test looks through weft for what belongs here.
_NOT_CALLABLE = (
    *("weft.cli", "weft.config", "weft.interop", "weft.launch", "weft.recipes"),
    *("weft.serialization", "weft.trainer.checkpoint_dirs", "weft.trainer.checkpoint_index"),
    *("weft.trainer.checkpoint_manifest", "weft.trainer.event_file"),
    *("weft.trainer.python_savables", "weft.trainer.run_record", "weft.trainer.state_storage"),
    *("weft.training.checkpoints", "weft.nnx.display", "weft.input.file_cache"),
    *("weft.trainer.companions", "weft.trainer.meeting", "weft.trainer.stacks"),
    *("weft.trainer.status_page", "weft._on_demand"),
)
# Of these, what makes models and data.
_CALLABLE_THERE = ("weft.recipes.digits", "weft.recipes.lm_nnx")
_NOT_IMPORTABLE = ("weft.cli", "weft.launch")
_IMPORTABLE = (
    *("jax", "jax.lax", "jax.nn", "jax.nn.initializers", "jax.numpy", "jax.random"),
    *("jax.sharding", "ml_dtypes", "numpy", "optax"),
)
_BUILTINS: dict[str, type] = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object)
}


def reference_to(obj: Any) -> str | None:
    """Returns the public dotted name of a class or function, None where it has none.

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
        if _BUILTINS.get(name) is obj:
            return name
        if not _is_private(module) and _find(module, name.split(".")) is obj:
            return f"{module}.{name}"
    # Many libraries define things in private modules and export them from public ones.
    package = module.partition(".")[0]
    for public in sorted(_loaded_modules(package), key=lambda n: (n.count("."), n)):
        for namespace in _namespaces(public):
            # What is not a class or function but an object of its own has no name to look for.
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
    """Looks names up in a loaded module, running no code: no properties, no `__getattr__`."""
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


def resolve_reference(name: str, *, allow: Sequence[str] = (), call: bool = False) -> Any:
    """Returns the class, function or enum member that a text speaks of.

    Args:
        name: the dotted name.
        allow: packages or modules that are trusted beside the usual ones.
        call: whether it is to be called with arguments that the text chooses.

    Raises:
        ConfigReferenceError: if there is no such thing, or the text may not name or call it.
    """
    if name in _BUILTINS:
        return _BUILTINS[name]
    module, rest = _split(name, allow)
    found = _find(module, rest) if module else _ABSENT
    trusted = _within(name, (*NAMEABLE, *allow))
    if found is _ABSENT and not (trusted and module):
        raise ConfigReferenceError(
            f"{name!r} is not known. A text can speak of what lies in {', '.join(NAMEABLE)}, and "
            "of configurable classes in modules that are imported already. "
            f"If it is yours, import its module and pass allow=({name.partition('.')[0]!r},)."
        )
    if found is _ABSENT:
        members = [n for n in vars(sys.modules[module]) if not n.startswith("_")]
        raise ConfigReferenceError(
            f"there is no {'.'.join(rest)!r} in {module}. {did_you_mean(rest[0], members)}"
        )
    if not (_is_configurable(found) or (trusted and _is_at_home(found, name))):
        raise ConfigReferenceError(
            f"a text may not speak of {name!r}: it is neither configurable nor in a trusted "
            f"package. If you trust the text, pass allow=({name.rpartition('.')[0]!r},)."
        )
    if call and not (_within(name, allow) or _is_harmless(found, name)):
        raise ConfigReferenceError(
            f"a text may not have {name!r} called with arguments that it chooses. "
            f"If you trust the text, pass allow=({name!r},)."
        )
    return found


def _split(name: str, allow: Sequence[str]) -> tuple[str, list[str]]:
    """Splits a dotted name into the module, imported if it is on the list, and the rest."""
    names = name.split(".")
    if any(part.startswith("__") for part in names[1:]):
        return "", names
    for end in range(len(names) - 1, 0, -1):
        module = ".".join(names[:end])
        if module in sys.modules or _import(module, allow):
            return module, names[end:]
    return "", names


def _import(module: str, allow: Sequence[str]) -> bool:
    listed = module in _IMPORTABLE or (
        _within(module, ("weft", *allow)) and not _within(module, _NOT_IMPORTABLE)
    )
    if not listed or _is_private(module):
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and _within(module, (error.name,)):
            return False  # there is no such module
        raise ConfigReferenceError(f"{module} cannot be imported: {error}.") from None
    return True


def _is_configurable(found: Any) -> bool:
    # A Configurable, or a config class: what it does was written to be configured.
    return isinstance(found, type) and issubclass(found, ConfigNode | Configurable)


def _is_harmless(found: Any, name: str) -> bool:
    """Whether a call does nothing but compute, judged by its name and by where it is defined."""
    defined = str(getattr(found, "__module__", ""))
    return _within(name, CALLABLE) and not any(
        _within(where, _NOT_CALLABLE) and not _within(where, _CALLABLE_THERE)
        for where in (name, defined)
    )


def _is_at_home(found: Any, name: str) -> bool:
    """Whether it comes from the package that it was found in, not from one imported there."""
    if isinstance(found, types.ModuleType | types.SimpleNamespace):
        return False
    owner = found if hasattr(found, "__module__") else type(found)
    home = str(getattr(owner, "__module__", "")).partition(".")[0]
    package = name.partition(".")[0]
    return home.removesuffix("lib") == package.removesuffix("lib")
