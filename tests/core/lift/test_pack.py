import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft.core import apply, bind, init
from weft.core.lift.pack import pack
from weft.core.rngs import LazyRng
from weft.errors import (
    InvalidRngError,
    InvalidScopeError,
    ModifyScopeVariableError,
    RoleError,
    ScopeCollectionNotFound,
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


def test_variables_can_be_transformed():
    def transposed(scope_fn, repack_fn, variable_groups, rng_groups, x):
        target, rest = variable_groups
        target = jax.tree.map(lambda w: w.T, target)
        scope = scope_fn((target, rest), rng_groups)
        y = x @ scope.param("w", jax.nn.initializers.ones, (3, 2))
        target, rest = repack_fn(scope)
        return y, (jax.tree.map(lambda w: w.T, target), rest)

    packed = pack(transposed, ("params", True), ("params", True), (True,))
    y, variables = init(packed)(KEY, jnp.ones(3))
    assert variables["params"]["w"].shape == (2, 3)
    assert (apply(packed)(variables, jnp.ones(3)) == y).all()


def test_several_scopes_are_lifted_by_their_roots():
    sizes = []

    def inner(scope_fn, repack_fn, variable_groups, rng_groups):
        sizes.append((len(variable_groups[0]), len(rng_groups[0])))
        scopes = scope_fn(variable_groups, rng_groups)
        a, below, same, other = scopes
        below.put_variable("state", "n", 1)
        assert a.get_variable("state", "below") == {"n": 1}
        assert same.push("below", reuse=True).get_variable("state", "n") == 1
        other.put_variable("state", "m", below.get_variable("state", "n") + 1)
        return below.path_text, repack_fn(scopes)

    def program(scope):
        a, other = scope.push("a"), scope.push("b")
        return pack(inner, (True,), (True,), (True,))([a, a.push("below"), a, other])

    path, variables = init(program)(KEY)
    assert sizes == [(2, 2)]
    assert variables == {"state": {"a": {"below": {"n": 1}}, "b": {"m": 2}}}
    assert path == "/inner(a)/below"


def test_scope_below_a_later_one():
    def inner(scope_fn, repack_fn, variable_groups, rng_groups):
        scopes = scope_fn(variable_groups, rng_groups)
        scopes["below"].put_variable("state", "n", 1)
        return scopes["root"].get_variable("state", "a"), repack_fn(scopes)

    def program(scope):
        return pack(inner, (True,), (True,), (True,))({"below": scope.push("a"), "root": scope})

    assert apply(program, mutable=True)({}) == ({"n": 1}, {"state": {"a": {"n": 1}}})


def test_unmatched_collections_are_empty():
    def look(scope):
        return scope.variable("state", "x").value

    message = "the collection 'state' is empty; look does not lift .*'state': name it among"
    with pytest.raises(ScopeCollectionNotFound, match=message):
        apply(direct(look, ins=("params",), name="look"))(VARIABLES)
    with pytest.raises(InvalidRngError, match=r"'noise'.*none. .*, and lift the stream\.$"):
        apply(direct(lambda scope: scope.make_rng("noise"), rngs=()))({}, rngs={"noise": KEY})


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


def test_failure_leaves_scope_unchanged():
    def fail(scope):
        scope.put_variable("state", "x", 7.0)
        scope.put_variable("new", "z", 7.0)
        scope.make_rng()
        raise ZeroDivisionError

    outer = bind(VARIABLES, rngs=KEY, mutable=True)
    expected = bind(VARIABLES, rngs=KEY, mutable=True)
    with pytest.raises(ZeroDivisionError):
        direct(fail)(outer)
    assert outer.variables() == expected.variables()
    assert outer.make_rng() == expected.make_rng()


def test_scopes_of_a_tree_share_filters():
    from weft.core.scope_kind import ScopeKind, Select

    root = bind({})
    with pytest.raises(
        RoleError, match="probe: the scope '/a' is below '/', which is lifted other"
    ):
        ScopeKind("probe").split(
            [root, root.push("a")], [((Select(True), None),), ((Select(False), None),)]
        )
