"""Fields of config classes: the annotated names in the body of a class that derives from one.

Each annotated name is a field. Its value is the default, copied for each config;
without a value, the field is REQUIRED. Subclasses inherit fields and may redeclare them with
another type or default. Config classes hold fields only; behavior belongs to the configured object.

Values are checked against the declared types of fields, but only certain mismatches are errors:
builtin types, their containers and unions, literals, enums, records and configs are checked;
classes of other libraries, protocols and unresolved annotations accept everything. Unlike in
Python's typing, lists and tuples are interchangeable, scalars of any array library are numbers, and
any config that can be instantiated is accepted for an object or another config.
"""

import collections.abc
import contextlib
import enum
import functools
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from weft import errors
from weft.config.validation import check_value, validate_config_field_name
from weft.config.values import (
    REQUIRED,
    ConfigNode,
    RequiredFieldValue,
    UnreadValue,
    Value,
    copy_value,
    values_equal,
)

Hint = Any
"""Declared type: a class, a generic or union of classes, or another form of Python's typing."""


def resolve_annotation(
    annotation: Hint, namespace: Callable[[], dict[str, Any]]
) -> Hint:
    """Resolves the names in a declared type's strings; returns None if one is unknown."""
    if annotation is None or isinstance(annotation, type):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, namespace(), include_extras=True)[
            "it"
        ]
    except Exception:
        # Imported for type checkers only, or defined later.
        return None if isinstance(annotation, str) else annotation


def check_type(value: Value, field: "Field", path: str, *, label: str) -> None:
    """Raises ConfigTypeError if a value does not match the declared type of its field."""
    if value is REQUIRED or isinstance(value, UnreadValue):
        return
    if matches_type(value, field.hint, configs=field.accepts_configs):
        return
    if values_equal(value, field.default()):
        return  # defaults are accepted despite the annotation
    raise errors.ConfigTypeError(
        f"{path}: {label} declares {type_name(field.hint)} there, "
        f"but got {value!r:.80} of type {type_name(type(value))}. {_suggest_value(value, field)}"
    )


def _suggest_value(value: Value, field: "Field") -> str:
    if isinstance(value, type) and hasattr(value, "default_config"):
        return (
            f"Set the config of the class: {type_name(value)}.default_config()."
        )
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
            candidates: list[int | float] = [number]
            if number.is_integer():
                candidates.insert(0, int(number))
            for candidate in candidates:
                if matches_type(candidate, field.hint):
                    return f"Write {candidate!r} without quotes."
    if value is None:
        return (
            f"Declare `{type_name(field.hint)} | None` if it may be left out."
        )
    return f"Set {field.name!r} to a value of type {type_name(field.hint)}."


def is_instantiable(x: Value) -> bool:
    """Returns whether `x` is a config that can be instantiated."""
    return isinstance(x, ConfigNode) and hasattr(type(x), "instantiate")


def matches_type(value: Value, hint: Hint, *, configs: bool = False) -> bool:
    """Returns False if `value` is certainly not of the type `hint`.

    >>> matches_type(3, float), matches_type("3", float)
    (True, False)
    >>> matches_type([1, 2], tuple[int, ...]), matches_type(None, int | None)
    (True, True)
    """
    if configs and is_instantiable(value):
        return True
    if hint is None:
        return value is None
    if isinstance(hint, typing.TypeVar):
        if hint.__bound__ is None:
            return True
        return matches_type(value, hint.__bound__, configs=configs)
    if isinstance(hint, typing.NewType):
        return matches_type(value, hint.__supertype__, configs=configs)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, arg, configs=configs) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (typing.Annotated, typing.Final):
        return matches_type(value, args[0], configs=configs)
    if isinstance(origin or hint, type):
        return _matches_class(value, origin or hint, args, configs)
    return True


_PLAIN = (
    type(None),
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
)
_SEQUENCES = (
    list,
    tuple,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)


def _matches_class(
    value: Value, cls: type, args: tuple[Hint, ...], configs: bool
) -> bool:
    if cls in _NUMBERS:
        if isinstance(value, _NUMBERS[cls]):
            return True
        # A scalar of an array library.
        return cls is not int and getattr(value, "shape", None) == ()
    if cls in (str, bytes, type(None), RequiredFieldValue):
        return isinstance(value, cls)
    if issubclass(cls, ConfigNode) and not hasattr(cls, "instantiate"):
        return isinstance(value, cls)
    if issubclass(cls, ConfigNode):
        return is_instantiable(value)
    if is_instantiable(value):
        return True
    if cls in _SEQUENCES:
        return _matches_sequence(value, cls, args, configs)
    if cls in _MAPPINGS:
        return _matches_mapping(value, args, configs)
    if cls in _SETS:
        is_set = isinstance(value, collections.abc.Set)
        return is_set and _all_match(value, args, configs)
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


