"""State that is made inside: in loops and in only some of the branches, with scopes."""

import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft.core import apply, init, lift
from weft.errors import RoleError

KEY = quick_key(0)


def count(scope, carry):
    calls = scope.variable("state", "calls", lambda: 10)
    calls.value += 1
    return carry + calls.value


def by_python(n):
    def f(scope, carry):
        for _ in range(n):
            carry = count(scope.rewound(), carry)
        return carry

    return apply(f, mutable=["state"])({}, 0)


def by_scan(n):
    def f(scope, carry):
        body = lambda s, c: (count(s, c), None)  # noqa: E731
        return lift.scan(body, variable_carry="state", length=n)(scope, carry)[0]

    return f


def by_while(n):
    def f(scope, carry):
        body = lambda s, c: (c[0] + 1, count(s, c[1]))  # noqa: E731
        more = lambda s, c: c[0] < n  # noqa: E731
        return lift.while_loop(more, body, scope, (0, carry), carry_variables="state")[1]

    return f


def by_fori(n):
    def f(scope, carry):
        body = lambda i, s, c: count(s, c)  # noqa: E731
        return lift.fori_loop(0, n, body, scope, carry, carry_variables="state")

    return f


@pytest.mark.parametrize("loop", [by_scan, by_while, by_fori])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("lifted", [lambda f: f, lift.remat, lift.jit], ids=["", "remat", "jit"])
def test_variables_created_in_a_body_match_python_loop(loop, n, lifted):
    result, variables = apply(lifted(loop(n)), mutable=["state"])({}, 0)
    expected, by_hand = by_python(max(n, 1)) if n else (0, {"state": {"calls": 10}})
    assert result == expected
    assert variables == by_hand
    assert init(lifted(loop(n)))(KEY, 0) == (result, variables)


def test_nested_loops_create_state_once():
    def outer(scope, carry):
        body = lambda s, c: (lift.remat(by_scan(2))(s, c), None)  # noqa: E731
        return lift.scan(body, variable_carry="state", length=3)(scope, carry)[0]

    assert apply(outer, mutable=["state"])({}, 0) == by_python(6)


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


def test_failure_in_the_body_leaves_the_scope():
    def body(scope, carry):
        scope.variable("state", "calls", lambda: 10)
        raise KeyError("no")

    def f(scope):
        with pytest.raises(KeyError):
            lift.scan(body, variable_carry="state", length=2)(scope, 0)
        return scope.has_variable("state", "calls")

    assert apply(f, mutable=["state"])({}) == (False, {})


@pytest.mark.parametrize("step", [1, jnp.float32(1)], ids=["number", "array"])
def test_body_creating_shared_state_cannot_change_it(step):
    def body(scope, carry):
        scope.variable("state", "n", lambda: jnp.zeros(())).value += step
        return carry, None

    loop = lift.scan(body, variable_broadcast="state", length=2)
    with pytest.raises(RoleError, match=r"shared by all iterations .* at 'state/n'"):
        apply(lambda scope: loop(scope, 0.0), mutable=["state"])({})
