import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft.core import apply, init, lift, nn
from weft.errors import (
    BranchStructureError,
    InvalidRngError,
    RoleError,
    ScopeCollectionNotFound,
    VariableAxisError,
)

KEY = quick_key(0)
RNGS = {"params": KEY, "noise": quick_key(1)}
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def layer(scope, x, _=None):
    return jnp.tanh(nn.dense(scope, x, 3)), x.sum()


def drawing(*draws):
    """Returns a body that draws, for each of `draws`, so many keys of a stream in a scope."""
    traces = []

    def body(scope, carry, _=None):
        traces.append(1)
        for path, stream, n in draws:
            for name in path:
                scope = scope.push(name, reuse=True)
            for _ in range(n):
                carry += jax.random.uniform(scope.make_rng(stream))
        return carry, carry

    return body, traces


def scanned(body, **options):
    options = {"split_rngs": {"params": True, "noise": True}, "length": 2} | options
    return lift.scan(body, **options)


DRAWS = {
    **{f"{n} keys": [((), "noise", n)] for n in (0, 1, 2, 5)},
    "two scopes": [((), "noise", 1), (("a",), "noise", 3), (("b", "c"), "noise", 2)],
    "two streams": [((), "noise", 3), ((), "params", 2), ((), "noise", 1)],
}


