"""`Configurable`: base of classes whose objects are created from configs.

    class Linear(Configurable):
        class Config(Configurable.Config):
            dim: Required[int] = REQUIRED

    cfg = Linear.default_config().set(dim=8)    # a partially specified object, as a value
    layer = cfg.instantiate()                   # Linear(cfg)

A config with `instantiate` is a factory: each call creates a new object. Recipes are functions, by
name in a module, that create trainer configs.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    Union,
)

from weft import errors
from weft.config.config import ConfigBase
from weft.config.validation import check_value, register_validator
from weft.config.values import REQUIRED, UnreadValue, Value, join_path

if TYPE_CHECKING:
    import typing_extensions

if TYPE_CHECKING:
    # `InstantiableConfig` alone means `InstantiableConfig[Any]`.
    T = typing_extensions.TypeVar("T", covariant=True, default=Any)
else:
    T = TypeVar("T")
C = TypeVar("C", bound="Configurable")
ValueT = TypeVar("ValueT")
ConfigT = TypeVar("ConfigT", bound=ConfigBase, covariant=True)


class HasConfig(Protocol[ConfigT]):
    """Class with a nested `Config`, so that type checkers and editors know its own one."""

    @property
    def Config(self) -> type[ConfigT]: ...


class InstantiableConfig(Generic[T], ConfigBase):
    """Config of an object of type `T`."""

    if TYPE_CHECKING:
        # Any field can be set where the class of a config is not known.
        def __init__(self, **kwargs: Value): ...
        def __setattr__(self, name: str, value: Value) -> None: ...

    def instantiate(self, **kwargs: Value) -> T:
        """Creates the object; `kwargs` are further arguments, such as the `parent` of a module.

        Raises RequiredFieldMissingError if a field is still REQUIRED.
        """
        raise NotImplementedError(type(self))


ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 - `T | X` cannot be subscripted before 3.14
"""`ConfigOr[Schedule]`: a schedule or its config. See `maybe_instantiate`."""


def check_complete(
    config: ConfigBase, overrides: Mapping[str, object] | None = None
) -> None:
    """Checks that all fields of a config are set and valid.

    Nested configs are not checked, because the object may complete them.

    Args:
        overrides: values that replace those of fields, of any type, such as traced arrays.

    Raises:
        RequiredFieldMissingError: if a field is still REQUIRED.
        ConfigTextError: if the text of a field could not be read, see `from_text`.
        InvalidConfigValueError: for an invalid value in a list or dict.
    """
    values = config._field_values()
    for name in overrides or {}:
        values.pop(name, None)
    missing = [name for name, value in values.items() if value is REQUIRED]
    missing += [
        name for name, value in (overrides or {}).items() if value is REQUIRED
    ]
    if missing:
        paths = ", ".join(
            join_path(config._path, f".{name}") for name in missing
        )
        verb = "is" if len(missing) == 1 else "are"
        origin = config._origins.get(config._target or "")
        creation = f", which was created at {origin}" if origin else ""
        arguments = ", ".join(f"{name}=…" for name in missing)
        raise errors.RequiredFieldMissingError(
            f"{paths} {verb} still REQUIRED in {config._label()}{creation}. Write "
            f"cfg.set({arguments}) before cfg.instantiate()."
        )
    for name, value in values.items():
        if isinstance(value, UnreadValue):
            raise value.error
        # Fields were checked when set, but lists and dicts may have changed since.
        check_value(value, join_path(config._path, f".{name}"))


class Configurable:
    """Base of the classes whose objects are created from configs.

    A class declares its fields in a nested `Config`. An object made by `instantiate` has them as
    `config`.

    >>> from weft.config import Configurable
    >>> class Greeter(Configurable):
    ...     class Config(Configurable.Config):
    ...         name: str = "world"
    ...     def greet(self):
    ...         return f"Hello, {self.config.name}!"
    >>> Greeter.default_config().set(name="Ada").instantiate().greet()
    'Hello, Ada!'
    """

    class Config(InstantiableConfig[Any]):
        _target = "klass"

        if TYPE_CHECKING:
            # In a class with declared fields, the assignment of others is a mistake.
            __setattr__: ClassVar[None]

        klass: type[Any] = REQUIRED

        def instantiate(self, **kwargs: Value) -> Any:
            check_complete(self)
            return self.klass(self, **kwargs)

    # Fields that the text of a config may set only if its reader allows this class, such as output
    # paths; True for all, for classes with effects outside of a run's directory. See
    # `weft.config.references`.
    _needs_allow: "bool | tuple[str, ...]" = ()

    def __init__(self, config: Config):
        if not isinstance(config, ConfigBase):
            kind = type(self).__qualname__
            raise errors.ConfigTypeError(
                f"{kind} is created from a config, but got {config!r:.80} of type "
                f"{type(config).__qualname__}. Set the fields of {kind}.default_config(), and call "
                "its instantiate()."
            )
        self._config = config.clone()

    @property
    def config(self) -> Any:
        """View of the config of this object.

        Its fields are read-only. Nested configs are copies, which can be completed for a part of
        this object: `cfg = self.config; part = cfg.part.set(dim=cfg.dim).instantiate()`.
        """
        return self._config._frozen_view()

    @classmethod
    def default_config(cls: "type[HasConfig[ConfigT]]") -> ConfigT:
        """Returns a config of this class with all fields at their defaults.

        A subclass without a `Config` of its own uses that of its parent.

        Raises InvalidConfigClassError if `Config` does not derive from `Configurable.Config`.
        """
        config_type: Any = cls.Config  # pyright: ignore[reportAttributeAccessIssue]
        if not (
            isinstance(config_type, type)
            and issubclass(config_type, Configurable.Config)
        ):
            parent = next(
                base.__qualname__
                for base in cls.__mro__[1:]
                if issubclass(base, Configurable)
            )
            raise errors.InvalidConfigClassError(
                f"{cls.__qualname__}.Config does not derive from the config of its parent. "
                f"Write `class Config({parent}.Config):`."
            )
        return config_type(klass=cls)  # pyright: ignore[reportReturnType]


def needs_allow(cls: type) -> "bool | frozenset[str]":
    """Returns the names of the fields that a text may not set, or True for all.

    Includes the fields of all bases.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        declared_names = vars(base).get("_needs_allow", ())
        if declared_names is True:
            return True
        names.update(declared_names or ())
    return frozenset(names)


