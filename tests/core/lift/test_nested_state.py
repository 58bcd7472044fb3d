"""State that is made and changed in nested transformations equals the Python loops.

Each transformation has a model of what it does to a variable that its body makes and changes: how
the initial value looks outside, and what one call does to a value.
"""

import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.keys import quick_key
from weft.core import apply, init, lift
from weft.core.rngs import LazyRng
from weft.errors import CarryStructureError

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
    """Drops the result of a transformation: the test compares its state."""


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
def test_state_created_and_updated_in_a_transform_in_a_loop(outer, inner):
    check(outer, inner)


def nestings():
    rng = random.Random(0)
    for depth in (3, 3, 3, 3, 3, 3, 4, 4, 4, 5):
        # Not everything nests inside of a gradient or shard_map; these are tested above.
        yield [rng.choice([*LAYERS][:13]) for _ in range(depth)]


@pytest.mark.parametrize("names", list(nestings()), ids=", ".join)
def test_state_created_in_deeper_nestings(names):
    check(*names)


# How often a body is traced, see `weft.lifting.state_creation`.

LOOPS = {"scan", "scan backwards", "scan of none", "while", "while of none", "fori"}
MIXED = ["scan", "while", "fori", "taken", "not taken", "axis"]


@pytest.mark.parametrize(
    ("names", "depth"),
    [
        (names, depth)
        for names in (["scan"], ["while"], ["fori"], ["not taken"], MIXED)
        for depth in (1, 2, 4)
    ]
    + [(MIXED, 6)],
    ids=str,
)
def test_each_loop_carrying_new_state_adds_one_trace(names, depth):
    traces = []

    def body(scope):
        traces.append(1)
        count(scope)

    names = (names * depth)[:depth]
    program = BODY._replace(run=body)
    for name in reversed(names):
        program = LAYERS[name](program)
    most = 1 + sum(name in LOOPS for name in names)

    def run(variables):
        return apply(program.run, mutable=["state"])(variables)[1]

    shapes = jax.eval_shape(lambda: run({}))
    assert len(traces) <= most
    traces.clear()
    jax.eval_shape(lambda: init(program.run)(KEY))
    assert len(traces) <= most
    traces.clear()
    jax.eval_shape(run, shapes)
    assert len(traces) == 1


# Keys of created state.


def drawing(scope, carry, _=None):
    """Draws a key of each of two streams, and makes three variables with others."""
    above = scope.make_rng("noise")
    child = scope.push("child", reuse=True).rewound()
    for name, stream in (("a", "noise"), ("b", "params"), ("c", "noise")):
        child.variable("state", name, lambda s=stream: jax.random.uniform(child.make_rng(s)))
    child.variable("state", "d", lambda: jax.random.uniform(above))
    return carry, None


RNGS = {"params": KEY, "noise": quick_key(1)}


def made_by(program):
    of_init = init(program)(RNGS)[1]["state"]
    of_apply = apply(program, mutable=["state"])({}, rngs=RNGS)[1]["state"]
    jax.tree.map(np.testing.assert_array_equal, of_init, of_apply)
    return of_init


def first_iterations(state, depth):
    return jax.tree.map(lambda x: x[(0,) * depth], state)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("counts_first_run", [True, False])
def test_scan_creates_carry_with_keys_of_first_iteration(split, length, counts_first_run):
    options = {
        "split_rngs": {"params": split, "noise": split},
        "check_constancy_invariants": counts_first_run,
    }

    def program(length, **of_state):
        loop = lift.scan(drawing, length=length, **options, **of_state)
        return lambda s: loop(s, None, None)[0]

    carried = made_by(program(length, variable_carry="state"))
    own = made_by(program(length or 1, variable_axes={"state": 0}))
    jax.tree.map(np.testing.assert_array_equal, carried, first_iterations(own, 1))


@pytest.mark.parametrize("split", [True, False])
def test_while_loop_creates_carry_with_keys_of_first_iteration(split):
    streams = {"params": split, "noise": split}

    def run(scope):
        body = lambda s, i: (drawing(s, None), i + 1)[1]  # noqa: E731
        more = lambda s, i: i < 2  # noqa: E731
        lift.while_loop(more, body, scope, 0, carry_variables="state", split_rngs=streams)

    def first(scope):
        drawing(scope, None)

    rngs = {name: jax.random.fold_in(key, 0) if split else key for name, key in RNGS.items()}
    expected = apply(first, mutable=["state"])({}, rngs=rngs)[1]["state"]
    jax.tree.map(np.testing.assert_array_equal, made_by(run), expected)


