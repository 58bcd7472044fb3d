"""Keys of static values."""

import array
import collections
import copy
import dataclasses
import enum
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.lifting.static_keys import value_key


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: Any
    other: Any = None


class Opaque:
    pass


OPAQUE = Opaque()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Settings(1, OPAQUE), Settings(1.0, OPAQUE)),
        (Settings(1, OPAQUE), Settings(True, OPAQUE)),
        ((1, OPAQUE), (1.0, OPAQUE)),
        (frozenset({1, OPAQUE}), frozenset({True, OPAQUE})),
        (np.float32(0.0), np.float32(-0.0)),
        (Opaque(), Opaque()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_but_distinct_values(a, b):
    assert value_key(a) != value_key(b)
    assert value_key(a) == value_key(a)
    assert hash(value_key(a)) == hash(value_key(a))


def test_mutable_values_compare_by_state():
    @dataclasses.dataclass
    class Config:
        scale: float
        xs: list

    class Thing:
        pass

    thing = Thing()
    changes = {
        "list": ([thing], lambda x: x.append(1)),
        "dict": ({"a": thing}, lambda x: x.update(b=1)),
        "set": ({thing}, lambda x: x.add(1)),
        "queue": (collections.deque([1]), lambda x: x.append(1)),
        "namespace": (types.SimpleNamespace(a=1), lambda x: setattr(x, "a", 2)),
        "dataclass": (Config(1.0, []), lambda x: x.xs.append(1)),
    }
    for name, (value, change) in changes.items():
        before = value_key(value)
        assert value_key(copy.copy(value)) == before == value_key(value), name
        change(value)
        assert value_key(value) != before, name
    assert value_key(Config(1.0, [])) == value_key(Config(1.0, [])) != value_key(Config(1, []))


class Equal:
    """Compared by value, and without a hash."""

    def __init__(self, x: Any):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Equal) and self.x == other.x


class Slotted(Equal):
    __slots__ = ("y",)


class Unwritable(Equal):
    """Pickle cannot write it."""

    def __reduce_ex__(self, protocol):
        raise TypeError


STATES = {
    "bytearray": (lambda: bytearray(b"ab"), lambda x: x.append(1)),
    "array": (lambda: array.array("i", [1]), lambda x: x.append(1)),
    "object": (lambda: Equal(1), lambda x: setattr(x, "x", 1.0)),
    "slots": (lambda: Slotted(1), lambda x: setattr(x, "y", 2)),
    "nested": (lambda: Equal([Equal({"a": 1})]), lambda x: x.x[0].x.update(a=True)),
    "counter": (lambda: collections.Counter("a"), lambda x: x.update("a")),
}


@pytest.mark.parametrize(("make", "change"), STATES.values(), ids=STATES)
def test_unhashable_values_compare_by_current_state(make, change):
    x = make()
    before = value_key(x)
    assert before == value_key(make()) and hash(before) == hash(value_key(make()))
    change(x)
    assert value_key(x) != before


def test_cyclic_or_unpicklable_values_use_identity():
    loop, unwritable = Equal(1), Unwritable(1)
    loop.x = [loop]
    assert value_key(loop) == value_key(loop)
    assert value_key(unwritable) == value_key(unwritable) != value_key(Unwritable(1))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Layer:
    def forward(self, x):
        return x


def scaled(x, by):
    return x * by


LAYER = Layer()
ARRAY = jnp.ones(2)
SAME = {
    "plain": lambda: (1, "a", None, 1.5, b"b"),
    "nested": lambda: {"a": [1, {2}], "b": frozenset({Colour.RED})},
    "function": lambda: scaled,
    "function of JAX": lambda: jnp.exp,
    "partial": lambda: functools.partial(scaled, by=[2]),
    "method": lambda: LAYER.forward,
    "array": lambda: ARRAY,
    "sharding": lambda: jax.sharding.PartitionSpec("x"),
    "dtype": lambda: np.dtype("float32"),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_equal_values_have_equal_keys(make):
    assert value_key(make()) == value_key(make())
    assert hash(value_key(make())) == hash(value_key(make()))


DIFFERENT = {
    "types": (1, True),
    "types inside": ([1], [1.0]),
    "zeros": (0.0, -0.0),
    "functions of equal code": (lambda x: x, lambda x: x),
    "arguments of partials": (functools.partial(scaled, by=1), functools.partial(scaled, by=2)),
    "methods of different objects": (Layer().forward, Layer().forward),
    "arrays": (jnp.ones(2), jnp.ones(2)),
    "members": (Colour.RED, Colour.BLUE),
}


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_values_have_different_keys(a, b):
    assert value_key(a) != value_key(b)