def _all_match(
    children: Iterable[Value], args: tuple[Hint, ...], configs: bool
) -> bool:
    """Returns whether children match the first argument of their container's type, if any."""
    if not args:
        return True
    return all(
        matches_type(child, args[0], configs=configs) for child in children
    )


def _matches_mapping(
    value: Value, args: tuple[Hint, ...], configs: bool
) -> bool:
    if not isinstance(value, collections.abc.Mapping):
        return False
    if len(args) == 2:
        key_hint, value_hint = args
        for key, child in value.items():
            if not matches_type(key, key_hint):
                return False
            if not matches_type(child, value_hint, configs=configs):
                return False
    return True


def _matches_sequence(
    value: Value, cls: type, args: tuple[Hint, ...], configs: bool
) -> bool:
    if isinstance(value, str | bytes):
        return False
    if not isinstance(value, collections.abc.Sequence):
        return False
    is_fixed_tuple = cls is tuple and args and args[-1] is not Ellipsis
    if not is_fixed_tuple:
        return _all_match(value, args, configs)
    if args == ((),):  # in tuple[()]
        args = ()
    if len(value) != len(args):
        return False
    for child, arg in zip(value, args, strict=True):
        if not matches_type(child, arg, configs=configs):
            return False
    return True


def _is_record(cls: type) -> bool:
    if hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__"):
        return True
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def type_name(hint: Hint) -> str:
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
        arms = [arg for arg in args if arg is not RequiredFieldValue]
        return " | ".join(map(type_name, arms))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is typing.Annotated:
        return type_name(args[0])
    if isinstance(hint, typing.TypeVar | typing.NewType):
        return hint.__name__
    if isinstance(hint, list):  # the parameters of a Callable
        return "..."
    if args:
        return f"{type_name(origin)}[{', '.join(map(type_name, args))}]"
    if isinstance(hint, type):
        return hint.__qualname__.rpartition("<locals>.")[2]
    return str(hint).replace("typing.", "")


C = TypeVar("C", bound=type)


class Field:
    """Field of a config.

    Args:
        factory: creates the default of each config instead.
        accepts_configs: whether a config is accepted for any value, since it is instantiated first.
    """

    def __init__(
        self,
        name: str,
        annotation: Hint = None,
        namespace: Callable[[], dict[str, Any]] = dict,
        *,
        default: Value = REQUIRED,
        factory: Callable[[], Value] | None = None,
        accepts_configs: bool = False,
    ):
        self.name = name
        self.annotation = annotation
        self.namespace = namespace
        self.accepts_configs = accepts_configs
        self._default = default
        self._factory = factory
        self._hint: Hint = None  # once resolved

    def default(self, path: str = "") -> Value:
        """Returns a copy of the default with the path `path`."""
        if self._factory is not None:
            return self._factory()
        return copy_value(self._default, path)

    @property
    def hint(self) -> Hint:
        """Declared type with strings resolved; `Any` if that is not (yet) possible."""
        if self._hint is None:
            self._hint = resolve_annotation(self.annotation, self.namespace)
        return Any if self._hint is None else self._hint


@overload
def config_class(cls: C, **kwargs: Value) -> C: ...
@overload
def config_class(cls: None = None, **kwargs: Value) -> Callable[[C], C]: ...
def config_class(cls: type | None = None, **kwargs: Value) -> Any:
    """Checks that a class derives from a config, which makes it a config class, as in AXLearn.

    Args:
        **kwargs: new defaults of inherited fields, such as `@config_class(bias=False)`.

    Raises:
        InvalidConfigClassError: if `cls` does not derive from `ConfigBase`.
        InvalidConfigValueError: for a default that a config cannot hold.
        UnknownFieldError: for a new default of an unknown field.
    """
    if cls is None:
        return functools.partial(config_class, **kwargs)
    if not (isinstance(cls, type) and issubclass(cls, ConfigNode)):
        raise errors.InvalidConfigClassError(
            f"@config_class decorates {_class_name(cls)}, which does not derive from ConfigBase. "
            "Write `class Config(Parent.Config):` inside of a Configurable, or derive from "
            "ConfigBase."
        )
    fields: dict[str, Field] = vars(cls)["__config_fields__"]
    for name, default in kwargs.items():
        if name not in fields:
            raise errors.UnknownFieldError(
                f"@config_class({name}=…) sets a default, and {_class_name(cls)} has no field "
                f"{name!r}. {errors.did_you_mean(name, fields)}"
            )
        _check_default(default, cls, name)
        inherited = fields[name]
        fields[name] = Field(
            name, inherited.annotation, inherited.namespace, default=default
        )
    return cls