def test_state_created_in_a_later_iteration_is_rejected():
    def body(scope, carry, _):
        name = "later" if scope.has_variable("state", "first") else "first"
        scope.variable("state", name, lambda: 1.0)
        return carry, None

    loop = lift.scan(body, variable_carry="state", length=2)
    with pytest.raises(CarryStructureError, match="scan: 'state/later' is made only where"):
        apply(lambda s: loop(s, None, None)[0], mutable=["state"])({})


def test_loop_creating_state_is_debugged_once_for_each_iteration(capfd):
    def body(scope, carry, _):
        x = jnp.float32(3)
        jax.debug.print("first value {}", x)
        scope.variable("state", "n", lambda: 2 * x)
        return lift.cond(True, lambda s: jax.debug.print("n"), lambda s: None, scope), None

    apply(lift.scan(body, variable_carry="state", length=2), mutable=["state"])({}, None, None)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["first value 3.0"] * 2 + ["n"] * 2


def test_each_branch_starts_from_its_own_initial_value():
    def makes(start):
        def branch(scope):
            n = scope.variable("state", "n", lambda: jnp.float32(start))
            n.value += 1

        return branch

    def run(scope, index):
        lift.switch(index, [makes(1), makes(10), lambda scope: None], scope)

    made = [float(apply(run, mutable=["state"])({}, i)[1]["state"]["n"]) for i in range(3)]
    assert made == [2, 11, 1]


def around(loop: str, times: int = 2) -> Any:
    """Returns a function in a loop without an axis for its state; what it returns is the carry."""
    carried = {"carry_variables": "state", "split_rngs": {True: False}}
    more = lambda s, c: c[0] < times  # noqa: E731
    of_scan = {"variable_broadcast": "params", "variable_carry": "state"}
    of_scan |= {"split_rngs": {True: False}, "length": times}
    python_bounds = (0, times), (jnp.int32(0), jnp.int32(times))

    def run(fn):
        body = lambda s, c: (c[0] + 1, fn(s))  # noqa: E731
        if loop == "while":
            return lambda s: lift.while_loop(more, body, s, (0, 0.0), **carried)[1]
        if loop in ("fori", "fori of dynamic length"):
            bounds = python_bounds[loop != "fori"]
            return lambda s: lift.fori_loop(*bounds, lambda i, s, c: fn(s), s, 0.0, **carried)
        by = {"check_constancy_invariants": loop == "scan"}
        if loop == "scan that carries params":
            by |= {"variable_broadcast": False, "variable_carry": ["params", "state"]}
        scanned = lift.scan(lambda s, c, _: (fn(s), None), **{**of_scan, **by})
        return lambda s: scanned(s, 0.0, None)[0]

    return run


def as_param(scope, name):
    return scope.param(name, jax.random.uniform)


def as_key(scope, name):
    return jax.random.uniform(scope.make_rng("params"))


LOOPS = ["while", "fori", "fori of dynamic length"]
LOOPS += ["scan", "scan that counts_first_run nothing", "scan that carries params"]


@functools.cache
def drawn():
    """Returns numbers made with the first keys of the root scope."""
    return [jax.random.uniform(LazyRng(KEY).at(n).as_jax_rng()).item() for n in range(1, 40)]


@pytest.mark.parametrize(
    ("loops", "order"),
    [([loop], order) for loop in ("while", "scan") for order in ("mk", "km", "kmk", "mkkk")]
    + [([loop], "mkm") for loop in LOOPS]
    + [(loops, order) for loops in (LOOPS[:2], LOOPS[2::3]) for order in ("kmk", "mkm")],
    ids=str,
)
def test_draws_are_distinct_if_a_loop_creates_state(loops, order):
    """In the body m makes a parameter with a key, k draws one by itself."""

    def looped(scope):
        for i, what in enumerate(order):
            if what == "m":
                as_param(scope, f"m{i}")
            else:
                scope.put_variable("state", f"k{i}", as_key(scope, ""))
        return 0.0

    for loop in loops:
        looped = around(loop)(looped)

    def program(scope):
        looped(scope)
        return as_key(scope, "")

    last, variables = init(program)({"params": KEY})
    of_loop = [x.item() for of in variables.values() for x in of.values()]
    numbers = [drawn().index(x) + 1 for x in of_loop]
    assert len(set(numbers)) == len(order)
    assert drawn().index(last.item()) + 1 == max(numbers) + 1


@pytest.mark.parametrize("loop", ["while", "scan", "scan that carries params"])
def test_loop_creating_state_draws_the_same_keys_eagerly(loop):
    def body(scope):
        as_param(scope, "made")
        scope.put_variable("state", "drawn", as_key(scope, ""))
        return 0.0

    def program(scope):
        around(loop)(body)(scope)
        return as_key(scope, "")

    keys = {"params": jax.random.key(0)}
    right = init(program)(keys)
    with jax.disable_jit():
        found = init(program)(keys)
    assert jax.tree.map(float, found) == jax.tree.map(float, right)
