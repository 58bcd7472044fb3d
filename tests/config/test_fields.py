import collections.abc
import dataclasses
import enum
import typing
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    TypeVar,
    Union,
)

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigOr,
    ConfigTypeError,
    Configurable,
    InstantiableConfig,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    NonConfigFieldError,
    Required,
    UnknownFieldError,
    config_class,
    config_for_function,
)
from weft.config.fields import matches_type, resolve_annotation, type_name

if TYPE_CHECKING:
    from nowhere import Something


@config_class
class Base(ConfigBase):
    dim: Required[int] = REQUIRED
    bias: bool = True
    names: list[str] = ["a"]


def test_field_without_default_is_required():
    @config_class
    class Config(ConfigBase):
        dim: int

    assert Config().dim is REQUIRED
    assert Config(dim=3).dim == 3


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


def test_decorator_may_be_called_and_redefault():
    @config_class(bias=False, dim=7)
    class Child(Base):
        pass

    assert (Child().bias, Child().dim) == (False, 7)
    with pytest.raises(ConfigTypeError, match="declares int"):
        Child(dim="7")


def test_new_default_of_an_unknown_field():
    with pytest.raises(UnknownFieldError) as error:

        @config_class(bais=False)
        class Child(Base):
            pass

    assert "sets a default, and " in str(error.value) and "has no field" in str(error.value)
    assert "Did you mean 'bias'?" in str(error.value)


def test_non_config_class():
    with pytest.raises(InvalidConfigClassError, match="does not derive from ConfigBase"):

        @config_class
        class Config:
            dim: int = 1


def test_decorator_may_be_left_out():
    class Layer(Configurable):
        class Config(Configurable.Config):
            dim: int = 1

    class Wide(Layer):
        class Config(Layer.Config):
            dim: int = 2
            depth: int = 3

    assert repr(Layer.default_config()).endswith("Layer.Config(dim=1)")
    assert repr(Wide.default_config()).endswith("Wide.Config(depth=3, dim=2)")
    with pytest.raises(NonConfigFieldError, match="defines 'dim' without an annotation"):

        class Config(ConfigBase):
            dim = 8


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
def test_config_class_defines_no_methods(define, message):
    with pytest.raises(NonConfigFieldError) as error:
        define()
    assert message in str(error.value)
    assert "A config class holds fields only" in str(error.value)


def test_value_without_annotation():
    with pytest.raises(NonConfigFieldError) as error:

        @config_class
        class Config(ConfigBase):
            dim = 8

    assert "defines 'dim' without an annotation" in str(error.value)
    assert "Write `dim: int = …`" in str(error.value)


@pytest.mark.parametrize("name", ["set", "items", "clone", "to_dict", "visit"])
def test_field_cannot_hide_a_method(name):
    with pytest.raises(InvalidConfigNameError) as error:
        config_class(type("Config", (ConfigBase,), {"__annotations__": {name: int}}))
    assert f"declares a field {name!r}, but every config has a method of that name" in str(
        error.value
    )
    assert f"Call it '{name}_'" in str(error.value)


def test_private_field():
    with pytest.raises(InvalidConfigNameError, match="must not begin with an underscore"):

        @config_class
        class Config(ConfigBase):
            _dim: int = 1


@pytest.mark.parametrize("specifier", [dataclasses.field(default=1), attrs.field(default=1)])
def test_field_specifiers_are_not_needed(specifier):
    with pytest.raises(InvalidConfigValueError, match="Write the default itself"):
        config_class(
            type("Config", (ConfigBase,), {"__annotations__": {"dim": int}, "dim": specifier})
        )


def test_invalid_default():
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


def test_class_variable_is_rejected():
    with pytest.raises(NonConfigFieldError, match="ClassVar"):

        @config_class
        class Config(ConfigBase):
            count: ClassVar[int] = 1


T = TypeVar("T")
N = TypeVar("N", bound=int)
Metres = NewType("Metres", float)


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Spec:
    x: int = 1


