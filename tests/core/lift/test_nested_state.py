"""State that is made and changed in nested transformations equals the Python loops.

Each transformation has a model of what it does to a variable that its body makes and changes: how
the initial value looks outside, and what one call does to a value.
"""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.keys import quick_key
from weft.core import apply, init, lift

KEY = quick_key(0)


class Program(NamedTuple):
    """A function of a scope, and what it does to the variable `n`, as arrays of NumPy."""

    run: Any
    initial: Any
    step: Any


def count(scope):
    n = scope.variable("state", "n", lambda: jnp.float32(10))
    n.value = 2 * n.value + 1


BODY = Program(count, np.float32(10), lambda n: 2 * n + 1)


def repeated(step, times):
    def run(n):
        for _ in range(times):
            n = step(n)
        return n

    return run


def none(result):
    """Drops the result of a transformation, of which the state is what counts."""


def carrying(loop, times):
    return lambda p: Program(loop(p.run), p.initial, repeated(p.step, times))


def by_scan(run, times=2, **options):
    body = lambda s, c, _: (run(s), None)  # noqa: E731
    loop = lift.scan(body, variable_carry="state", length=times, **options)
    return lambda s: loop(s, None, None)[0]


def by_while(times):
    def loop(run):
        body = lambda s, i: (run(s), i + 1)[1]  # noqa: E731
        more = lambda s, i: i < times  # noqa: E731
        return lambda s: none(lift.while_loop(more, body, s, 0, carry_variables="state"))

    return loop


def by_fori(run, lower=0):
    body = lambda i, s, c: (run(s), c)[1]  # noqa: E731
    return lambda s: none(lift.fori_loop(lower, 3, body, s, 0, carry_variables="state"))


def stacked(loop):
    def on(p):
        initial = np.stack([p.initial] * 2)
        return Program(loop(p.run), initial, lambda n: np.stack([p.step(x) for x in n]))

    return on


def by_axis(run):
    loop = lift.scan(lambda s, c, _: (run(s), None), variable_axes={"state": 0}, length=2)
    return lambda s: loop(s, None, None)[0]


def by_vmap(run):
    return lift.vmap(run, {"state": 0}, {}, axis_size=2)


def chosen(taken):
    def on(p):
        run = lambda s: lift.cond(taken, p.run, lambda s: None, s)  # noqa: E731
        return Program(run, p.initial, p.step if taken else lambda n: n)

    return on


def unchanged(lifted):
    return lambda p: Program(lifted(p.run), p.initial, p.step)


def by_grad(run):
    def loss(scope, x):
        run(scope)
        return x

    return lambda s: none(lift.value_and_grad(loss, s, jnp.float32(1)))


def by_vjp(run):
    return lambda s: none(lift.vjp(lambda s, x: (run(s), x)[1], s, jnp.float32(1)))


def by_shard_map(run):
    mesh = Mesh(np.asarray(jax.devices()[:1]), "d")
    spec = PartitionSpec()
    return lift.shard_map(run, {"state": spec}, {}, mesh=mesh, in_specs=spec, out_specs=spec)


LAYERS = {
    "scan": carrying(by_scan, 2),
    "scan backwards": carrying(lambda run: by_scan(run, 2, reverse=True, unroll=2), 2),
    "scan of none": carrying(lambda run: by_scan(run, 0), 0),
    "while": carrying(by_while(2), 2),
    "while of none": carrying(by_while(0), 0),
    "fori": carrying(by_fori, 3),
    "fori of unknown length": carrying(lambda run: by_fori(run, jnp.int32(0)), 3),
    "axis": stacked(by_axis),
    "vmap": stacked(by_vmap),
    "taken": chosen(True),
    "not taken": chosen(False),
    "jit": unchanged(lift.jit),
    "remat": unchanged(lift.remat),
    "grad": unchanged(by_grad),
    "vjp": unchanged(by_vjp),
    "shard_map": unchanged(by_shard_map),
    "checkify": unchanged(lambda run: lambda s: lift.checkify(run)(s)[1]),
}
OUTER = ["scan", "scan of none", "while", "fori", "not taken"]


def check(*names):
    program = BODY
    for name in reversed(names):
        program = LAYERS[name](program)
    expected = {"state": {"n": program.step(program.initial)}}
    for made in (apply(program.run, mutable=["state"])({})[1], init(program.run)(KEY)[1]):
        jax.tree.map(np.testing.assert_array_equal, made, expected)
        assert jax.tree.structure(made) == jax.tree.structure(expected)


@pytest.mark.parametrize("inner", LAYERS)
@pytest.mark.parametrize("outer", OUTER)
def test_state_made_and_changed_inside_of_a_transformation_in_a_loop(outer, inner):
    check(outer, inner)


def nestings():
    rng = random.Random(0)
    for depth in (3, 3, 3, 3, 3, 3, 4, 4, 4, 5):
        # What is inside of a gradient or of a shard_map cannot be everything; they are above.
        yield [rng.choice([*LAYERS][:13]) for _ in range(depth)]


@pytest.mark.parametrize("names", list(nestings()), ids=", ".join)
def test_state_made_and_changed_in_deeper_nestings(names):
    check(*names)
