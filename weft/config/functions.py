"""Configs of functions and classes of other libraries, from their signatures.

    cfg = config_for_function(optax.sgd).set(learning_rate=0.1)
    optimizer = cfg.instantiate()               # optax.sgd(learning_rate=0.1, ...)

The parameters are the fields, with their defaults or REQUIRED. `*args` is a field with a tuple,
`**kwargs` one with a dict. Configs among the values, also in containers, are instantiated first,
unless the parameter is declared as a config.

All such configs share one class and store the fields of their function in the instance, so equal
configs have equal types, and no cache is needed.
"""

import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from weft.config import validation, values
from weft.config.config import Origin
from weft.config.configurable import (
    ConfigOr,
    Configurable,
    InstantiableConfig,
    check_complete,
)
from weft.config.fields import (
    Field,
    Hint,
    check_reserved_name,
    is_instantiable,
)
from weft.config.values import Value
from weft.errors import (
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
)

if TYPE_CHECKING:
    import inspect

T = TypeVar("T")


class CallConfig(InstantiableConfig[T]):
    """Config whose fields are the parameters of its target."""

    __slots__ = ("_field_table",)

    _field_table: dict[str, Field] | None
    _factory_name = ""

    if TYPE_CHECKING:
        # Type checkers do not know the fields, which are those of a signature.
        def set(self, **kwargs: Value) -> Self: ...
        def clone(self, **kwargs: Value) -> Self: ...

    def __init__(self, target: Callable[..., T]):
        self._init_slots()
        self.__dict__[self._target or ""] = target
        self._record_origin(self._target or "")
        for name, field in self._fields().items():
            if name != self._target:
                self.__dict__[name] = field.default(name)

    def _init_slots(
        self, *, path: str = "", origins: dict[str, Origin] | None = None
    ) -> None:
        super()._init_slots(path=path, origins=origins)
        object.__setattr__(self, "_field_table", None)

    def _callable(self) -> Callable[..., T]:
        return self.__dict__[self._target or ""]

    def _fields(self) -> dict[str, Field]:
        table = self._field_table
        if table is None:
            table = _make_fields(self._callable(), type(self))
            object.__setattr__(self, "_field_table", table)
        return table

    def _copy_to(self, path: str) -> "CallConfig[T]":
        copy = super()._copy_to(path)
        object.__setattr__(copy, "_field_table", self._field_table)
        return copy

    def __setattr__(self, name: str, value: Value) -> None:
        if name == self._target and value is not self._callable():
            # The fields follow the signature, so a new target must have the same parameters.
            table = _make_fields(value, type(self))
            if table.keys() != self._fields().keys():
                raise InvalidConfigValueError(
                    f"{self._label()} cannot be turned into a config of {_callable_name(value)}, "
                    "which has other parameters. Create a new config: "
                    f"{type(self)._factory_name}({_callable_name(value)})."
                )
            super().__setattr__(name, value)
            object.__setattr__(self, "_field_table", table)
            return
        super().__setattr__(name, value)

    def _label(self) -> str:
        return f"{type(self)._factory_name}({_callable_name(self._callable())})"

    def instantiate(self, **kwargs: Value) -> T:
        """Calls the function or class with the values of the fields, or those in `kwargs` instead.

        Raises RequiredFieldMissingError if a field is still REQUIRED.
        """
        fields = self._fields()
        overrides = {name: kwargs[name] for name in kwargs if name in fields}
        check_complete(self, overrides)
        target = self._callable()
        args: list[Value] = []
        named: dict[str, Value] = {}
        for name, parameter in _parameters(target, type(self)).items():
            if name not in fields:
                continue
            if name in kwargs:
                value = kwargs.pop(name)
            else:
                value = self._argument(name, parameter)
            if parameter.kind is parameter.VAR_POSITIONAL:
                if value:  # then all parameters before it are positional, too
                    args = [*args, *named.values(), *value]
                    named = {}
            elif parameter.kind is parameter.VAR_KEYWORD:
                named |= value
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(value)
            else:
                named[name] = value
        return target(*args, **named, **kwargs)

    def _argument(self, name: str, parameter: "inspect.Parameter") -> Value:
        value = getattr(self, name)
        default = parameter.default
        has_default = default is not parameter.empty
        if has_default and values.values_equal(value, default):
            value = default  # the same object, as it may be a sentinel
        value = _copy_containers(value)
        if _accepts_config(self._fields()[name].hint):
            return value
        return maybe_instantiate(value)


class FunctionConfigBase(CallConfig[T]):
    """Config that calls a function. See `config_for_function`."""

    _target = "fn"
    _factory_name = "config_for_function"

    fn: Callable[..., T]


class ClassConfigBase(CallConfig[T]):
    """Config that creates an object of a class. See `config_for_class`."""

    _target = "klass"
    _factory_name = "config_for_class"

    klass: type[T]


def config_for_function(fn: Callable[..., T]) -> FunctionConfigBase[T]:
    """Creates a config of a function, whose fields are its parameters.

    Raises:
        InvalidConfigValueError: if `fn` has no signature.
        InvalidConfigNameError: for a parameter with a name that configs reserve.

    >>> def scale(x: float, *, by: float = 2.0):
    ...     return x * by
    >>> cfg = config_for_function(scale).set(x=3.0)
    >>> cfg
    config_for_function(scale)(by=2.0, x=3.0)
    >>> cfg.instantiate(), cfg.instantiate(by=10.0)
    (6.0, 30.0)
    """
    if not callable(fn) or isinstance(fn, values.ConfigNode):
        raise InvalidConfigValueError(
            f"config_for_function takes a function, but got {fn!r:.80}."
        )
    return FunctionConfigBase(fn)  # pyright: ignore[reportCallIssue]  # its `__init__` is inherited


