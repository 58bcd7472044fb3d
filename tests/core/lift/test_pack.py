import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft.core import apply, bind
from weft.core.lift.pack import pack
from weft.core.rngs import LazyRng
from weft.errors import (
    InvalidScopeError,
    ModifyScopeVariableError,
    TransformArgumentError,
)

KEY = quick_key(0)
VARIABLES = {"params": {"w": jnp.arange(3.0)}, "state": {"x": 1.0}, "cache": {"y": 2.0}}


def direct(fn, ins=(True,), outs=(True,), rngs=(True,), **options):
    """Returns the identity transformation of `fn(scope, *args)`."""

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        scope = scope_fn(variable_groups, rng_groups)
        return fn(scope, *args, **kwargs), repack_fn(scope)

    return pack(inner, ins, outs, rngs, **options)


def test_groups_follow_the_filters():
    seen = []

    def inner(scope_fn, repack_fn, variable_groups, rng_groups):
        seen.extend([variable_groups, rng_groups])
        scope = scope_fn(variable_groups, rng_groups)
        scope.put_variable("state", "x", 5.0)
        groups = repack_fn(scope)
        seen.append(groups)
        return 0, groups

    packed = pack(inner, (["params", "state"], True), ("cache", True), ("noise", True))
    rngs = {"params": KEY, "noise": jax.random.key(1)}
    _, changed = apply(packed, mutable=["state", "cache"])(VARIABLES, rngs=rngs)
    first, second = seen[0]
    assert [sorted(d) for d in first] == [["params", "state"]]
    assert second == ({"cache": {"y": 2.0}},)
    assert [sorted(d) for group in seen[1] for d in group] == [["noise"], ["params"]]
    assert isinstance(seen[1][0][0]["noise"], LazyRng)
    assert seen[2] == (({"cache": {"y": 2.0}},), ({"state": {"x": 5.0}},))
    assert changed == {"state": {"x": 5.0}, "cache": {"y": 2.0}}


def test_collections_not_returned_are_immutable():
    def write(scope):
        scope.put_variable("state", "x", 3.0)

    message = r"'x' in the scope '/w\(\)' .* not mutable; call apply.*and let w change it"
    with pytest.raises(ModifyScopeVariableError, match=message):
        apply(direct(write, outs=("params",), name="w"), mutable=True)(VARIABLES)
    with pytest.raises(ModifyScopeVariableError, match=message):
        apply(direct(write, name="w"))(VARIABLES)

    def immutable(scope_fn, repack_fn, variable_groups, rng_groups):
        scope = scope_fn(variable_groups, rng_groups, mutable_filter="cache")
        return write(scope), repack_fn(scope)

    with pytest.raises(ModifyScopeVariableError, match="immutable change it"):
        apply(pack(immutable, (True,), (True,), (True,)), mutable=True)(VARIABLES)


def test_arguments_by_name():
    def add(scope, x, y=1):
        return x + y

    message = r"add: it takes no arguments by name, and was given \['y'\]; .*enable_kwargs=True\)"
    with pytest.raises(TransformArgumentError, match=message):
        direct(add, name="add")(bind({}), 1, y=2)
    assert direct(add, enable_kwargs=True)(bind({}), 1, y=2) == 3


def test_function_must_return_a_pair():
    message = "lose: the function returned a int; expected a pair of its result and what repack_fn"
    with pytest.raises(TransformArgumentError, match=message):
        pack(lambda *_: 3, (True,), (True,), (True,), name="lose")(bind({}))


def test_function_without_scope():
    outer = bind(VARIABLES, rngs=KEY, mutable=True)
    counted = bind(VARIABLES, rngs=KEY, mutable=True)
    assert pack(lambda *_: (3, ()), (True,), (True,), (True,))(outer) == 3
    assert outer.variables() == VARIABLES
    assert outer.make_rng() == counted.make_rng()


def test_several_scopes_start_and_end():
    kept = []

    def inner(scope_fn, repack_fn, variable_groups, rng_groups):
        kept.extend(scope_fn(variable_groups, rng_groups) for _ in range(2))
        a, b = (scope.get_variable("state", "x") for scope in kept)
        return a + b, repack_fn(kept[1])

    assert apply(pack(inner, (True,), (True,), (True,)))(VARIABLES) == 2.0
    for scope in kept:
        with pytest.raises(InvalidScopeError, match="'/inner"):
            scope.variables()