AROUND = {
    "jit": lambda loop: lift.jit(loop),
    "remat": lambda loop: lift.remat(loop),
    "vmap": lambda loop: lift.vmap(loop, {}, {True: False}, in_axes=(None, None), axis_size=2),
    "fori_loop": lambda loop: (
        lambda s, c, _: lift.fori_loop(
            0, 3, lambda i, s, c: loop(s, c, None)[0], s, c, split_rngs={True: True}
        )
    ),
    "while_loop": lambda loop: (
        lambda s, c, _: lift.while_loop(
            lambda s, c: c < 9,
            lambda s, c: loop(s, c + 1, None)[0],
            s,
            c,
            split_rngs={True: True},
        )
    ),
    "jit inside": lambda loop: scanned(lift.jit(loop)),
    "cond inside": lambda loop: scanned(
        lambda s, c, _: lift.cond(c > 0, loop, lambda s, c, _: (c, jnp.zeros(2)), s, c, None)
    ),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_body_drawing_keys_is_traced_once_when_nested(around):
    body, traces = drawing(*DRAWS["two scopes"])
    program = around(scanned(body))
    jax.eval_shape(lambda rngs: apply(program)({}, jnp.float32(0), None, rngs=rngs), RNGS)
    assert len(traces) == 1
    traces.clear()
    jax.eval_shape(lambda rngs: init(program)(rngs, jnp.float32(0), None), RNGS)
    assert len(traces) <= 2


def test_body_creating_its_carry_is_traced_twice_in_init():
    draws, traces = drawing(((), "noise", 3))

    def body(scope, carry, _):
        total = scope.variable("state", "total", lambda: jax.random.normal(scope.make_rng()))
        total.value += draws(scope, carry)[0]
        return total.value, None

    loop = scanned(body, variable_carry="state")
    init(loop)(RNGS, jnp.float32(0), None)
    assert len(traces) == 2
    traces.clear()
    apply(loop, mutable=["state"])({"state": {"total": 0.0}}, jnp.float32(0), None, rngs=RNGS)
    assert len(traces) == 1


def test_gradients_through_a_loop_that_draws_several_keys():
    def body(scope, carry, _):
        keep = jax.random.bernoulli(scope.make_rng("noise"), 0.5)
        scale = jax.random.normal(scope.push("a").make_rng("noise"))
        more = jax.random.normal(scope.make_rng("noise"))
        return jnp.where(keep, jnp.sin(carry * scale), carry + more), None

    def loss(x, wrap):
        return apply(scanned(wrap(body)))({}, x, None, rngs=RNGS)[0]

    plain, saved = (
        jax.jit(jax.grad(loss), static_argnums=1)(0.3, wrap) for wrap in (lambda f: f, lift.remat)
    )
    np.testing.assert_allclose(plain, saved, rtol=1e-6)
    low, high = (loss(0.3 + step, lambda f: f) for step in (-0.01, 0.01))
    np.testing.assert_allclose(plain, (high - low) / 0.02, rtol=1e-2)


def test_concrete_key_of_a_loop_is_rejected():
    def body(scope, carry, _):
        with jax.ensure_compile_time_eval():
            return carry, scope.make_rng("noise")

    with pytest.raises(InvalidRngError, match="in the body of a loop, whose keys are known only"):
        apply(scanned(body))({}, 0.0, None, rngs=RNGS)


def test_shared_variables_cannot_be_changed():
    def body(scope, carry):
        scope.put_variable("state", "n", 2 * scope.get_variable("state", "n"))
        return carry, None

    loop = lift.scan(body, variable_broadcast="state", length=3)
    with pytest.raises(RoleError, match="scan: the body returns or changes what is shared"):
        apply(loop, mutable=["state"])({"state": {"n": jnp.ones(())}}, 0.0)


def test_loop_of_no_iterations():
    stack = lift.scan(layer, {"params": 0}, split_rngs={"params": True}, length=0)
    (y, sums), variables = init(stack)(KEY, X, None)
    np.testing.assert_array_equal(y, X)
    assert sums.shape == (0,)
    assert variables["params"]["kernel"].shape == (0, 3, 3)


def test_data_transform_is_applied():
    def double(variable_groups, rng_groups):
        return jax.tree.map(lambda v: 2 * v, variable_groups), rng_groups

    body = lambda scope, c, _: (c + scope.get_variable("params", "w"), None)  # noqa: E731
    loop = lift.scan(body, {"params": 0}, data_transform=double)
    assert apply(loop)({"params": {"w": jnp.ones(3)}}, 0.0, None)[0] == 6


def test_loop_reads_lifted_collections():
    def body(scope, i):
        return i + scope.get_variable("params", "step", jnp.int32(100))

    def f(scope, **kwargs):
        return lift.while_loop(lambda scope, i: i < 9, body, scope, jnp.int32(0), **kwargs)

    variables = {"params": {"step": jnp.int32(4)}}
    assert apply(f)(variables) == 12
    assert apply(f)(variables, broadcast_variables=False) == 100
    writes = lambda scope, i: (scope.put_variable("state", "i", i), i + 1)[1]  # noqa: E731
    g = lambda scope: lift.while_loop(lambda s, i: i < 3, writes, scope, 0)  # noqa: E731
    with pytest.raises(RoleError, match=r"at 'state/i';"):
        apply(g, mutable=["state"])({"state": {"i": 0}})


def test_unlifted_stream_is_missing():
    def body(scope, carry, _):
        return nn.dense(scope, carry, 3), None

    with pytest.raises(Exception, match=r"PRNG stream 'params'.*lift the stream"):
        init(lift.scan(body, {"params": 0}, length=2))(KEY, X, None)
    with pytest.raises(ScopeCollectionNotFound, match="scan does not lift the collection 'params'"):
        init(lift.scan(body, length=2))(KEY, X, None)


BRANCH_KEY = quick_key(0)


def draw(scope, x):
    return x + jax.random.uniform(scope.make_rng("noise"))


def draw_twice(scope, x):
    return draw(scope, draw(scope, x))


def test_branches_start_with_the_same_keys():
    def f(scope, taken):
        chosen = lift.cond(taken, draw, draw, scope, 0.0)
        return chosen, draw(scope, 0.0)

    rngs = {"noise": BRANCH_KEY}
    assert apply(f)({}, True, rngs=rngs) == apply(f)({}, False, rngs=rngs)


def test_counter_becomes_the_larger_one():
    def f(scope, index):
        lift.switch(index, [draw, draw_twice, lambda scope, x: x], scope, 0.0)
        return draw(scope, 0.0)

    def third(scope):
        draw_twice(scope, 0.0)
        return draw(scope, 0.0)

    rngs = {"noise": BRANCH_KEY}
    expected = apply(third)({}, rngs=rngs)
    assert [apply(f)({}, i, rngs=rngs) == expected for i in range(3)] == [True] * 3


@pytest.mark.parametrize("index", [0, 1])
def test_branches_read_lifted_state(index):
    def branch(scope, x):
        return x * scope.get_variable("params", "w", 1.0), scope.has_rng("noise")

    def f(scope):
        return lift.switch(index, [branch, branch], scope, 3.0)

    variables = {"params": {"w": 2.0}}
    assert apply(f)(variables, rngs={"noise": BRANCH_KEY}) == (6, True)

    def g(scope):
        return lift.switch(index, [branch, branch], scope, 3.0, variables=False, rngs=False)

    assert apply(g)(variables, rngs={"noise": BRANCH_KEY}) == (3, False)


def test_branches_must_match():
    def f(scope, taken):
        def changes(scope):
            scope.put_variable("state", "n", jnp.zeros(2))

        return lift.cond(taken, changes, lambda scope: None, scope)

    with pytest.raises(BranchStructureError, match=r"'state/n' is float32\[2\] in true_fun"):
        apply(f, mutable=["state"])({"state": {"n": jnp.zeros(3)}}, True)


@pytest.mark.parametrize("which", ["both", "two of three"])
@pytest.mark.parametrize("offset", [None, 2.0])
def test_branches_of_a_mapped_index_make_one_shared_parameter(which, offset):
    def make(s, x):
        return x * s.param("c", jax.random.normal)

    def another(s, x):
        first = jax.random.normal if offset is None else lambda key: offset + jax.random.normal(key)
        return x * s.param("c", first)

    branches = [make, another] if which == "both" else [make, lambda s, x: x, another]
    mapped = lift.vmap(
        lambda s, x, i: lift.switch(i, branches, s, x),
        variable_axes={"params": None},
        split_rngs={"params": False},
    )
    args = jax.random.key(0), jnp.ones(2), jnp.arange(2)
    if offset:  # the first value depends on the index
        with pytest.raises(VariableAxisError, match="params/c"):
            init(mapped)(*args)
        return
    y, variables = init(mapped)(*args)
    assert variables["params"]["c"].shape == ()
    assert y[0] == variables["params"]["c"]


def of_array(array):
    return lambda s, x: x * s.param("c", lambda key: jnp.asarray(array)).sum()


def after_a_draw(s, x):
    s.make_rng("params")
    return x * s.param("c", jax.random.normal)


@pytest.mark.parametrize(
    "branches",
    [
        [lambda s, x: x * s.param("c", jax.random.normal), after_a_draw],
        [of_array(np.arange(2000.0)), of_array(np.where(np.arange(2000) == 1000, 7.0, 0.0))],
    ],
    ids=["another key", "an array that is printed in part"],
)
def test_different_initial_values_are_rejected(branches):
    mapped = lift.vmap(
        lambda s, x, i: lift.switch(i, branches, s, x),
        variable_axes={"params": None},
        split_rngs={"params": False},
    )
    with pytest.raises(VariableAxisError, match="params/c"):
        init(mapped)(jax.random.key(0), jnp.ones(2), jnp.arange(2))
