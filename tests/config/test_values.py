import collections
import dataclasses
import enum
import functools
import threading
from typing import Any, ClassVar, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import ConfigBase, config_class, is_attrs, is_named_tuple
from weft.config.values import (
    copy_value,
    is_dataclass,
    join_path,
    parts,
    replace_part,
    values_equal,
)


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Spec:
    shape: tuple
    extra: Any = None
    KIND: ClassVar[str] = "spec"


@dataclasses.dataclass
class Counter:
    values: list


@attrs.define
class Pair:
    left: Any
    right: Any = None


@config_class
class Leaf(ConfigBase):
    x: int = 1


class Plain:
    def __init__(self, x):
        self.x = x


def test_what_kind_of_record_it_is():
    assert is_named_tuple(Point(1, 2))
    assert not is_named_tuple((1, 2))
    assert not is_named_tuple(Point)
    assert is_attrs(Pair(1))
    assert not is_attrs(Leaf())
    assert not is_attrs(Spec(()))
    assert is_dataclass(Spec(()))
    assert not is_dataclass(Spec)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Leaf(), [(".x", 1)]),
        ({"a": 1, 2: 3}, [("['a']", 1), ("[2]", 3)]),
        ([4, 5], [("[0]", 4), ("[1]", 5)]),
        ((4,), [("[0]", 4)]),
        (Point(1, 2), [(".x", 1), (".y", 2)]),
        (Spec((1,)), [(".shape", (1,)), (".extra", None)]),
        (Pair(1), [(".left", 1), (".right", None)]),
        ([], []),
        ("text", None),
        (Leaf, None),
        ({1, 2}, None),
        (np.arange(2), None),
    ],
)
def test_parts(value, expected):
    assert parts(value) == expected


def test_join_path():
    assert join_path("", "[2]") == "[2]"
    assert join_path("a", ".b") == "a.b"


@pytest.mark.parametrize(
    "value",
    [
        [1, [2]],
        {"a": [1]},
        (1, [2]),
        Point(1, [2]),
        Counter([1]),
        Pair([1]),
        Spec((1,), extra=[2]),
        {"a": {1, 2}},
        np.arange(3),
        Plain([1]),
        collections.OrderedDict(a=[1]),
        collections.deque([1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_is_copied(value):
    copied = copy_value(value)
    assert copied is not value
    assert type(copied) is type(value)
    assert values_equal(copied, value)


def test_the_copy_is_deep():
    inner = [1]
    for value in ([inner], {"a": inner}, Point(1, inner), Spec((), inner), Pair(inner)):
        copied = copy_value(value)
        inner.append(2)
        assert not values_equal(copied, value)


def test_configs_in_records_are_copied():
    leaf = Leaf()
    for value in (Point(1, leaf), Spec((), leaf), Pair(leaf), [(leaf,)]):
        copied = copy_value(value)
        leaf.x += 1
        assert not values_equal(copied, value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        None,
        Colour.RED,
        len,
        Leaf,
        Plain(1).__init__,
        jnp.float32,
        Spec((1, 2)),
        jax.sharding.PartitionSpec("data"),
        object(),
        threading.Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_change_or_be_copied_is_shared(value):
    assert copy_value(value) is value


def test_arrays_on_devices_are_shared():
    array = jnp.arange(3)
    assert copy_value([array])[0] is array


def test_a_record_that_cannot_be_copied_is_shared():
    @dataclasses.dataclass
    class Stubborn:
        values: list

        def __reduce_ex__(self, protocol):
            raise TypeError("no copies")

    value = Stubborn([1])
    assert copy_value(value) is value


def test_replace_part():
    assert replace_part([1, 2], 1, 9) == [1, 9]
    assert replace_part((1, 2), 0, 9) == (9, 2)
    assert replace_part({"a": 1}, "b", 2) == {"a": 1, "b": 2}
    assert replace_part(Point(1, 2), "y", 9) == Point(1, 9)
    assert replace_part(Spec((1,)), "extra", 9) == Spec((1,), 9)
    assert replace_part(Pair(1), "left", 9) == Pair(9)


def double(x, y=0):
    return 2 * x


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1.0, True),
        ([1], [1], True),
        ([1], (1,), False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, collections.OrderedDict(a=1), False),
        (float("nan"), float("nan"), True),
        ([float("nan")], [float("nan")], True),
        (complex(0, float("nan")), complex(0, float("nan")), True),
        (complex(1, float("nan")), complex(0, float("nan")), False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3) + 1, False),
        (np.arange(3), np.zeros((3, 1)), False),
        (np.arange(3), 0, False),
        (Spec((1,)), Spec((1,)), True),
        (Spec((1,), np.arange(2)), Spec((1,), np.arange(2)), True),
        (Pair(1), Pair(2), False),
        ({1, 2}, {2, 1}, True),
        (Plain(1), Plain(1), True),
        (Plain(1), Plain(2), False),
        (double, len, False),
        (lambda: 1, lambda: 1, False),
        (functools.partial(double, 1), functools.partial(double, 1), True),
        (functools.partial(double, 1), functools.partial(double, 2), False),
        (functools.partial(double, y=1), functools.partial(double, y=2), False),
        (jnp.float32, np.float32, True),
        (Leaf(x=1), Leaf(x=1), True),
        (Leaf(x=1), 1, False),
        (np.dtype("float32"), np.dtype("float32"), True),
    ],
)
def test_equality(a, b, equal):
    assert values_equal(a, b) is equal
    assert values_equal(b, a) is equal


def test_what_cannot_be_compared_is_not_equal():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("no")

    assert not values_equal(Odd(), Odd())
