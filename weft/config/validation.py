"""Which names a config field may have and which values it may hold."""

import _thread
import io
import keyword
import sys
import types
from collections.abc import Callable
from typing import Any

from weft.config.values import ConfigNode, join_path, parts
from weft.errors import InvalidConfigNameError, InvalidConfigValueError

_validators: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []


def register_validator(
    *, match_fn: Callable[[Any], bool], validate_fn: Callable[[Any], None]
) -> None:
    """Adds a rule about values that config fields may hold.

    Args:
        match_fn: whether the rule speaks about a value. The rule registered last comes first, and
            only the first that matches is asked.
        validate_fn: raises `InvalidConfigValueError` for a value that may not be held.
    """
    _validators.append((match_fn, validate_fn))


def validate_config_field_name(name: str) -> None:
    """Checks that a config field may have this name.

    Raises:
        InvalidConfigNameError: unless `name` is a public Python identifier.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise InvalidConfigNameError(
            f"A config field cannot be called {name!r}: its name must be a Python identifier."
        )
    if name.startswith("_"):
        raise InvalidConfigNameError(
            f"A config field cannot be called {name!r}: fields are public, so the name must not "
            f"begin with an underscore. Call it {name.lstrip('_') or 'value'!r}."
        )


def validate_config_field_value(value: Any) -> None:
    """Checks that a config may hold this value, and everything inside of it.

    Raises:
        InvalidConfigValueError: for an instance of a `Configurable`, and for values that stand for
            a moment of a running program: modules, open files, locks, generators, tracers.
    """
    check_value(value, path="")


def check_value(value: Any, path: str) -> None:
    """As `validate_config_field_value`, and the error says where in the config the value is."""
    _check(value, path, ())


def _check(value: Any, path: str, around: tuple[int, ...]) -> None:
    if isinstance(value, ConfigNode):
        return  # its fields were checked as they were set
    for match_fn, validate_fn in reversed(_validators):
        if match_fn(value):
            try:
                validate_fn(value)
            except InvalidConfigValueError as error:
                where = f"{path}: " if path else ""
                raise InvalidConfigValueError(f"{where}{error}") from None
            return
    _check_leaf(value, path)
    if isinstance(value, set | frozenset):
        children = [("{…}", child) for child in value]
    else:
        children = parts(value) or []
    if not children:
        return
    if id(value) in around:
        raise InvalidConfigValueError(
            f"{path or 'The value'} contains itself. A config is a tree of values."
        )
    if isinstance(value, dict):
        for key in value:
            _check_leaf(key, path)
    for suffix, child in children:
        _check(child, join_path(path, suffix), (*around, id(value)))


_KINDS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.ModuleType,), "a Python module"),
    ((io.IOBase,), "an open file"),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), "a generator"),
    ((_thread.LockType, _thread.RLock), "a lock"),
    ((types.FrameType, types.TracebackType), "a frame of the running program"),
)


def _check_leaf(value: Any, path: str) -> None:
    kind = next((kind for classes, kind in _KINDS if isinstance(value, classes)), None)
    if kind is None:
        jax_core = getattr(sys.modules.get("jax"), "core", None)
        if not isinstance(value, getattr(jax_core, "Tracer", ())):
            return
        kind = "a traced array"
    where = f" in {path}" if path else ""
    raise InvalidConfigValueError(
        f"A config cannot hold {kind}{where}: got an object of type {type(value).__qualname__}. "
        "A config holds values that can be copied, compared and written down; "
        "hold the name or the function that makes the object instead."
    )
