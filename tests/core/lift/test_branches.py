import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core import apply, init, lift
from weft.errors import BranchStructureError, VariableAxisError

KEY = jax.random.key(0)


def draw(scope, x):
    return x + jax.random.uniform(scope.make_rng("noise"))


def draw_twice(scope, x):
    return draw(scope, draw(scope, x))


def test_every_branch_begins_with_the_same_keys():
    def f(scope, taken):
        chosen = lift.cond(taken, draw, draw, scope, 0.0)
        return chosen, draw(scope, 0.0)

    rngs = {"noise": KEY}
    assert apply(f)({}, True, rngs=rngs) == apply(f)({}, False, rngs=rngs)


def test_afterwards_the_counter_is_the_larger_one():
    def f(scope, index):
        lift.switch(index, [draw, draw_twice, lambda scope, x: x], scope, 0.0)
        return draw(scope, 0.0)

    def third(scope):
        draw_twice(scope, 0.0)
        return draw(scope, 0.0)

    rngs = {"noise": KEY}
    expected = apply(third)({}, rngs=rngs)
    assert [apply(f)({}, i, rngs=rngs) == expected for i in range(3)] == [True] * 3


@pytest.mark.parametrize("index", [0, 1])
def test_branches_see_what_is_lifted(index):
    def branch(scope, x):
        return x * scope.get_variable("params", "w", 1.0), scope.has_rng("noise")

    def f(scope):
        return lift.switch(index, [branch, branch], scope, 3.0)

    variables = {"params": {"w": 2.0}}
    assert apply(f)(variables, rngs={"noise": KEY}) == (6, True)

    def g(scope):
        return lift.switch(index, [branch, branch], scope, 3.0, variables=False, rngs=False)

    assert apply(g)(variables, rngs={"noise": KEY}) == (3, False)


def test_each_branch_has_its_own_parameters():
    def makes(name):
        def branch(scope, x):
            return x * scope.push(name).param("w", lambda key: jax.random.uniform(key))

        return branch

    def f(scope, taken, x):
        return lift.cond(taken, makes("a"), makes("b"), scope, x)

    y, variables = init(f)(KEY, True, 2.0)
    assert sorted(variables["params"]) == ["a", "b"]
    assert y == 2 * variables["params"]["a"]["w"]
    assert apply(f)(variables, False, 2.0) == 2 * variables["params"]["b"]["w"]


def test_branches_leave_alike():
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
def test_initial_values_that_differ_are_not_taken_for_one(branches):
    mapped = lift.vmap(
        lambda s, x, i: lift.switch(i, branches, s, x),
        variable_axes={"params": None},
        split_rngs={"params": False},
    )
    with pytest.raises(VariableAxisError, match="params/c"):
        init(mapped)(jax.random.key(0), jnp.ones(2), jnp.arange(2))
