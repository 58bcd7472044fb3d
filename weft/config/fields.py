"""`@config_class`: turns an annotated class into a config class.

Each annotated name in the class body is a field. Its value is the default, copied for each config;
without a value, the field is REQUIRED. Subclasses inherit fields and may redeclare them with
another type or default. Config classes hold fields only; behavior belongs to the configured object.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

from weft.config.names import did_you_mean
from weft.config.required import REQUIRED
from weft.config.typecheck import resolve_annotation
from weft.config.validation import check_value, validate_config_field_name
from weft.config.values import ConfigNode, copy_value
from weft.errors import (
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    NonConfigFieldError,
    UnknownFieldError,
)

C = TypeVar("C", bound=type)


class Field:
    """Field of a config.

    Args:
        namespace: returns the names for string annotations.
        factory: creates the default of each config instead.
        accepts_configs: whether a config is accepted for any value, since it is instantiated first.
    """

    __slots__ = (
        "_default",
        "_factory",
        "_hint",
        "accepts_configs",
        "annotation",
        "name",
        "namespace",
    )

    def __init__(
        self,
        name: str,
        annotation: Any = None,
        namespace: Callable[[], dict[str, Any]] = dict,
        *,
        default: Any = REQUIRED,
        factory: Callable[[], Any] | None = None,
        accepts_configs: bool = False,
    ):
        self.name = name
        self.annotation = annotation
        self.namespace = namespace
        self.accepts_configs = accepts_configs
        self._default = default
        self._factory = factory

    def default(self, place: str = "") -> Any:
        """Returns a copy of the default with the path `place`."""
        return copy_value(self._default, place) if self._factory is None else self._factory()

    @property
    def hint(self) -> Any:
        """Declared type with strings resolved; `Any` if that is not (yet) possible."""
        if not hasattr(self, "_hint"):
            if self.annotation is None:
                return Any
            hint = resolve_annotation(self.annotation, self.namespace)
            if hint is None:
                return Any
            self._hint = hint
        return self._hint


@overload
def config_class(cls: C, **kwargs: Any) -> C: ...
@overload
def config_class(cls: None = None, **kwargs: Any) -> Callable[[C], C]: ...
@dataclass_transform(kw_only_default=True)
def config_class(cls: Any = None, **kwargs: Any) -> Any:
    """Turns a class whose body declares fields into a config class.

    Args:
        cls: a subclass of `ConfigBase`, usually of the parent class's `Config`.
        **kwargs: new defaults of inherited fields, such as `@config_class(bias=False)`.

    Raises:
        InvalidConfigClassError: if `cls` does not derive from `ConfigBase`.
        InvalidConfigNameError: for a field name that is private, or that `ConfigBase` uses.
        InvalidConfigValueError: for a default that a config cannot hold.
        NonConfigFieldError: for a method, a property or a value without annotation.
        UnknownFieldError: for a new default of an unknown field.

    >>> from weft.config import Configurable, REQUIRED, Required, config_class
    >>> class Linear(Configurable):
    ...     @config_class
    ...     class Config(Configurable.Config):
    ...         dim: Required[int] = REQUIRED
    ...         bias: bool = True
    >>> Linear.default_config().set(dim=8)
    Linear.Config(bias=True, dim=8)
    """
    if cls is None:
        return functools.partial(config_class, **kwargs)
    if not (isinstance(cls, type) and issubclass(cls, ConfigNode)):
        raise InvalidConfigClassError(
            f"@config_class decorates {_name(cls)}, which does not derive from ConfigBase. "
            "Write `class Config(Parent.Config):` inside of a Configurable, or derive from "
            "ConfigBase."
        )
    _check_body(cls)
    return define_fields(cls, **kwargs)


def define_fields(cls: Any, **defaults: Any) -> Any:
    """Implements `config_class`, without its checks of the body."""
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= vars(base).get("__config_fields__", {})
    for name, annotation in own_annotations(cls).items():
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
    for name, default in defaults.items():
        if name not in fields:
            raise UnknownFieldError(
                f"@config_class({name}=…) of {_name(cls)}: there is no such field to set a "
                f"default for. {did_you_mean(name, fields)}"
            )
        _check_default(default, cls, name)
        inherited = fields[name]
        fields[name] = Field(name, inherited.annotation, inherited.namespace, default=default)
    cls.__config_fields__ = fields
    return cls


def _check_default(default: Any, cls: type, name: str) -> None:
    path = f"{_name(cls)}.{name}"
    if (type(default).__module__, type(default).__name__) in _FIELD_SPECIFIERS:
        raise InvalidConfigValueError(
            f"{path} is declared with field(…). Write the default itself, as `{name}: … = []`: "
            "each config gets a copy of it."
        )
    check_value(default, path)


_FIELD_SPECIFIERS = (("dataclasses", "Field"), ("attr._make", "_CountingAttr"))


def own_annotations(cls: type) -> dict[str, Any]:
    """Returns the annotations in the body of a class, excluding its bases."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return dict(vars(cls).get("__annotations__", {}))


def fields_of_class(cls: type) -> dict[str, Field]:
    """Returns the fields of a config class by name.

    Raises:
        MissingConfigClassDecoratorError: if the class itself lacks @config_class.
    """
    table = cls.__dict__.get("__config_fields__")
    if table is None:
        raise MissingConfigClassDecoratorError(
            f"{_name(cls)} is not decorated with @config_class, so its fields are unknown. "
            f"Write @config_class above `class {cls.__name__}` in {cls.__module__}."
        )
    return table


_METHOD_KINDS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


def _check_body(cls: type) -> None:
    annotations = own_annotations(cls)
    for name, annotation in annotations.items():
        if str(annotation).removeprefix("typing.").startswith("ClassVar"):
            raise NonConfigFieldError(
                f"{_name(cls)} declares {name!r} as a ClassVar. A config class holds fields only: "
                "make it a constant of the module."
            )
        validate_config_field_name(name)
        check_reserved_name(name, cls, what=f"{_name(cls)} declares a field")
    for name, value in vars(cls).items():
        if name in annotations or name == "instantiate" or name.startswith("__annotate"):
            continue
        if isinstance(value, _METHOD_KINDS):
            raise NonConfigFieldError(
                f"{_name(cls)} defines {name!r}, a {_kind_of_method(value)}. A config class holds "
                f"fields only: make {name!r} a function that takes the config, "
                "or a method of the class that is configured."
            )
        if not name.startswith("__") and not isinstance(value, types.MemberDescriptorType):
            raise NonConfigFieldError(
                f"{_name(cls)} defines {name!r} without an annotation, so it is not a field. "
                f"Write `{name}: {_annotation_for(value)} = …`."
            )


def check_reserved_name(name: str, cls: type, *, what: str) -> None:
    """Checks that a field does not hide a method of configs.

    Raises:
        InvalidConfigNameError: for a name such as `set` or `items`.
    """
    for base in cls.__mro__:
        if name in vars(base) and base.__module__.startswith("weft.config.") and base is not cls:
            raise InvalidConfigNameError(
                f"{what} {name!r}, but every config has a method of that name. "
                f"Call it {name + '_'!r}."
            )


def _kind_of_method(value: Any) -> str:
    return "method" if isinstance(value, types.FunctionType) else type(value).__name__


def _annotation_for(value: Any) -> str:
    return "Any" if value is None else type(value).__name__


def _class_namespace(cls: type) -> dict[str, Any]:
    module = sys.modules.get(cls.__module__)
    return {**(vars(module) if module else {}), cls.__name__: cls}


def _name(cls: Any) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)
