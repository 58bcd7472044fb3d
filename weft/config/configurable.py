"""`Configurable`: base of classes whose objects are created from configs.

    class Linear(Configurable):
        @config_class
        class Config(Configurable.Config):
            dim: Required[int] = REQUIRED

    cfg = Linear.default_config().set(dim=8)    # a partially specified object, as a value
    layer = cfg.instantiate()                   # Linear(cfg)

A config with `instantiate` is a factory: each call creates a new object.
"""

from typing import Any, Generic, TypeVar, Union

from weft.config.config import ConfigBase
from weft.config.fields import define_fields
from weft.config.required import REQUIRED
from weft.config.validation import check_value, register_validator
from weft.config.values import join_path
from weft.errors import (
    InvalidConfigClassError,
    InvalidConfigValueError,
    RequiredFieldMissingError,
)

T = TypeVar("T")
C = TypeVar("C", bound="Configurable")


class InstantiableConfig(Generic[T], ConfigBase):
    """Config of an object of type `T`."""

    def instantiate(self, **kwargs: Any) -> T:
        """Creates the object.

        Args:
            **kwargs: further arguments, such as the `parent` of a module.

        Raises:
            RequiredFieldMissingError: if a field is still REQUIRED.
        """
        raise NotImplementedError(type(self))


define_fields(InstantiableConfig)

ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 - `T | X` cannot be subscripted before 3.14
"""`ConfigOr[Schedule]`: a schedule or its config. See `maybe_instantiate`."""


def check_complete(config: ConfigBase, given: "dict[str, Any] | None" = None) -> None:
    """Checks that all fields of a config are set and valid.

    Nested configs are not checked, because the object may complete them.

    Args:
        given: values that replace those of fields, of any type, such as traced arrays.

    Raises:
        RequiredFieldMissingError: if a field is still REQUIRED.
        InvalidConfigValueError: for an invalid value in a list or dict.
    """
    given = given or {}
    values = {name: value for name, value in config._field_values().items() if name not in given}
    made = config._origins.get(config._target or "")
    missing = [name for name, value in (values | given).items() if value is REQUIRED]
    if missing:
        paths = ", ".join(join_path(config._place, f".{name}") for name in missing)
        be = "is" if len(missing) == 1 else "are"
        raise RequiredFieldMissingError(
            f"{paths} {be} still REQUIRED in "
            f"{config._title()}{f', which was created at {made}' if made else ''}. Write "
            f"cfg.set({', '.join(f'{name}=…' for name in missing)}) before cfg.instantiate()."
        )
    for name, value in values.items():
        # Fields were checked when set, but lists and dicts may have changed since.
        check_value(value, join_path(config._place, f".{name}"))


class Configurable:
    """Base of the classes whose objects are created from configs."""

    class Config(InstantiableConfig[C]):
        """Configures a Configurable."""

        _target = "klass"

        klass: type[C]

        def instantiate(self, **kwargs: Any) -> C:
            check_complete(self)
            return self.klass(self, **kwargs)

    define_fields(Config)

    # Fields that the text of a config may set only if its reader allows this class, such as output
    # paths; True for all, for classes with effects outside of a run's directory. See
    # `weft.config.references`.
    _needs_allow: "bool | tuple[str, ...]" = ()

    def __init__(self, config: Config):
        self._config = config.clone()

    @property
    def config(self) -> Any:
        """View of the config of this object.

        Its fields are read-only. Nested configs are copies, which can be completed for a part of
        this object: `cfg = self.config; part = cfg.part.set(dim=cfg.dim).instantiate()`.
        """
        return self._config._frozen_view()

    @classmethod
    def default_config(cls: type[C]) -> Any:
        """Returns a config of this class with all fields at their defaults.

        A subclass without a `Config` of its own uses that of its parent.

        Raises:
            MissingConfigClassDecoratorError: if `Config` lacks @config_class.
            InvalidConfigClassError: if `Config` does not derive from `Configurable.Config`.
        """
        config_type = cls.Config
        if not (isinstance(config_type, type) and issubclass(config_type, Configurable.Config)):
            parent = next(
                base.__qualname__ for base in cls.__mro__[1:] if issubclass(base, Configurable)
            )
            raise InvalidConfigClassError(
                f"{cls.__qualname__}.Config does not derive from the config of its parent. "
                f"Write `class Config({parent}.Config):`."
            )
        return config_type(klass=cls)


def needs_allow(cls: type) -> "bool | frozenset[str]":
    """Returns the names of the fields that a text may not set, or True for all.

    Includes the fields of all bases.
    """
    kept = [vars(base).get("_needs_allow", ()) for base in cls.__mro__]
    return any(names is True for names in kept) or frozenset(
        name for names in kept if names for name in names
    )


def _reject_object(value: Configurable) -> None:
    kind = type(value).__qualname__
    raise InvalidConfigValueError(
        f"A config cannot hold an object of type {kind}, which is itself created from a "
        f"config. Set its config: {kind}.default_config(), or the object's `.config.clone()`."
    )


register_validator(
    match_fn=lambda value: isinstance(value, Configurable), validate_fn=_reject_object
)


class ConfigModifier(Configurable):
    """Configurable function that changes configs."""

    def __call__(self, cfg: InstantiableConfig) -> InstantiableConfig:
        """Returns the replacement of `cfg`, which may be `cfg` itself, changed."""
        raise NotImplementedError(type(self))


def maybe_set_config(cfg: Any, **kwargs: Any) -> Any:
    """Sets the given fields that a config has, and returns the config."""
    if isinstance(cfg, ConfigBase):
        fields = cfg._fields()
        cfg.set(**{name: value for name, value in kwargs.items() if name in fields})
    return cfg