def define_fields(cls: type) -> dict[str, Field]:
    """Returns the fields of a new config class by name: those of its bases and of its body.

    Raises:
        InvalidConfigNameError: for a field name that is private, or that `ConfigBase` uses.
        InvalidConfigValueError: for a default that a config cannot hold.
        NonConfigFieldError: for a method, a property or a value without annotation.
    """
    if not cls.__module__.startswith("weft.config."):
        _check_body(cls)
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= vars(base).get("__config_fields__", {})
    for name, annotation in class_annotations(cls).items():
        if name.startswith("_"):
            continue
        default = vars(cls).get(name, REQUIRED)
        fields[name] = Field(
            name,
            annotation,
            functools.partial(_class_namespace, cls),
            default=default,
        )
        _check_default(default, cls, name)
        if name in vars(cls):
            # Instances hold the values; a class attribute would hide that one is unset.
            delattr(cls, name)
    return fields


def _check_default(default: Value, cls: type, name: str) -> None:
    path = f"{_class_name(cls)}.{name}"
    if (type(default).__module__, type(default).__name__) in _FIELD_SPECIFIERS:
        raise errors.InvalidConfigValueError(
            f"{path} is declared with field(…). Write the default itself, as `{name}: … = []`: "
            "each config gets a copy of it."
        )
    check_value(default, path)


_FIELD_SPECIFIERS = (("dataclasses", "Field"), ("attr._make", "_CountingAttr"))


def class_annotations(cls: type) -> dict[str, Hint]:
    """Returns the annotations in the body of a class, excluding its bases."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(
            cls, format=annotationlib.Format.FORWARDREF
        )
    return dict(vars(cls).get("__annotations__", {}))


_METHOD_KINDS = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
)


def _check_body(cls: type) -> None:
    annotations = class_annotations(cls)
    for name, annotation in annotations.items():
        if str(annotation).removeprefix("typing.").startswith("ClassVar"):
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} declares {name!r} as a ClassVar. A config class holds "
                "fields only: make it a constant of the module."
            )
        validate_config_field_name(name)
        check_reserved_name(
            name, cls, what=f"{_class_name(cls)} declares a field"
        )
    for name, value in vars(cls).items():
        if name in annotations or name == "instantiate":
            continue
        if name.startswith("__annotate"):  # how Python stores annotations
            continue
        is_method = isinstance(value, types.FunctionType)
        if is_method and name in _overridable(cls):
            continue
        if isinstance(value, _METHOD_KINDS):
            kind = "method" if is_method else type(value).__name__
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} defines {name!r}, a {kind}. A config class holds fields only, "
                f"and may override methods of ConfigBase: make {name!r} a function that takes the "
                "config, or a method of the class that is configured."
            )
        is_slot = isinstance(value, types.MemberDescriptorType)
        if not is_slot and not name.startswith("__"):
            annotation = "Any" if value is None else type(value).__name__
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} defines {name!r} without an annotation, so it is not a field. "
                f"Write `{name}: {annotation} = …`."
            )


def _overridable(cls: type) -> set[str]:
    """Returns the names of the methods that every config has, such as `set`."""
    names: set[str] = set()
    for base in cls.__mro__[1:]:
        if not base.__module__.startswith("weft.config."):
            continue
        for name, value in vars(base).items():
            is_public = not name.startswith("_") or name == "__getattr__"
            if is_public and isinstance(value, types.FunctionType):
                names.add(name)
    return names


def check_reserved_name(name: str, cls: type, *, what: str) -> None:
    """Raises InvalidConfigNameError if a field hides a method of configs, such as `set`."""
    for base in cls.__mro__:
        if base is cls or not base.__module__.startswith("weft.config."):
            continue
        if name in vars(base):
            raise errors.InvalidConfigNameError(
                f"{what} {name!r}, but every config has a method of that name. "
                f"Call it {name + '_'!r}."
            )


def _class_namespace(cls: type) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    if cls.__module__ in sys.modules:
        namespace |= vars(sys.modules[cls.__module__])
    namespace[cls.__name__] = cls
    return namespace


def _class_name(cls: Value) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)
