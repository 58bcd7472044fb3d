"""State that is made inside: in loops and in only some of the branches, with scopes."""

import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft.core import apply, init, lift
from weft.errors import RoleError

KEY = quick_key(0)


def test_initial_value_may_depend_on_the_first_input():
    def body(scope, carry, x):
        first = scope.variable("state", "first", lambda: x)
        return carry + first.value, None

    xs = jnp.asarray([3.0, 4.0, 5.0])
    for reverse, expected in ((False, 9.0), (True, 15.0)):
        loop = lift.scan(body, variable_carry="state", reverse=reverse)
        (result, _), variables = apply(loop, mutable=["state"])({}, 0.0, xs)
        assert (result, variables["state"]["first"]) == (expected, expected / 3)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_state_created_in_one_branch_exists_in_all(taken):
    def makes(name, start):
        def branch(scope):
            value = scope.variable("state", name, lambda: start)
            value.value += 1

        return branch

    def f(scope):
        branches = [makes("a", 1), makes("b", 10), lambda scope: None]
        lift.switch(taken, branches, scope)

    expected = {"a": 1 + (taken == 0), "b": 10 + (taken == 1)}
    assert apply(f, mutable=["state"])({})[1] == {"state": expected}
    assert init(f)(KEY)[1] == {"state": expected}


@pytest.mark.parametrize("step", [1, jnp.float32(1)], ids=["number", "array"])
def test_body_creating_shared_state_cannot_change_it(step):
    def body(scope, carry):
        scope.variable("state", "n", lambda: jnp.zeros(())).value += step
        return carry, None

    loop = lift.scan(body, variable_broadcast="state", length=2)
    with pytest.raises(RoleError, match=r"shared by all iterations .* at 'state/n'"):
        apply(lambda scope: loop(scope, 0.0), mutable=["state"])({})
