import enum
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from weft.lifting.functions import shared_by_equal_functions

FACTOR = 2


def made_for(fn):
    """What equal functions share."""
    return shared_by_equal_functions(fn, object)


def closure(value):
    def fn(x):
        return x * value

    return fn


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


ARRAY = jnp.ones(2)


@pytest.mark.parametrize(
    "value",
    [1, "a", None, 1.5, (1, "b"), frozenset({1, 2}), Colour.RED, jnp.exp, closure(3), ARRAY],
    ids=lambda value: type(value).__name__,
)
def test_functions_made_anew_with_equal_values_are_the_same(value):
    assert made_for(closure(value)) is made_for(closure(value))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        ((1,), (2,)),
        (Colour.RED, Colour.BLUE),
        (jnp.exp, jnp.sin),
        (closure(3), closure(4)),
        (jnp.ones(2), jnp.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_functions_with_other_values_are_not(a, b):
    assert made_for(closure(a)) is not made_for(closure(b))


@pytest.mark.parametrize(
    "value", [np.ones(2), object(), [1], {"a": 1}, {1}], ids=lambda v: type(v).__name__
)
def test_what_can_change_unseen_is_not_shared(value):
    fn = closure(value)
    assert made_for(fn) is not made_for(fn)


def test_options_are_compared_by_value():
    fn = closure(1)
    for options in ([1, 2], {"a": 1}, {1, 2}):
        parts = [(fn, options), (fn, type(options)(options))]
        first, second = (shared_by_equal_functions(each, object) for each in parts)
        assert first is second


def test_globals_count(monkeypatch):
    def make():
        return lambda x: x * FACTOR

    before = made_for(make())
    assert made_for(make()) is before
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert made_for(make()) is not before


def test_defaults_and_partial_arguments_count():
    def make(default):
        return lambda x, y=default: x + y

    assert made_for(make(1)) is made_for(make(1))
    assert made_for(make(1)) is not made_for(make(2))
    fn = closure(1)
    assert made_for(functools.partial(fn, 1)) is made_for(functools.partial(fn, 1))
    assert made_for(functools.partial(fn, 1)) is not made_for(functools.partial(fn, x=1))


def test_a_function_may_call_itself():
    def make():
        def count(n):
            return 0 if n == 0 else 1 + count(n - 1)

        return count

    assert made_for(make()) is made_for(make())
