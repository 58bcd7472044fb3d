import collections.abc
import dataclasses
import enum
import typing
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypeVar, Union

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
    Required,
    config_class,
    config_for_function,
)
from weft.config.typecheck import fits, resolve_annotation, type_name

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
def test_what_fits(hint, value):
    assert fits(value, hint)


@pytest.mark.parametrize(("hint", "value"), BAD, ids=lambda v: str(v).partition(" at 0x")[0][:40])
def test_what_does_not_fit(hint, value):
    assert not fits(value, hint)


def test_a_config_may_stand_for_any_argument_of_a_function():
    assert not fits(CONFIG, int)
    assert fits(CONFIG, int, configs=True)
    assert fits({"a": [CONFIG]}, dict[str, list[int]], configs=True)


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


def test_the_error_names_path_value_type_and_mend():
    message = message_of(lambda: Holder().set(number="0.5"))
    assert message == (
        "number: Holder declares float there, but got '0.5' of type str. Write 0.5 without quotes."
    )
    assert message_of(lambda: Holder().set(count="3")).endswith("Write 3 without quotes.")
    assert "Set 'count' to a value of type int." in message_of(lambda: Holder().set(count=[]))
    assert "Set 'number' to a value of type float." in message_of(lambda: Holder().set(number="x"))


def test_a_class_where_a_config_belongs():
    message = message_of(lambda: Holder().set(child=Layer))
    assert "Set the config of the class: Layer.default_config()." in message


def test_none_where_it_is_not_declared():
    message = message_of(lambda: Holder().set(count=None))
    assert "Declare `int | None` if it may be left out." in message


def test_the_default_is_always_fine():
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
    assert fits(3, half)