def _reject_object(value: Configurable) -> None:
    kind = type(value).__qualname__
    raise errors.InvalidConfigValueError(
        f"A config cannot hold an object of type {kind}, which is itself created from a "
        f"config. Set its config: {kind}.default_config(), or the object's `.config.clone()`."
    )


register_validator(
    match_fn=lambda value: isinstance(value, Configurable),
    validate_fn=_reject_object,
)


class ConfigModifier(Configurable):
    """Configurable function that changes configs."""

    def __call__(self, cfg: InstantiableConfig) -> InstantiableConfig:
        """Returns the replacement of `cfg`, which may be `cfg` itself, changed."""
        raise NotImplementedError(type(self))


def maybe_set_config(cfg: ValueT, **kwargs: Value) -> ValueT:
    """Sets the given fields that a config has, and returns the config, or any other value."""
    if isinstance(cfg, ConfigBase):
        fields = cfg._fields()
        cfg.set(
            **{name: value for name, value in kwargs.items() if name in fields}
        )
    return cfg


class TrainerConfigFn(Protocol):
    """Function that creates a trainer config."""

    def __call__(self, data_dir: str | None = None) -> InstantiableConfig:
        """Returns a new config; `data_dir` is the location of the data, if any is read."""
        ...


def get_named_trainer_config(
    config_name: str, *, config_module: str
) -> TrainerConfigFn:
    """Returns a recipe by name.

    Args:
        config_module: dotted name of a module whose `named_trainer_configs()` returns a
            `TrainerConfigFn` by name.

    Raises UnknownConfigError if the module has no such recipe, or no recipes.
    """
    module = importlib.import_module(config_module)
    if not hasattr(module, "named_trainer_configs"):
        raise errors.UnknownConfigError(
            f"{config_module} does not define named_trainer_configs(), "
            f"so there is no {config_name!r} in it. Name a module of recipes."
        )
    recipes: dict[str, Any] = module.named_trainer_configs()
    if config_name not in recipes:
        raise errors.UnknownConfigError(
            f"unknown recipe {config_name!r} in {config_module}. "
            f"{errors.did_you_mean(config_name, recipes)}"
        )
    return recipes[config_name]


def with_overrides(
    trainer_config_fn: TrainerConfigFn, **kwargs: Value
) -> TrainerConfigFn:
    """Returns a function that creates the same config with some fields changed."""

    @functools.wraps(trainer_config_fn)
    def overridden(*args: Any, **arguments: Any) -> InstantiableConfig:
        return trainer_config_fn(*args, **arguments).set(**kwargs)

    return overridden
