import array
import collections
import copy
import dataclasses
import enum
import functools
import resource
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.lifting.counting import BOXES, TICKS, Box, Tick
from weft.lifting import CARRY, scan
from weft.lifting.trace_cache import (
    LazyCached,
    cached_for_equal_functions,
    value_key,
    with_large_frame,
)

FACTOR = 2


def cached_for(fn):
    """Returns the object shared by equal functions."""
    return cached_for_equal_functions(fn, object)


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
def test_functions_with_equal_closures_are_equal(value):
    assert cached_for(closure(value)) is cached_for(closure(value))


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
def test_functions_with_other_values_differ(a, b):
    assert cached_for(closure(a)) is not cached_for(closure(b))


@pytest.mark.parametrize(
    "value", [np.ones(2), object(), [1], {"a": 1}, {1}], ids=lambda v: type(v).__name__
)
def test_mutable_values_are_not_shared(value):
    fn = closure(value)
    assert cached_for(fn) is not cached_for(fn)


def test_options_are_compared_by_value():
    fn = closure(1)
    for options in ([1, 2], {"a": 1}, {1, 2}):
        parts = [(fn, options), (fn, type(options)(options))]
        first, second = (cached_for_equal_functions(each, object) for each in parts)
        assert first is second


def test_globals_count(monkeypatch):
    def make():
        return lambda x: x * FACTOR

    before = cached_for(make())
    assert cached_for(make()) is before
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert cached_for(make()) is not before


def test_defaults_and_partial_arguments_differ():
    def make(default):
        return lambda x, y=default: x + y

    assert cached_for(make(1)) is cached_for(make(1))
    assert cached_for(make(1)) is not cached_for(make(2))
    fn = closure(1)
    assert cached_for(functools.partial(fn, 1)) is cached_for(functools.partial(fn, 1))
    assert cached_for(functools.partial(fn, 1)) is not cached_for(functools.partial(fn, x=1))


def test_function_may_call_itself():
    def make():
        def count(n):
            return 0 if n == 0 else 1 + count(n - 1)

        return count

    assert cached_for(make()) is cached_for(make())


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


def test_function_attributes_differ():
    def scaled(scale):
        def fn(x):
            return x * fn.scale

        fn.scale = scale
        return fn

    assert cached_for(scaled(2)) is cached_for(scaled(2))
    assert cached_for(scaled(2)) is not cached_for(scaled(3))


def test_function_is_keyed_by_state_at_first_call():
    def late():
        factor = 1

        def fn(x):
            return x * factor

        def change(value):
            nonlocal factor
            factor = value

        return fn, change

    fn, change = late()
    shared = LazyCached(fn, object)
    change(5)
    again, change_again = late()
    assert LazyCached(again, object).value is not shared.value
    change_again(5)
    assert LazyCached(again, object).value is shared.value


@pytest.mark.parametrize(
    "make",
    [
        optax.identity,
        optax.set_to_zero,
        lambda: optax.adam(1e-3),
        lambda: optax.sgd(optax.linear_schedule(1.0, 0.1, 10)),
    ],
    ids=["identity", "zero", "adam", "schedule"],
)
def test_library_closures_are_equal(make):
    assert value_key(make()) == value_key(make()) != value_key(optax.scale(2.0))
    assert value_key(optax.identity()) != value_key(optax.set_to_zero())


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


def test_function_writing_to_its_closure_is_unique():
    def make(k):
        n = 0

        def counted(x):
            nonlocal n
            n += 1
            return x * k

        def inside(x):
            def add():
                nonlocal x
                x += k

            add()
            return x

        def calls(x):
            return counted(x)

        return counted, inside, calls

    a, b = make(1), make(1)
    assert [value_key(f) == value_key(g) for f, g in zip(a, b, strict=True)] == [False, True, False]
    assert all(value_key(f) == value_key(f) for f in a)


class Equal:
    """Compared by value, and without a hash."""

    def __init__(self, x):
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


CALLS = 2_000


