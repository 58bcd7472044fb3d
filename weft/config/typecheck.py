"""Checks of values against declared types of fields.

Only certain mismatches are errors: builtin types, their containers and unions, literals, enums,
records and configs are checked; classes of other libraries, protocols and unresolved annotations
accept everything. Imports no libraries for types.

Departures from Python's typing: lists and tuples are interchangeable, scalars of any array library
are numbers, and any config that can be instantiated is accepted for an object or another config.
"""

import collections.abc
import enum
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any

from weft.config.required import REQUIRED, RequiredFieldValue
from weft.config.values import ConfigNode, values_equal
from weft.errors import ConfigTypeError

if typing.TYPE_CHECKING:
    from weft.config.fields import Field


def resolve_annotation(annotation: Any, namespace: Callable[[], dict[str, Any]]) -> Any:
    """Resolves the names in a declared type's strings; returns None if one is unknown."""
    if annotation is None or isinstance(annotation, type):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, namespace(), include_extras=True)["it"]
    except Exception:
        # Imported for type checkers only, or defined later.
        return None if isinstance(annotation, str) else annotation


def check_type(value: Any, field: "Field", path: str, *, title: str) -> None:
    """Checks a value against the declared type of its field.

    Raises:
        ConfigTypeError: if it does not match.
    """
    if value is REQUIRED or fits(value, field.hint, configs=field.accepts_configs):
        return
    if values_equal(value, field.default()):
        return  # defaults are accepted despite the annotation
    raise ConfigTypeError(
        f"{path}: {title} declares {type_name(field.hint)} there, "
        f"but got {value!r:.80} of type {type_name(type(value))}. {_mend(value, field)}"
    )


def _mend(value: Any, field: "Field") -> str:
    if isinstance(value, type) and hasattr(value, "default_config"):
        return f"Set the config of the class: {type_name(value)}.default_config()."
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            for candidate in (int(number) if number.is_integer() else None, number):
                if candidate is not None and fits(candidate, field.hint):
                    return f"Write {candidate!r} without quotes."
    if value is None:
        return f"Declare `{type_name(field.hint)} | None` if it may be left out."
    return f"Set {field.name!r} to a value of type {type_name(field.hint)}."


def is_instantiable(x: Any) -> bool:
    """Returns whether `x` is a config that can be instantiated."""
    return isinstance(x, ConfigNode) and hasattr(type(x), "instantiate")


def fits(value: Any, hint: Any, *, configs: bool = False) -> bool:
    """Returns False if `value` is certainly not of the type `hint`.

    >>> fits(3, float), fits("3", float), fits([1, 2], tuple[int, ...]), fits(None, int | None)
    (True, False, True, True)
    """
    if configs and is_instantiable(value):
        return True
    if hint is None:
        return value is None
    if isinstance(hint, typing.TypeVar):
        return hint.__bound__ is None or fits(value, hint.__bound__, configs=configs)
    if isinstance(hint, typing.NewType):
        return fits(value, hint.__supertype__, configs=configs)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg, configs=configs) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (typing.Annotated, typing.Final):
        return fits(value, args[0], configs=configs)
    if origin is type:
        return isinstance(value, type) or not isinstance(value, _PLAIN)
    if isinstance(origin or hint, type):
        return _fits_class(value, origin or hint, args, configs)
    return True


_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set)
_SEQUENCES = (
    list,
    tuple,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)


def _fits_class(value: Any, cls: type, args: tuple, configs: bool) -> bool:
    if cls in _NUMBERS:
        return isinstance(value, _NUMBERS[cls]) or (
            cls is not int and getattr(value, "shape", None) == ()
        )
    if cls in (str, bytes, type(None), RequiredFieldValue):
        return isinstance(value, cls)
    if issubclass(cls, ConfigNode):
        return is_instantiable(value) if hasattr(cls, "instantiate") else isinstance(value, cls)
    if is_instantiable(value):
        return True
    if cls in _SEQUENCES:
        return _fits_sequence(value, cls, args, configs)
    if cls in _MAPPINGS:
        return isinstance(value, collections.abc.Mapping) and (
            len(args) != 2
            or all(
                fits(key, args[0]) and fits(child, args[1], configs=configs)
                for key, child in value.items()
            )
        )
    if cls in _SETS:
        return isinstance(value, collections.abc.Set) and all(
            fits(child, arg, configs=configs) for arg in args for child in value
        )
    if cls is type:
        return isinstance(value, type) or not isinstance(value, _PLAIN)
    if cls is collections.abc.Callable:
        return callable(value)
    if issubclass(cls, enum.Enum) or _is_record(cls):
        return isinstance(value, cls)
    return True


_NUMBERS: dict[type, tuple[type, ...]] = {
    # These are base classes of NumPy's scalars, except of its booleans.
    bool: (bool,),
    int: (numbers.Integral,),
    float: (numbers.Real,),
    complex: (numbers.Complex,),
}


def _fits_sequence(value: Any, cls: type, args: tuple, configs: bool) -> bool:
    if not isinstance(value, collections.abc.Sequence) or isinstance(value, str | bytes):
        return False
    if cls is tuple and args and args[-1] is not Ellipsis:
        args = () if args == ((),) else args
        return len(value) == len(args) and all(
            fits(child, arg, configs=configs) for child, arg in zip(value, args, strict=True)
        )
    return not args or all(fits(child, args[0], configs=configs) for child in value)


def _is_record(cls: type) -> bool:
    return (
        hasattr(cls, "__dataclass_fields__")
        or hasattr(cls, "__attrs_attrs__")
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def type_name(hint: Any) -> str:
    """Formats a type.

    >>> type_name(int | None), type_name(dict[str, float])
    ('int | None', 'dict[str, float]')
    """
    if hint is None or hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args if arg is not RequiredFieldValue)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is typing.Annotated:
        return type_name(args[0])
    if isinstance(hint, typing.TypeVar | typing.NewType):
        return hint.__name__
    if args:
        inner = ", ".join("..." if isinstance(arg, list) else type_name(arg) for arg in args)
        return f"{type_name(origin)}[{inner}]"
    if isinstance(hint, type):
        return hint.__qualname__.rpartition("<locals>.")[2]
    return str(hint).replace("typing.", "")
