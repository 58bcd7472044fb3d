"""`Configurable`: a class whose objects are made from configs.

    class Linear(Configurable):
        @config_class
        class Config(Configurable.Config):
            dim: Required[int] = REQUIRED

    cfg = Linear.default_config().set(dim=8)    # a partially specified object, as a value
    layer = cfg.instantiate()                   # Linear(cfg)

A config with `instantiate` is a factory: what is called twice makes two objects.
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
    """A config that an object of type `T` can be made from."""

    def instantiate(self, **kwargs: Any) -> T:
        """Makes an object.

        Args:
            **kwargs: further arguments, such as the `parent` of a module.

        Raises:
            RequiredFieldMissingError: if a field is still REQUIRED.
        """
        raise NotImplementedError(type(self))


define_fields(InstantiableConfig)

ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 - `T | X` cannot be subscripted before 3.14
"""`ConfigOr[Schedule]`: a schedule, or a config that makes one. See `maybe_instantiate`."""


def check_complete(config: ConfigBase, given: "dict[str, Any] | None" = None) -> None:
    """Checks that a config can be instantiated: its own fields are set and hold valid values.

    What stands deeper is not judged, since the object may complete the configs of its parts.

    Args:
        config: the config.
        given: values that replace those of fields. The config does not hold them, so they may be
            anything, such as traced arrays.

    Raises:
        RequiredFieldMissingError: if a field is still REQUIRED.
        InvalidConfigValueError: for a value that came into a list or dict after it was set.
    """
    given = given or {}
    values = {name: value for name, value in config._field_values().items() if name not in given}
    made = config._origins.get(config._target or "")
    missing = [name for name, value in (values | given).items() if value is REQUIRED]
    if missing:
        paths = ", ".join(join_path(config._place, f".{name}") for name in missing)
        be = "is" if len(missing) == 1 else "are"
        raise RequiredFieldMissingError(
            f"{paths} {be} still REQUIRED in {config._title()}"
            f"{f', which was made at {made}' if made else ''}. "
            f"Write cfg.set({', '.join(f'{name}=…' for name in missing)}) before cfg.instantiate()."
        )
    for name, value in values.items():
        # Fields were checked as they were set, but lists and dicts may have changed since.
        check_value(value, join_path(config._place, f".{name}"))


class Configurable:
    """Base of the classes whose objects are made from configs.

    Args:
        config: the config of this object. The object holds a copy, which nothing changes anymore.
    """

    class Config(InstantiableConfig[C]):
        """What an object of this class is made from.

        Attributes:
            klass: the class of the object.
        """

        _target = "klass"

        klass: type[C]

        def instantiate(self, **kwargs: Any) -> C:
            check_complete(self)
            return self.klass(self, **kwargs)

    define_fields(Config)

    # What the text of a config decides only if its reader allows this class: the names of fields,
    # such as where to write, or True for all, where objects act outside of a run's directory. See
    # `weft.config.references`.
    _needs_allow: "bool | tuple[str, ...]" = ()

    def __init__(self, config: Config):
        self._config = config.clone()

    @property
    def config(self) -> Any:
        """A view of the config of this object.

        Its own fields cannot be set. The configs in it are copies: to complete one for a part of
        this object, `cfg = self.config; part = cfg.part.set(dim=cfg.dim).instantiate()`.
        """
        return self._config._frozen_view()

    @classmethod
    def default_config(cls: type[C]) -> Any:
        """Returns a config of this class with all fields at their defaults.

        A subclass without a `Config` of its own uses that of its parent.

        Raises:
            MissingConfigClassDecoratorError: if @config_class is missing above `Config`.
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
    """Returns what a text may not decide of a class: the names of fields, or True for all of it.

    A class keeps what its bases hold back, whatever its own `_needs_allow` adds.

    Args:
        cls: any class.
    """
    kept = [vars(base).get("_needs_allow", ()) for base in cls.__mro__]
    return any(names is True for names in kept) or frozenset(
        name for names in kept if names for name in names
    )


def _reject_object(value: Configurable) -> None:
    kind = type(value).__qualname__
    raise InvalidConfigValueError(
        f"A config cannot hold an object of type {kind}, since it is made from a config itself. "
        f"Set its config: {kind}.default_config(), or the object's `.config.clone()`."
    )


register_validator(
    match_fn=lambda value: isinstance(value, Configurable), validate_fn=_reject_object
)


class ConfigModifier(Configurable):
    """A change to configs that is itself configured."""

    def __call__(self, cfg: InstantiableConfig) -> InstantiableConfig:
        """Returns the config that stands for `cfg` from here on; it may be `cfg`, changed.

        Args:
            cfg: a config, such as that of a trainer.
        """
        raise NotImplementedError(type(self))


def maybe_set_config(cfg: Any, **kwargs: Any) -> Any:
    """Sets those of the given fields that a config has, and returns the config.

    Args:
        cfg: a config, or anything else, which is returned as it is.
        **kwargs: values by field name; a name that is no field of `cfg` is passed over.
    """
    if isinstance(cfg, ConfigBase):
        fields = cfg._fields()
        cfg.set(**{name: value for name, value in kwargs.items() if name in fields})
    return cfg
