import dataclasses
from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigTypeError,
    Configurable,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    NonConfigFieldError,
    Required,
    UnknownFieldError,
    config_class,
)

if TYPE_CHECKING:
    from nowhere import Something


@config_class
class Base(ConfigBase):
    dim: Required[int] = REQUIRED
    bias: bool = True
    names: list[str] = ["a"]


def test_fields_have_their_defaults():
    cfg = Base()
    assert (cfg.dim, cfg.bias, cfg.names) == (REQUIRED, True, ["a"])


def test_a_field_without_default_is_required():
    @config_class
    class Config(ConfigBase):
        dim: int

    assert Config().dim is REQUIRED
    assert Config(dim=3).dim == 3


def test_defaults_are_copied_for_each_config():
    first, second = Base(), Base()
    first.names.append("b")
    assert second.names == ["a"]
    assert Base().names == ["a"]


def test_a_default_config_is_copied_too():
    default = Base(dim=1)

    @config_class
    class Outer(ConfigBase):
        inner: Base = default

    outer = Outer()
    outer.inner.dim = 3
    assert Outer().inner.dim == 1


def test_subclasses_inherit_and_redeclare():
    @config_class
    class Child(Base):
        bias: bool = False
        dim: str = "wide"
        extra: float = 0.5

    assert Child().keys() == ["bias", "dim", "extra", "names"]
    assert Child().bias is False
    assert Child(dim="8").dim == "8"
    with pytest.raises(ConfigTypeError):
        Child(dim=8)
    assert Base().bias is True


def test_two_bases():
    @config_class
    class Left(ConfigBase):
        x: int = 1
        y: int = 1

    @config_class
    class Right(ConfigBase):
        y: int = 2
        z: int = 2

    @config_class
    class Both(Left, Right):
        pass

    assert dict(Both().items()) == {"x": 1, "y": 1, "z": 2}


def test_the_decorator_may_be_called_and_redefault():
    @config_class(bias=False, dim=7)
    class Child(Base):
        pass

    assert (Child().bias, Child().dim) == (False, 7)
    with pytest.raises(ConfigTypeError, match="declares int"):
        Child(dim="7")


def test_a_new_default_of_an_unknown_field():
    with pytest.raises(UnknownFieldError) as error:

        @config_class(bais=False)
        class Child(Base):
            pass

    assert "no such field to set a default" in str(error.value)
    assert "Did you mean 'bias'?" in str(error.value)


def test_a_class_that_is_no_config():
    with pytest.raises(InvalidConfigClassError, match="does not derive from ConfigBase"):

        @config_class
        class Config:
            dim: int = 1


def test_a_missing_decorator():
    class Config(Base):
        extra: int = 1

    with pytest.raises(MissingConfigClassDecoratorError) as error:
        Config()
    assert "Write @config_class above `class Config`" in str(error.value)

    class Layer(Configurable):
        class Config(Configurable.Config):
            dim: int = 1

    with pytest.raises(MissingConfigClassDecoratorError, match=r"Layer\.Config is not decorated"):
        Layer.default_config()


def bad_method():
    @config_class
    class Config(ConfigBase):
        def scale(self):
            return 1


def bad_property():
    @config_class
    class Config(ConfigBase):
        @property
        def scale(self):
            return 1


def bad_classmethod():
    @config_class
    class Config(ConfigBase):
        @classmethod
        def scale(cls):
            return 1


def bad_init():
    @config_class
    class Config(ConfigBase):
        def __init__(self):
            super().__init__()


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (bad_method, "defines 'scale', a method"),
        (bad_property, "defines 'scale', a property"),
        (bad_classmethod, "defines 'scale', a classmethod"),
        (bad_init, "defines '__init__', a method"),
    ],
)
def test_a_config_class_defines_no_methods(define, message):
    with pytest.raises(NonConfigFieldError) as error:
        define()
    assert message in str(error.value)
    assert "A config class holds fields only" in str(error.value)


def test_a_value_without_annotation():
    with pytest.raises(NonConfigFieldError) as error:

        @config_class
        class Config(ConfigBase):
            dim = 8

    assert "defines 'dim' without an annotation" in str(error.value)
    assert "Write `dim: int = …`" in str(error.value)


@pytest.mark.parametrize("name", ["set", "items", "clone", "to_dict", "visit"])
def test_a_field_cannot_hide_a_method(name):
    with pytest.raises(InvalidConfigNameError) as error:
        config_class(type("Config", (ConfigBase,), {"__annotations__": {name: int}}))
    assert f"declares a field {name!r}, but every config has a method of that name" in str(
        error.value
    )
    assert f"Call it '{name}_'" in str(error.value)


def test_a_private_field():
    with pytest.raises(InvalidConfigNameError, match="must not begin with an underscore"):

        @config_class
        class Config(ConfigBase):
            _dim: int = 1


def test_klass_may_be_redeclared():
    class Layer(Configurable):
        @config_class
        class Config(Configurable.Config):
            klass: type = object

    assert Layer.default_config().klass is Layer


@pytest.mark.parametrize("specifier", [dataclasses.field(default=1), attrs.field(default=1)])
def test_field_specifiers_are_not_needed(specifier):
    with pytest.raises(InvalidConfigValueError, match="Write the default itself"):
        config_class(
            type("Config", (ConfigBase,), {"__annotations__": {"dim": int}, "dim": specifier})
        )


def test_a_default_that_no_config_can_hold():
    module = dataclasses
    with pytest.raises(InvalidConfigValueError, match=r"a Python module in .*Config\.library"):

        @config_class
        class Config(ConfigBase):
            library: object = module


class Later(ConfigBase):
    known: "int" = 1
    later: "Late | None" = None
    never: "Something" = None


Later = config_class(Later)


@config_class
class Late(ConfigBase):
    x: int = 1


def test_annotations_may_be_strings():
    cfg = Later()
    with pytest.raises(ConfigTypeError, match="declares int"):
        cfg.known = "1"
    cfg.later = Late()
    with pytest.raises(ConfigTypeError, match=r"declares Late \| None"):
        cfg.later = 3
    cfg.never = 3  # what cannot be resolved accepts everything
    assert cfg.never == 3


def test_a_class_variable_is_no_field():
    with pytest.raises(NonConfigFieldError, match="ClassVar"):

        @config_class
        class Config(ConfigBase):
            count: ClassVar[int] = 1