def config_for_class(cls: type[T]) -> ClassConfigBase[T]:
    """Creates a config of a class, whose fields are the parameters of its constructor.

    Raises:
        InvalidConfigClassError: if `cls` is a `Configurable`, which has its own config class.
        InvalidConfigValueError: if `cls` is not a class, or has no signature.
        InvalidConfigNameError: for a parameter with a name that configs reserve.

    >>> config_for_class(complex).set(imag=1.0)
    config_for_class(complex)(imag=1.0, real=0)
    """
    if not isinstance(cls, type):
        raise InvalidConfigValueError(
            f"config_for_class takes a class, but got {cls!r:.80}."
        )
    if issubclass(cls, Configurable):
        raise InvalidConfigClassError(
            f"{_callable_name(cls)} is a Configurable, so it has its own config class. Write "
            f"{_callable_name(cls)}.default_config()."
        )
    return ClassConfigBase(cls)  # pyright: ignore[reportCallIssue]


def maybe_instantiate(x: ConfigOr[T]) -> T:
    """Instantiates a config, or the configs in a container; returns other values unchanged."""
    value: Value = x
    if is_instantiable(value):
        return value.instantiate()
    if not isinstance(x, values.ConfigNode):
        for step, child in _children_by_step(value):
            instance = maybe_instantiate(child)
            if instance is not child:
                value = values.replace_part(value, step, instance)
    return value


def _children_by_step(value: Value) -> list[tuple[values.Step, Value]]:
    """Returns the children of a container or record, each with its step for `replace_part`."""
    if isinstance(value, dict):
        return list(value.items())
    names = values.record_fields(value)
    if names is not None:
        return [(name, getattr(value, name)) for name in names]
    if type(value) in (list, tuple):
        return list(enumerate(value))
    return []


def _copy_containers(x: Value) -> Value:
    """Copies lists, dicts and sets, to protect the config from changes by the function."""
    if type(x) in (list, tuple):
        return type(x)(map(_copy_containers, x))
    if type(x) is dict:
        return {key: _copy_containers(child) for key, child in x.items()}
    if type(x) is set:
        return set(x)
    return x


def _parameters(
    target: Callable, config_type: type
) -> "Mapping[str, inspect.Parameter]":
    import inspect  # local, since it doubles the import time of this package

    try:
        parameters = inspect.signature(target).parameters
        variadic = {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        if any(x.kind not in variadic for x in parameters.values()):
            return parameters
        if not isinstance(target, type):
            return parameters
        if type(target).__call__ is type.__call__:
            return parameters
        # The metaclass forwards all arguments; the constructor has their names.
        parameters = dict(inspect.signature(target.__init__).parameters)
        parameters.pop(next(iter(parameters)))  # self
        return parameters
    except (TypeError, ValueError) as error:
        raise InvalidConfigValueError(
            f"{config_type._factory_name} cannot read the parameters of "
            f"{_callable_name(target)}: {error}. Wrap it in a function with named parameters."
        ) from None


def _make_fields(target: Callable, config_type: type) -> dict[str, Field]:
    target_name = config_type._target
    fields = {target_name: Field(target_name, default=target)}
    for name, parameter in _parameters(target, config_type).items():
        if name.startswith("_") and parameter.default is not parameter.empty:
            continue  # private
        validation.validate_config_field_name(name)
        check_reserved_name(
            name, config_type, what=f"{_callable_name(target)} has a parameter"
        )
        if name == target_name:
            raise InvalidConfigNameError(
                f"{_callable_name(target)} has a parameter {name!r}, a name that "
                f"{config_type._factory_name} reserves for the target. Wrap it in a function that "
                "renames the parameter."
            )
        annotation = parameter.annotation
        default = parameter.default
        if annotation is parameter.empty:
            annotation = None
        if default is parameter.empty:
            default = values.REQUIRED
        if parameter.kind is parameter.VAR_POSITIONAL:
            annotation, default = tuple, ()
        elif parameter.kind is parameter.VAR_KEYWORD:
            annotation, default = dict, {}
        fields[name] = Field(
            name,
            annotation,
            functools.partial(_annotation_namespace, target),
            default=default,
            factory=_default_factory(target, name),
            accepts_configs=True,
        )
    return fields


def _default_factory(target: Callable, name: str) -> Callable[[], Value] | None:
    """Returns the default factory of a dataclass or attrs field, which no signature shows."""
    for attribute in getattr(target, "__attrs_attrs__", ()):
        if attribute.alias != name:
            continue
        factory = getattr(attribute.default, "factory", None)
        if factory and not attribute.default.takes_self:
            return factory
    field = getattr(target, "__dataclass_fields__", {}).get(name)
    factory = getattr(field, "default_factory", None)
    return factory if callable(factory) else None


def _annotation_namespace(target: Callable) -> dict[str, Any]:
    function: Any = target
    if isinstance(target, type):
        function = target.__init__
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    namespace = getattr(function, "__globals__", None)
    if namespace:
        return namespace
    # A function of C code.
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    return vars(module) if module else {}


def _accepts_config(hint: Hint) -> bool:
    """Returns whether a parameter is declared as a config, or as one or None."""
    arms = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    for arm in arms:
        cls = typing.get_origin(arm) or arm
        if not (isinstance(cls, type) and issubclass(cls, values.ConfigNode)):
            return False
    return True


def _callable_name(target: Callable) -> str:
    name = getattr(target, "__qualname__", None) or repr(target)
    return name.rpartition("<locals>.")[2]
