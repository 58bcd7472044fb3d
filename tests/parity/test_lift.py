"""Lifted transformations: the same programs on Flax and on Weft, with the same bits."""

import flax.core
import flax.core.lift
import flax.core.meta
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft.core
import weft.core.lift
import weft.core.meta
from tests.keys import quick_key

KEY = quick_key(3)
LIBRARIES = flax.core, weft.core
X = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)


def plain(lib, tree):
    """Boxes as pairs of value and names, so that trees of both libraries compare."""
    return jax.tree.map(
        lambda x: (
            {"value": x.value, "names": "/".join(map(str, x.names))}
            if isinstance(x, lib.meta.Partitioned)
            else x
        ),
        tree,
        is_leaf=lambda x: isinstance(x, lib.meta.Partitioned),
    )


def same(program, jit=jax.jit):
    """Runs a program on both; results and variables must be the same, keys bit for bit.

    Both are one JAX program, which is compiled much faster than one for each operation.
    """
    results = jit(lambda: [program(lib, lib.lift) for lib in LIBRARIES])()
    theirs, ours = map(plain, LIBRARIES, results)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        if isinstance(a, str):
            assert a == b
            continue
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def draws(scope):
    """Keys of the scope itself and of one below, as numbers."""
    keys = scope.make_rng("params"), scope.push("below", reuse=True).make_rng("noise")
    return jax.tree.map(jax.random.key_data, keys)


def body(scope, x, boxes=None):
    """Parameters, state and keys; `boxes` is a library's Partitioned."""
    make = jax.random.normal
    if boxes is not None:
        make = lambda key, shape: boxes(jax.random.normal(key, shape), ("in", "out"))  # noqa: E731
    kernel = scope.param("kernel", make, (3, 3))
    bias = scope.push("inner").param("bias", jax.random.normal, (3,))
    calls = scope.variable("state", "calls", lambda: jnp.zeros(()))
    if scope.is_mutable_collection("state"):
        calls.value = calls.value + 1.0
    return jnp.tanh(x @ kernel + jnp.broadcast_to(bias, x.shape)) + 0 * sum(
        k.sum() for k in draws(scope)
    ), draws(scope)


def around(lib, fn, key=quick_key):
    """Initializes and applies `fn` in a scope that draws keys before and after it."""

    def model(scope, x):
        scope = scope.push("layer")
        before = draws(scope)
        return fn(scope, x), before, draws(scope)

    rngs = {"params": key(3), "noise": key(5)}
    initialized, variables = lib.init(model)(rngs, X)
    applied = lib.apply(model, mutable=["state"])(variables, X, rngs=rngs)
    return initialized, variables, applied


@pytest.mark.parametrize("name", ["remat", "checkpoint"])
def test_remat(name):
    same(lambda lib, lift: around(lib, getattr(lift, name)(body)))


@pytest.mark.parametrize("key", [jax.random.PRNGKey, jax.random.key])
def test_one_operation_at_a_time_with_keys_of_jax(key):
    same(lambda lib, lift: around(lib, lift.remat(body), key), jit=lambda f: f)


@pytest.mark.parametrize("params", [0, 1, None])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("in_axes", [0, 1, None])
def test_vmap(params, split, in_axes):
    def program(lib, lift):
        mapped = lift.vmap(
            lambda scope, x: body(scope, x if x.shape == (3,) else jnp.ones(3)),
            variable_axes={"params": params, "state": 0},
            split_rngs={"params": split and params is not None, "noise": split},
            in_axes=in_axes,
            axis_size=3 if in_axes == 1 else 2,
        )
        return around(lib, mapped)

    same(program)


@settings(deadline=None, max_examples=8)
@given(
    params=st.sampled_from([0, 1, "broadcast"]),
    state=st.sampled_from(["carry", 0]),
    split=st.booleans(),
    length=st.integers(1, 3),
    reverse=st.booleans(),
    unroll=st.integers(1, 2),
)
def test_scan(params, state, split, length, reverse, unroll):
    def program(lib, lift):
        axes = {} if params == "broadcast" else {"params": params}
        axes |= {"state": 0} if state == 0 else {}

        def loop(scope, x):
            if state == "carry":  # in Flax it has to be there before
                scope.variable("state", "calls", lambda: jnp.zeros(()))
            scanned = lift.scan(
                body,
                variable_axes=axes,
                variable_broadcast="params" if params == "broadcast" else False,
                variable_carry="state" if state == "carry" else False,
                split_rngs={"params": split and params != "broadcast", "noise": split},
                length=length,
                reverse=reverse,
                unroll=unroll,
            )
            return scanned(scope, x)

        return around(lib, loop)

    same(program)


