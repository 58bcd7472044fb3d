"""How scopes cross; each lifted function is tested in tests/core/lift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.keys import quick_key
from weft.core import apply, bind, init, lift
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.errors import (
    ForkError,
    InvalidScopeError,
    JaxTransformError,
    ModifyScopeVariableError,
    ReturnedScopeError,
    RoleError,
    ScopeCollectionNotFound,
    ScopeParamNotFoundError,
)

RNGS = {"params": quick_key(0), "noise": quick_key(1)}
X = np.ones((2, 3), np.float32)
FORKED = {"params": True, "noise": True}


def drawn(key, shape=()):
    """Draws uniformly, since a normal distribution takes more traces if leaks are checked."""
    return jax.random.bits(key, shape) * jnp.float32(1e-9)


class Body:
    """A function of a scope that counts how often it runs."""

    def __init__(self):
        self.calls = 0

    def __call__(self, scope, x):
        self.calls += 1
        w = scope.param("w", drawn, (3,))
        count = scope.variable("state", "count", lambda: jnp.zeros(()))
        if scope.is_mutable_collection("state"):
            count.value += 1
        return jnp.sum(x * w + drawn(scope.make_rng("noise")))


def scan(f, **options):
    def body(scope, carry, _):
        return carry + f(scope, X[0]), None

    lifted = lift.scan(body, length=2, **options)
    return lambda scope, x: lifted(scope, 0.0, None)[0]


def identity_pack(f):
    def inner(scope_fn, repack_fn, variable_groups, rng_groups, x):
        scope = scope_fn(variable_groups, rng_groups)
        return f(scope, x), repack_fn(scope)

    return lift.pack(inner, (True,), (True,), (True,))


def sharded(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec()
    return lift.shard_map(f, {True: spec}, {True: False}, mesh=mesh, in_specs=spec, out_specs=spec)


AXES = {"params": 0, "state": 0}
LOOP = {"carry_variables": "state", "split_rngs": {True: True}}
LIFTED = {
    "vmap": lambda f: lambda s, x: lift.vmap(f, AXES, FORKED)(s, X),
    "vmap of shared variables": lambda f: (
        lambda s, x: lift.vmap(
            f, {"params": None, "state": None}, {"params": False, "noise": False}
        )(s, X)
    ),
    "pmap": lambda f: lambda s, x: lift.pmap(f, AXES, FORKED)(s, X),
    "shard_map": sharded,
    "scan": lambda f: scan(f, variable_axes=AXES, split_rngs=FORKED),
    "scan with a carry": lambda f: scan(
        f,
        variable_broadcast="params",
        variable_carry="state",
        split_rngs={"noise": True, True: False},
    ),
    "while_loop": lambda f: (
        lambda s, x: lift.while_loop(
            lambda s, c: c[0] < 2, lambda s, c: (c[0] + 1, f(s, x)), s, (0, 0.0), **LOOP
        )[1]
    ),
    "fori_loop": lambda f: (
        lambda s, x: lift.fori_loop(0, 2, lambda i, s, c: c + f(s, x), s, 0.0, **LOOP)
    ),
    "cond": lambda f: lambda s, x: lift.cond(True, f, lambda s, x: 0.0, s, x),
    "switch": lambda f: lambda s, x: lift.switch(1, [lambda s, x: 0.0, f], s, x),
    "grad": lambda f: lambda s, x: lift.grad(f, s, x)[0].sum(),
    "value_and_grad": lambda f: lambda s, x: lift.value_and_grad(f, s, x)[0],
    "vjp": lambda f: lambda s, x: lift.vjp(f, s, x)[1](1.0)[1].sum(),
    "jvp": lambda f: lambda s, x: lift.jvp(f, s, (x,), (x,), {})[0],
    "custom_vjp": lambda f: lift.custom_vjp(f, None, None),
    "custom_jvp": lambda f: lift.custom_jvp(f, None),
    "jit": lift.jit,
    "remat": lift.remat,
    "checkpoint": lift.checkpoint,
    "checkify": lambda f: lambda s, x: lift.checkify(f)(s, x)[1],
    "named_call": lift.named_call,
    "map_variables": lambda f: lift.map_variables(
        f, "params", lambda v: jax.tree.map(jnp.negative, v), mutable=True
    ),
    "swap_collection": lambda f: lift.swap_collection(f, "params", "other"),
    "fold_rngs": lift.fold_rngs,
    "pack": identity_pack,
}
TWICE = {"scan with a carry", "while_loop", "fori_loop"}


def test_all_transforms_are_tested():
    others = {"broadcast", "In", "Out", "remat_scan", "eval_shape", "tree_map_rngs"}
    assert set(lift.__all__) - others <= set(LIFTED)


@pytest.mark.parametrize("name", LIFTED)
def test_body_is_traced_once_in_apply_and_at_most_twice_in_init(name):
    body = Body()
    program = LIFTED[name](body)
    _, shapes = jax.eval_shape(init(program), RNGS, X[0])
    assert body.calls == (2 if name in TWICE else 1)
    variables = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
    body = Body()
    apply(LIFTED[name](body), mutable="state")(variables, X[0], rngs=RNGS)
    assert body.calls == 1
    body = Body()
    jax.eval_shape(lambda v: apply(LIFTED[name](body))(v, X[0], rngs=RNGS), variables)
    assert body.calls == 1


def stacked(f, layers):
    for layer in layers:
        f = {
            "remat": lift.remat,
            "vmap": lambda f: (
                lambda s, x: lift.vmap(f, AXES, FORKED, in_axes=None, axis_size=2)(s, x).sum()
            ),
            "scan": lambda f: scan(
                f, variable_axes={"params": 0}, variable_carry="state", split_rngs=FORKED
            ),
        }[layer](f)
    return f


@pytest.mark.parametrize(
    "layers",
    [
        *(["scan"] * depth for depth in (1, 2, 3, 4)),
        ["vmap"] * 4,
        ["remat"] * 4,
        ["remat", "scan", "vmap"],
        ["scan", "vmap", "remat", "scan"],
    ],
    ids="-".join,
)
def test_nested_body_is_traced_once_in_apply(layers):
    body = Body()
    _, shapes = jax.eval_shape(init(stacked(body, layers)), RNGS, X[0])
    assert body.calls == layers.count("scan") + 1
    variables = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
    body = Body()
    program = stacked(body, layers)

    def loss(params):
        collections = {**variables, "params": params}
        return apply(program, mutable="state")(collections, X[0], rngs=RNGS)[0]

    jax.eval_shape(jax.grad(loss), variables["params"])
    assert body.calls == 1


# Failures.


@pytest.mark.parametrize("name", sorted(LIFTED.keys() - {"named_call"}))
def test_failure_leaves_scope_unchanged(name):
    def fail(scope, x):
        scope.put_variable("state", "count", jnp.ones(()))
        scope.put_variable("state", "new", jnp.ones(()))
        scope.make_rng("noise")
        scope.make_rng("params")
        raise ZeroDivisionError

    variables = {"params": {"w": X}, "state": {"count": X}, "other": {"w": X}}
    scope = bind(variables, rngs=RNGS, mutable=True)
    with pytest.raises(ZeroDivisionError):
        LIFTED[name](fail)(scope, X[0])
    untouched = bind(variables, rngs=RNGS, mutable=True)
    assert scope.variables() == untouched.variables()
    assert not scope.has_variable("state", "new")
    for stream in RNGS:
        assert scope.make_rng(stream) == untouched.make_rng(stream)


def test_scope_cannot_be_returned():
    with pytest.raises(
        ReturnedScopeError, match=r"remat: the function returns the scope '/remat\(\)'"
    ):
        lift.remat(lambda scope: scope)(bind({}))
    with pytest.raises(TypeError, match="a scope is valid only during its call, so return arrays"):
        lift.vmap(lambda scope, x: scope.push("a"), {}, {})(bind({}), X)


def test_scope_ends_with_the_lifted_call():
    kept = []
    lift.remat(lambda scope: kept.append(scope) or 0)(bind({}))
    with pytest.raises(InvalidScopeError, match=r"the scope '/remat\(\)' is used after its end"):
        kept[0].push("a")


def test_lifting_an_outer_scope_in_jit_fails():
    outer = bind({}, rngs=RNGS, mutable=True)

    def body(x):
        lift.remat(lambda scope: scope.put_variable("state", "x", x))(outer)
        return x

    message = (
        "the first value of 'x' of the collection 'state' depends on what is transformed in '/' "
        "inside of jax.jit, which the scope does"
    )
    with pytest.raises(JaxTransformError, match=message):
        jax.jit(body)(1.0)


def test_unmatched_collection():
    def read(scope, x):
        return scope.param("w", jax.nn.initializers.ones, (3,))

    dense = {"params": {"dense": {"w": jnp.ones(3)}}}
    message = (
        r"'/vmap\(dense\)' has no 'w': the collection 'params' is empty; vmap does "
        r"not lift the collection 'params': name it among those it lifts"
    )
    with pytest.raises(ScopeCollectionNotFound, match=message):
        apply(lambda scope: lift.vmap(read, {"state": 0}, {})(scope.push("dense"), X))(dense)
    message = "'state' is not mutable; remat does not lift the collection 'state': name it among"
    with pytest.raises(ModifyScopeVariableError, match=message):
        lift.remat(lambda s: s.put_variable("state", "x", 0), variables="params")(
            bind({}, mutable=True)
        )


def test_missing_parameter_of_nonempty_lifted_scope():
    def read(scope):
        return scope.push("dense").param("w", jax.nn.initializers.ones, (3,))

    with pytest.raises(
        ScopeParamNotFoundError, match=r"'w' in the scope '/remat\(\)/dense'; there"
    ):
        apply(lift.remat(read))({"params": {"other": 1.0}})
    message = "is empty; pass it to `apply`, or make the collection mutable"
    with pytest.raises(ScopeCollectionNotFound, match=message):
        apply(lift.remat(read))({})


def test_collections_cannot_be_forked():
    with pytest.raises(
        ForkError, match=r"probe: the collections \['params'\] are not PRNG streams"
    ):
        ScopeKind("probe").fork(Group({"params": {"w": X}}, {}, {}), 2)


def test_scopes_of_a_tree_share_filters():
    root = bind({})
    with pytest.raises(
        RoleError, match="probe: the scope '/a' is below '/', which is lifted other"
    ):
        ScopeKind("probe").split(
            [root, root.push("a")], [((Select(True), None),), ((Select(False), None),)]
        )
