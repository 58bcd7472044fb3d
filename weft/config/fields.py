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
from collections.abc import Callable
from typing import Any, TypeVar, overload

from weft import errors
from weft.config.validation import check_value, validate_config_field_name
from weft.config.values import REQUIRED, ConfigNode, RequiredFieldValue, copy_value, values_equal


def resolve_annotation(annotation: object, namespace: Callable[[], dict[str, Any]]) -> Any:
    """Resolves the names in a declared type's strings; returns None if one is unknown."""
    if annotation is None or isinstance(annotation, type):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, namespace(), include_extras=True)["it"]
    except Exception:
        # Imported for type checkers only, or defined later.
        return None if isinstance(annotation, str) else annotation


def check_type(value: object, field: "Field", path: str, *, label: str) -> None:
    """Raises ConfigTypeError if a value does not match the declared type of its field."""
    if value is REQUIRED or matches_type(value, field.hint, configs=field.accepts_configs):
        return
    if values_equal(value, field.default()):
        return  # defaults are accepted despite the annotation
    raise errors.ConfigTypeError(
        f"{path}: {label} declares {type_name(field.hint)} there, "
        f"but got {value!r:.80} of type {type_name(type(value))}. {_suggest_value(value, field)}"
    )


def _suggest_value(value: object, field: "Field") -> str:
    if isinstance(value, type) and hasattr(value, "default_config"):
        return f"Set the config of the class: {type_name(value)}.default_config()."
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
            for candidate in (int(number) if number.is_integer() else None, number):
                if candidate is not None and matches_type(candidate, field.hint):
                    return f"Write {candidate!r} without quotes."
    if value is None:
        return f"Declare `{type_name(field.hint)} | None` if it may be left out."
    return f"Set {field.name!r} to a value of type {type_name(field.hint)}."


def is_instantiable(x: object) -> bool:
    """Returns whether `x` is a config that can be instantiated."""
    return isinstance(x, ConfigNode) and hasattr(type(x), "instantiate")


def matches_type(value: Any, hint: Any, *, configs: bool = False) -> bool:
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
        return hint.__bound__ is None or matches_type(value, hint.__bound__, configs=configs)
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


_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set)
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)


def _matches_class(value: object, cls: type, args: tuple, configs: bool) -> bool:
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
        return _matches_sequence(value, cls, args, configs)
    if cls in _MAPPINGS:
        return _matches_mapping(value, args, configs)
    if cls in _SETS:
        if not isinstance(value, collections.abc.Set):
            return False
        return not args or all(matches_type(x, args[0], configs=configs) for x in value)
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


def _matches_mapping(value: object, args: tuple, configs: bool) -> bool:
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


def _matches_sequence(value: object, cls: type, args: tuple, configs: bool) -> bool:
    if not isinstance(value, collections.abc.Sequence) or isinstance(value, str | bytes):
        return False
    if cls is tuple and args and args[-1] is not Ellipsis:
        args = () if args == ((),) else args
        return len(value) == len(args) and all(
            matches_type(child, arg, configs=configs)
            for child, arg in zip(value, args, strict=True)
        )
    return not args or all(matches_type(child, args[0], configs=configs) for child in value)


def _is_record(cls: type) -> bool:
    has_fields = hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__")
    return has_fields or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def type_name(hint: object) -> str:
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
        annotation: object = None,
        namespace: Callable[[], dict[str, Any]] = dict,
        *,
        default: object = REQUIRED,
        factory: Callable[[], Any] | None = None,
        accepts_configs: bool = False,
    ):
        self.name = name
        self.annotation = annotation
        self.namespace = namespace
        self.accepts_configs = accepts_configs
        self._default = default
        self._factory = factory
        self._hint: Any = None  # once resolved

    def default(self, path: str = "") -> Any:
        """Returns a copy of the default with the path `path`."""
        return copy_value(self._default, path) if self._factory is None else self._factory()

    @property
    def hint(self) -> Any:
        """Declared type with strings resolved; `Any` if that is not (yet) possible."""
        if self._hint is None:
            self._hint = resolve_annotation(self.annotation, self.namespace)
        return Any if self._hint is None else self._hint


@overload
def config_class(cls: C, **kwargs: object) -> C: ...
@overload
def config_class(cls: None = None, **kwargs: object) -> Callable[[C], C]: ...
def config_class(cls: object = None, **kwargs: object) -> Any:
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
        fields[name] = Field(name, inherited.annotation, inherited.namespace, default=default)
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
            name, annotation, functools.partial(_class_namespace, cls), default=default
        )
        _check_default(default, cls, name)
        if name in vars(cls):
            # Instances hold the values; a class attribute would hide that one is unset.
            delattr(cls, name)
    return fields


def _check_default(default: object, cls: type, name: str) -> None:
    path = f"{_class_name(cls)}.{name}"
    if (type(default).__module__, type(default).__name__) in _FIELD_SPECIFIERS:
        raise errors.InvalidConfigValueError(
            f"{path} is declared with field(…). Write the default itself, as `{name}: … = []`: "
            "each config gets a copy of it."
        )
    check_value(default, path)


_FIELD_SPECIFIERS = (("dataclasses", "Field"), ("attr._make", "_CountingAttr"))


def class_annotations(cls: type) -> dict[str, Any]:
    """Returns the annotations in the body of a class, excluding its bases."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return dict(vars(cls).get("__annotations__", {}))


_METHOD_KINDS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


def _check_body(cls: type) -> None:
    annotations = class_annotations(cls)
    for name, annotation in annotations.items():
        if str(annotation).removeprefix("typing.").startswith("ClassVar"):
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} declares {name!r} as a ClassVar. A config class holds "
                "fields only: make it a constant of the module."
            )
        validate_config_field_name(name)
        check_reserved_name(name, cls, what=f"{_class_name(cls)} declares a field")
    for name, value in vars(cls).items():
        if name in annotations or name == "instantiate" or name.startswith("__annotate"):
            continue
        if isinstance(value, types.FunctionType) and name in _overridable(cls):
            continue
        if isinstance(value, _METHOD_KINDS):
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} defines {name!r}, a "
                f"{'method' if isinstance(value, types.FunctionType) else type(value).__name__}. A "
                f"config class holds fields only, and may override methods of ConfigBase: make "
                f"{name!r} a function that takes the config, or a method of the class that is "
                "configured."
            )
        if not name.startswith("__") and not isinstance(value, types.MemberDescriptorType):
            raise errors.NonConfigFieldError(
                f"{_class_name(cls)} defines {name!r} without an annotation, so it is not a field. "
                f"Write `{name}: {'Any' if value is None else type(value).__name__} = …`."
            )


def _overridable(cls: type) -> set[str]:
    """Returns the names of the methods that every config has, such as `set`."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("weft.config.")]
    names: set[str] = set()
    for base in bases:
        for name, value in vars(base).items():
            is_public = not name.startswith("_") or name == "__getattr__"
            if is_public and isinstance(value, types.FunctionType):
                names.add(name)
    return names


def check_reserved_name(name: str, cls: type, *, what: str) -> None:
    """Raises InvalidConfigNameError if a field hides a method of configs, such as `set`."""
    for base in cls.__mro__:
        if name in vars(base) and base.__module__.startswith("weft.config.") and base is not cls:
            raise errors.InvalidConfigNameError(
                f"{what} {name!r}, but every config has a method of that name. "
                f"Call it {name + '_'!r}."
            )


def _class_namespace(cls: type) -> dict[str, Any]:
    module = sys.modules.get(cls.__module__)
    return {**(vars(module) if module else {}), cls.__name__: cls}


def _class_name(cls: object) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)