def test_scan_without_the_check_of_constants():
    def program(lib, lift):
        return around(
            lib,
            lift.scan(
                body,
                variable_axes={"params": 0, "state": 0},
                split_rngs={"params": True, "noise": True},
                length=2,
                check_constancy_invariants=False,
            ),
        )

    same(program)


NUMBERS_OF_DRAWS = st.lists(
    st.tuples(*[st.integers(0, 2)] * 3, st.sampled_from(["scan", "remat", "vmap"])),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=8)
@given(loops=NUMBERS_OF_DRAWS, split=st.booleans())
def test_scans_that_draw_any_number_of_keys(loops, split):
    """In nested scans: keys before the inner loop, below it, and after it."""

    def program(lib, lift):
        rngs = {"params": split, "noise": split}

        def drawing(before, below, after, inner):
            def f(scope, x):
                keys = [scope.make_rng("noise") for _ in range(before)]
                result = inner(scope, x)
                a = scope.push("a", reuse=True)
                keys += [a.make_rng("noise") for _ in range(below)]
                return result, keys, [scope.make_rng("params") for _ in range(after)]

            return f

        f = lambda scope, x: draws(scope)  # noqa: E731
        for before, below, after, layer in loops:
            f = drawing(before, below, after, f)
            if layer == "remat":
                f = lift.remat(f)
            if layer == "vmap":
                f = lift.vmap(f, {}, {True: False}, in_axes=None, axis_size=2)
            loop = lift.scan(lambda s, c, _, f=f: (c, f(s, c)), split_rngs=rngs, length=2)
            f = lambda scope, x, loop=loop: loop(scope, x, None)[1]  # noqa: E731
        return around(lib, f)

    same(program)


@pytest.mark.parametrize("lengths", [(2,), (2, 2)])
def test_remat_scan(lengths):
    def program(lib, lift):
        loop = lift.remat_scan(
            lambda scope, x: body(scope, x)[0],
            lengths,
            variable_axes={"params": 0, "state": 0},
            split_rngs={"params": True, "noise": True},
        )
        return around(lib, loop)

    same(program)


@pytest.mark.parametrize("split", [True, False])
def test_while_loop(split):
    def program(lib, lift):
        def loop(scope, x):
            scope.variable("state", "calls", lambda: jnp.zeros(()))

            def step(scope, state):
                i, total, keys = state
                calls = scope.variable("state", "calls", lambda: None)
                calls.value = calls.value + 1.0
                drawn = jnp.stack(draws(scope))
                return i + 1, total + calls.value, keys.at[i].set(drawn)

            return lift.while_loop(
                lambda scope, state: state[0] < 3,
                step,
                scope,
                (0, 0.0, jnp.zeros((3, 2, 1), jnp.uint32)),
                carry_variables="state",
                split_rngs={"params": split, "noise": split},
            )

        return around(lib, loop)

    same(program)


@pytest.mark.parametrize("taken", [0, 1])
def test_branches(taken):
    # Without keys: in Flax the branches share their counters, which is meant to differ.
    def program(lib, lift):
        def changes(factor):
            def branch(scope, x):
                calls = scope.variable("state", "calls", lambda: None)
                calls.value = factor * calls.value
                return x * scope.param("w", lambda key: None)

            return branch

        def model(scope, x):
            y = lift.switch(taken, [changes(2.0), changes(3.0)], scope, x)
            unlifted = lift.cond(
                taken == 0,
                lambda s, x: x + s.has_variable("state", "calls"),
                lambda s, x: -x,
                scope,
                x,
                variables="params",
            )
            return y, unlifted

        variables = {"params": {"w": jnp.float32(5)}, "state": {"calls": jnp.float32(1)}}
        return lib.apply(model, mutable=["state"])(variables, X)

    same(program)


def test_derivatives():
    def program(lib, lift):
        def by_vjp(scope, x):
            y, pullback, aux = lift.vjp(
                lambda s, x: ((b := body(s, x))[0].sum(), b[1]), scope, x, has_aux=True
            )
            return y, pullback(1.0), aux

        def by_grad(scope, x):
            return lift.value_and_grad(lambda s, x: body(s, x)[0].sum(), scope, x)

        def by_jvp(scope, x):
            if not scope.has_variable("params", "kernel"):
                body(scope.rewound(), x)
            tangents = jax.tree.map(jnp.ones_like, dict(scope.variables()["params"]))
            f = lambda s, x: body(s, x)[0]  # noqa: E731
            return lift.jvp(f, scope.rewound(), (x,), (x,), {"params": tangents})

        return [around(lib, f) for f in (by_vjp, by_grad, by_jvp)]

    same(program)