class Layer(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: int = 1


class Other(Configurable):
    pass


@config_class
class Data(ConfigBase):
    x: int = 1


def make(x: int = 1):
    return x


CONFIG = Layer.default_config()

GOOD = [
    (int, 3),
    (int, True),
    (int, np.int64(3)),
    (float, 0.5),
    (float, 3),
    (float, np.float32(0.5)),
    (float, jnp.bfloat16(0.5)),
    (complex, 1j),
    (bool, False),
    (bool, np.bool_(True)),
    (str, "x"),
    (bytes, b"x"),
    (None, None),
    (int | None, None),
    (Optional[int], 3),  # noqa: UP045 - both ways of writing are tested
    (Union[int, str], "x"),  # noqa: UP007
    (Required[int], REQUIRED),
    (Literal["a", 1], "a"),
    (Literal["a", 1], 1),
    (list[int], [1, 2]),
    (list[int], (1, 2)),
    (tuple[int, ...], [1]),
    (tuple[int, str], (1, "x")),
    (tuple, ()),
    (collections.abc.Sequence[str], ["a"]),
    (typing.Sequence[str], ("a",)),
    (dict[str, int], {"a": 1}),
    (collections.abc.Mapping[str, list[int]], {"a": [1]}),
    (dict, {1: 2}),
    (set[int], {1}),
    (frozenset, frozenset()),
    (Colour, Colour.RED),
    (Point, Point(1, 2)),
    (Spec, Spec()),
    (Spec, CONFIG),
    (type, int),
    (type[int], bool),
    (collections.abc.Callable, len),
    (collections.abc.Callable[[int], int], lambda x: x),
    (collections.abc.Callable, CONFIG),
    (Layer.Config, CONFIG),
    (Layer.Config, Other.default_config()),
    (Layer.Config, config_for_function(make)),
    (InstantiableConfig, CONFIG),
    (InstantiableConfig[Layer], CONFIG),
    (ConfigOr[int], 3),
    (ConfigOr[int], CONFIG),
    (Data, Data()),
    (Annotated[int, "note"], 3),
    (Metres, 3.5),
    (T, object()),
    (N, 3),
    (Any, object()),
    (np.dtype, jnp.bfloat16),
    (np.dtype, "float32"),
    (jax.Array, 3),
    (jax.sharding.PartitionSpec, ("data",)),
    ("Unresolved", 3),
]

BAD = [
    (int, 0.5),
    (int, "3"),
    (int, None),
    (int, CONFIG),
    (float, "0.5"),
    (float, [0.5]),
    (bool, 1),
    (bool, "true"),
    (str, 3),
    (None, 3),
    (int | None, "x"),
    (Required[int], "x"),
    (Literal["a"], "b"),
    (Literal[1], True),
    (list[int], ["a"]),
    (list[int], "ab"),
    (list[int], 3),
    (tuple[int, str], (1, 2)),
    (tuple[int, str], (1,)),
    (collections.abc.Sequence[str], "ab"),
    (dict[str, int], {"a": "b"}),
    (dict[str, int], {1: 1}),
    (dict, [1]),
    (dict[str, list[int]], {"a": [1, "x"]}),
    (set[int], [1]),
    (set[int], {"a"}),
    (Colour, "red"),
    (Spec, 3),
    (Point, (1, 2)),
    (type, 3),
    (type[int], "int"),
    (collections.abc.Callable, 3),
    (Layer.Config, 3),
    (Layer.Config, Layer),
    (InstantiableConfig, Data()),
    (Data, CONFIG),
    (ConfigOr[int], "x"),
    (Annotated[int, "note"], "x"),
    (Metres, "x"),
    (N, "x"),
]


@pytest.mark.parametrize(("hint", "value"), GOOD, ids=lambda v: str(v).partition(" at 0x")[0][:40])
def test_matching(hint, value):
    assert matches_type(value, hint)


@pytest.mark.parametrize(("hint", "value"), BAD, ids=lambda v: str(v).partition(" at 0x")[0][:40])
def test_mismatching(hint, value):
    assert not matches_type(value, hint)


def test_config_matches_any_function_argument():
    assert not matches_type(CONFIG, int)
    assert matches_type(CONFIG, int, configs=True)
    assert matches_type({"a": [CONFIG]}, dict[str, list[int]], configs=True)


@config_class
class Holder(ConfigBase):
    number: float = 0.5
    count: int = 1
    wrong: int = None
    child: Layer.Config = Layer.default_config()
    either: int | None = None


def message_of(act):
    with pytest.raises(ConfigTypeError) as error:
        act()
    return str(error.value)


def test_error_names_path_value_type_and_fix():
    message = message_of(lambda: Holder().set(number="0.5"))
    assert message == (
        "number: Holder declares float there, but got '0.5' of type str. Write 0.5 without quotes."
    )
    assert message_of(lambda: Holder().set(count="3")).endswith("Write 3 without quotes.")
    assert "Set 'count' to a value of type int." in message_of(lambda: Holder().set(count=[]))
    assert "Set 'number' to a value of type float." in message_of(lambda: Holder().set(number="x"))


def test_class_instead_of_config():
    message = message_of(lambda: Holder().set(child=Layer))
    assert "Set the config of the class: Layer.default_config()." in message


def test_undeclared_none():
    message = message_of(lambda: Holder().set(count=None))
    assert "Declare `int | None` if it may be left out." in message


def test_default_is_always_fine():
    cfg = Holder(wrong=3)
    cfg.wrong = None
    assert cfg.wrong is None


def test_required_unsets_any_field():
    assert Holder().set(count=REQUIRED).count is REQUIRED


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (None, "None"),
        (Optional[int], "int | None"),  # noqa: UP045
        (Required[int], "int"),
        (Literal["a", 2], "Literal['a', 2]"),
        (list[int | str], "list[int | str]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Layer.Config, "Layer.Config"),
        (InstantiableConfig[Layer], "InstantiableConfig[Layer]"),
        (collections.abc.Callable[[int], str], "Callable[..., str]"),
        (Annotated[int, "x"], "int"),
        (T, "T"),
        (Metres, "Metres"),
        (Any, "Any"),
    ],
)
def test_type_names(hint, name):
    assert type_name(hint) == name


def test_annotations_are_resolved_as_far_as_possible():
    assert resolve_annotation("int | None", dict) == int | None
    assert resolve_annotation("list[Layer]", lambda: {"Layer": Layer}) == list[Layer]
    assert resolve_annotation("Unknown", dict) is None
    assert resolve_annotation("not ( python", dict) is None
    half = resolve_annotation(Optional["Unknown"], dict)  # noqa: F821 - it is not known
    assert matches_type(3, half)