def pages_in(fn):
    """Returns how many pages of memory the process is given while `fn` runs."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fn()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def below(depth, fn):
    return fn() if depth == 0 else below(depth - 1, fn)


def many_calls():
    for _ in range(CALLS):
        below(3, int)


def test_deep_calls_stay_fast():
    # Where a piece of Python's stack is full, each call is given a new one, which is a new page.
    depths = range(200)
    without = [below(depth, lambda: pages_in(many_calls)) for depth in depths]
    with_it = [below(depth, lambda: with_large_frame(pages_in, many_calls)) for depth in depths]
    assert max(without) >= CALLS, (
        "Python has fixed this: weft.lifting.trace_cache is no longer needed"
    )
    assert max(with_it) < CALLS / 10


def test_arguments_results_and_errors_pass():
    assert with_large_frame(lambda *args, **kwargs: (args, kwargs), 1, fn=2) == ((1,), {"fn": 2})
    with pytest.raises(ZeroDivisionError):
        with_large_frame(lambda: 1 / 0)


def test_deep_recursion_stays_fast():
    def inner():
        return below(900, lambda: pages_in(many_calls))

    assert with_large_frame(inner) < CALLS / 10


def test_equal_functions_share_a_trace_eagerly():
    traces = []

    def run(scale):
        def body(carry, x):
            traces.append(1)
            return carry * scale + x, None

        return scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))(0.0, jnp.ones(3))[0]

    assert [float(run(2.0)) for _ in range(2)] == [7, 7]
    assert float(run(3.0)) == 13
    # `traces` can change, so the functions themselves are not equal: only a lifted one is kept.
    loop = scan(BOXES, lambda c, x: (traces.append(1), (c + x, None))[1], in_axes=(CARRY, 0),
                out_axes=(CARRY, None))  # fmt: skip
    traces.clear()
    for _ in range(3):
        loop(0.0, jnp.ones(3))
    assert len(traces) == 1


def test_non_arrays_are_unchanged():
    def body(carry, mode, box):
        assert mode == "add"
        return carry + box.arrays["n"], None

    loop = scan(BOXES, body, in_axes=(CARRY, None, None), out_axes=(CARRY, None), length=3)
    assert loop(0, "add", Box(n=2))[0] == 6


def test_loop_adds_nothing_to_the_outer_trace():
    loop = scan(BOXES, lambda c, x: (c + x, None), in_axes=(CARRY, 0), out_axes=(CARRY, None))
    jaxpr = jax.make_jaxpr(lambda x: loop(0.0, x))(jnp.ones(3))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["scan"]


def test_equal_values_of_different_types_are_not_confused():
    def body(carry, mode):
        return carry + {bool: 1, int: 10, float: 100, set: 1000}[type(mode)], None

    loop = scan(BOXES, body, in_axes=(CARRY, None), out_axes=(CARRY, None), length=1)
    assert [int(loop(0, mode)[0]) for mode in (True, 1, 1.0, {1})] == [1, 10, 100, 1000]


tick = Tick()


def scan_with(body, x):
    return scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))(x, jnp.arange(2.0))[0]


def test_tracers_in_closures_are_inputs_of_a_shared_trace():
    def helped(x, scale):
        @functools.wraps(print)
        def helper(c):
            return c * scale

        def body(c, x, power=2):
            tick()
            return helper(c) + scale**power * x + (body.offset if c.ndim else 0), None

        body.offset = 1
        return scan_with(body, x)

    def by_hand(x, scale):
        for i in range(2):
            x = x * scale + scale**2 * i
        return x

    def both(fn, x):
        return fn(fn(x, x + 1), x * 2)

    def run(fn):
        return jax.jit(jax.value_and_grad(lambda x: both(fn, x)))(jnp.float32(1.5))

    TICKS.clear()
    found = run(helped)
    assert len(TICKS) == 1
    np.testing.assert_allclose(found, run(by_hand), 1e-6)
    assert both(helped, jnp.float32(1.5)) == found[0]  # without tracers
    with jax.checking_leaks():  # JAX caches nothing here
        np.testing.assert_allclose(run(helped), found)


def test_present_values_of_captured_names():
    def run(x):
        def body(c, i):
            return c + scale * i, None

        loop = scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))
        scale = x
        before = loop(x, jnp.arange(2.0))[0]
        scale = 3 * x
        return before, loop(x, jnp.arange(2.0))[0]

    np.testing.assert_allclose(jax.jit(run)(2.0), [4, 8])


def test_tracers_in_functions_that_are_not_shared():
    def run(x):
        total = x

        def body(c, i):
            nonlocal total
            total = x  # a function that assigns such names is equal only to itself
            return (c * x if i is None else c + x * i), None

        def early(c, i):
            return c + later * x, None

        with pytest.raises(NameError, match="later"):
            scan_with(early, x)
        later = None
        return scan_with(body, x)

    assert jax.jit(run)(2.0) == 4