def test_custom_vjp():
    def program(lib, lift):
        def forward(scope, x):
            return lift.vjp(lambda s, x: body(s, x)[0], scope, x)

        def backward(pullback, cotangent):
            params, *rest = pullback(cotangent)
            return jax.tree.map(jnp.sign, params), *rest

        f = lift.custom_vjp(lambda s, x: body(s, x)[0], forward, backward)
        rngs = {"params": KEY, "noise": KEY}
        _, variables = lib.init(f)(rngs, X)
        state = {"state": variables["state"]}
        return variables, jax.grad(
            lambda params: lib.apply(f)({"params": params, **state}, X, rngs=rngs).sum()
        )(variables["params"])

    same(program)


@pytest.mark.parametrize("options", [{"init": True}, {"mutable": True}])
def test_map_variables(options):
    def program(lib, lift):
        double = lambda tree: jax.tree.map(lambda v: 2 * v, tree)  # noqa: E731
        half = lambda tree: jax.tree.map(lambda v: v / 2, tree)  # noqa: E731
        mapped = lift.map_variables(body, "params", double, half, **options)
        rngs = {"params": KEY, "noise": KEY}
        y, variables = lib.init(mapped)(rngs, X)
        kept = lift.map_variables(body, "params", double)
        again = lib.apply(mapped)(variables, X, rngs=rngs)
        return y, variables, again, lib.apply(kept)(variables, X, rngs=rngs)

    same(program)


def test_swap_collection():
    def program(lib, lift):
        def f(scope, x):
            scope.put_variable("a", "x", scope.get_variable("a", "x") + x)
            return scope.get_variable("b", "y")

        swapped = lib.apply(lift.swap_collection(f, "a", "b"), mutable=["a", "b"])
        return swapped({"a": {"y": 1.0}, "b": {"x": X}}, X)

    same(program)


def test_pack_of_several_scopes():
    def program(lib, lift):
        def halved(scope_fn, repack_fn, variable_groups, rng_groups, x):
            params, rest = variable_groups
            params = jax.tree.map(lambda v: v / 2, params)
            scopes = scope_fn((params, rest), rng_groups)
            return [body(s.push("twin"), x) for s in scopes], repack_fn(scopes)

        def f(scope, x):
            packed = lift.pack(halved, ("params", True), (True,), (True,))
            return packed((scope.push("a"), scope.push("b")), x)

        return around(lib, f)

    same(program)


LAYERS = {
    "vmap": lambda lift, f, names: lift.vmap(
        f,
        variable_axes={"params": 0, "state": 0},
        split_rngs={"params": True, "noise": True},
        in_axes=None,
        axis_size=2,
        metadata_params=names,
    ),
    "scan": lambda lift, f, names: (
        lambda scope, x: lift.scan(
            lambda scope, x: (x, f(scope, x)),
            variable_axes={"params": 1, "state": 0},
            split_rngs={"params": True, "noise": False},
            length=2,
            metadata_params=names,
        )(scope, x)[1]
    ),
    "remat": lambda lift, f, names: lift.remat(f),
}


@settings(deadline=None, max_examples=8)
@given(
    nesting=st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=3),
    boxed=st.booleans(),
)
def test_nestings(nesting, boxed):
    def program(lib, lift):
        boxes = lib.meta.Partitioned if boxed else None
        f = lambda scope, x: body(scope, x, boxes)  # noqa: E731
        for i, name in enumerate(nesting):
            f = LAYERS[name](lift, f, {"partition_name": f"axis{i}"})
        return around(lib, f)

    same(program)


FILTERS = {
    "a name": lambda lib: "params",
    "names": lambda lib: ("params", "state"),
    "everything": lambda lib: True,
    "all but one": lambda lib: lib.DenyList("state"),
    "all but several": lambda lib: lib.DenyList(("state", "other")),
    "nothing": lambda lib: False,
}


@settings(deadline=None, max_examples=10)
@given(
    first=st.sampled_from(sorted(FILTERS)),
    axis=st.sampled_from([0, 1]),
    rngs=st.sampled_from(sorted(FILTERS)),
)
def test_filters(first, axis, rngs):
    """A collection is in the first filter that matches, and in no other."""

    def program(lib, lift):
        mapped = lift.vmap(
            lambda scope, x: {
                "params": scope.get_variable("params", "w"),
                "state": scope.get_variable("state", "v"),
                "other": scope.get_variable("other", "u"),
                "key": scope.make_rng("noise") if scope.has_rng("noise") else 0,
                "x": x,
            },
            variable_axes={FILTERS[first](lib): axis, True: None},
            split_rngs={FILTERS[rngs](lib): True},
            axis_size=3,
        )
        square = jnp.arange(9.0).reshape(3, 3)
        variables = {"params": {"w": square}, "state": {"v": 2 * square}, "other": {"u": square}}
        return lib.apply(mapped)(variables, square, rngs={"noise": KEY, "params": KEY})

    same(program)
