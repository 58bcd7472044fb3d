import threading
from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft import errors
from weft.core import FrozenDict, apply, bind, freeze, init, lazy_init, lift
from weft.core.filters import DenyList
from weft.core.meta import with_partitioning
from weft.core.scope import Scope, Variable, check_shape
from weft.errors import (
    InvalidScopeError,
    ModifyScopeVariableError,
    ScopeCollectionNotFound,
    ScopeParamShapeError,
    ScopeVariableNotFoundError,
)

KEY = quick_key(0)
NORMAL = jax.nn.initializers.normal()
VARIABLES = {"params": {"a": 1.0, "dense": {"b": 2.0}}, "state": {"x": 3}}


def raises(error, message):
    return pytest.raises(error, match=message)


# The tree.


def test_name_is_shared_only_between_collections():
    root = bind({}, mutable=True)
    root.variable("state", "x", lambda: 0)
    root.variable("cache", "x", lambda: 1)
    root.push("y")
    assert root.name_reserved("x") and root.name_reserved("x", "state")
    assert not root.name_reserved("x", "params")
    assert root.name_reserved("y", "params") and not root.name_reserved("z")
    for take in (
        lambda: root.push("x"),
        lambda: root.push("y"),
        lambda: root.variable("state", "x", lambda: 0),
        lambda: root.param("y", NORMAL, (2,)),
        lambda: root.reserve("x"),
        lambda: root.reserve("x", "cache"),
    ):
        with raises(errors.NameInUseError, r"the name '.' is used twice in '/', .*reuse=True"):
            take()


def test_parameter_and_variable_names_collide():
    dense = bind(VARIABLES).push("dense")
    dense.param("b", lambda key: 0.0)
    with raises(
        errors.NameInUseError, "'b' is used twice in '/dense', the second time for 'params'"
    ):
        dense.variable("params", "b")


def test_parent_is_a_scope():
    with raises(errors.ScopeParentError, "is a dict; expected a Scope, or None for a root"):
        Scope({}, parent={})


def test_name_is_a_string():
    with raises(errors.ScopeNameError, "the name 3 in the scope '/' is a int; expected a string"):
        bind({}).push(3)
    with raises(TypeError, "the name None in the scope '/dense'"):
        bind({}).push("dense").variable("state", None)


def test_scope_below_a_value_is_rejected():
    for use in (
        lambda x: x.param("w", NORMAL, (2,)),
        lambda x: x.variable("params", "w", lambda: 0),
        lambda x: x.put_variable("params", "w", 1),
        lambda x: x.get_variable("params", "w"),
        lambda x: x.push("y").has_variable("params", "w"),
    ):
        root = bind(VARIABLES, rngs=KEY, mutable=True)
        with raises(errors.ScopeTreeError, r"'params' has a float at '/dense/b', where a scope"):
            use(root.push("dense").push("b"))


def test_child_has_its_name_in_profiles():
    def f(x):
        def program(scope):
            return scope.child(lambda scope: jnp.sin(x), "my_layer")()

        return apply(program)({})

    assert "my_layer" in jax.jit(f).lower(1.0).as_text(debug_info=True)


# Ends.


def test_ended_scope_is_rejected():
    root = bind(VARIABLES, rngs=KEY, mutable=True)
    dense = root.push("dense")
    with root.temporary() as same:
        assert same is root and not dense.invalid
    assert root.invalid and dense.invalid
    message = "the scope '/dense' is used after its end; a scope is valid only during its call"
    for use in (
        lambda: dense.push("x"),
        lambda: dense.param("b", lambda key: 0.0),
        lambda: dense.variable("state", "y", lambda: 0),
        lambda: dense.get_variable("params", "b"),
        lambda: dense.has_variable("params", "b"),
        lambda: dense.put_variable("params", "b", 1),
        lambda: dense.make_rng(),
        lambda: dense.variables(),
        lambda: dense.mutable_variables(),
        lambda: dense.rewound(),
        lambda: dense.reserve("x"),
        lambda: lift.remat(lambda scope: 0)(dense),
    ):
        with raises(errors.InvalidScopeError, message):
            use()


def test_scope_ends_even_if_apply_fails():
    kept = []

    def fail(scope):
        kept.append(scope)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply(fail)({})
    assert kept[0].invalid


# Collections.


def test_mutable_variables_are_new_dicts():
    root = bind(VARIABLES, mutable=True)
    root.mutable_variables()["params"]["dense"]["b"] = 5
    assert root.get_variable("params", "dense") == {"b": 2.0}
    root.put_variable("params", "a", 9.0)
    assert VARIABLES["params"]["a"] == 1.0


def test_writing_to_an_immutable_collection():
    dense = bind(VARIABLES, mutable=DenyList("state")).push("dense")
    message = (
        r"'y' in the scope '/dense' was written to, but its collection 'state' is not mutable; "
        r"call apply\(..., mutable=\['state'\]\)"
    )
    with raises(errors.ModifyScopeVariableError, message):
        dense.put_variable("state", "y", 0)
    dense.put_variable("params", "b", 5.0)
    assert dense.get_variable("params", "b") == 5.0


# Parameters.


def test_missing_parameter_of_nonempty_scope():
    message = r"no parameter 'w' in the scope '/'; there are: a, dense; pass it to `apply`, or run"
    with raises(errors.ScopeParamNotFoundError, message):
        bind(VARIABLES).param("w", NORMAL, (2,))
    with raises(LookupError, "no parameter 'w' in the scope '/other'; there are: none"):
        bind(VARIABLES).push("other").param("w", NORMAL, (2,))


def test_parameter_of_empty_collection():
    message = "'/dense' has no 'w': the collection 'params' is empty; pass it to"
    with raises(errors.ScopeCollectionNotFound, message):
        bind({"params": {}}).push("dense").param("w", NORMAL, (2,))


# PRNG streams and flags.


def test_missing_stream():
    def program(scope):
        return scope.push("dense").make_rng("dropout")

    message = (
        r"the scope '/dense' needs a key of the PRNG stream 'dropout', and the given streams "
        r"are: 'noise'. Give a key: rngs=\{'dropout': key\}\.$"
    )
    with raises(errors.InvalidRngError, message):
        apply(program)({}, rngs={"noise": KEY})
    with raises(ValueError, r"streams are: none"):
        apply(program)({})


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (3, "3"),
        (None, "None"),
        (jnp.ones(2), r"float32\(2,\)"),
        (jax.random.split(jax.random.key(0)), r"key<fry>\(2,\)"),
    ],
)
def test_invalid_key(key, shown):
    message = f"the PRNG stream 'noise' was given {shown}; expected a key, such as jax.random.key"
    with raises(errors.InvalidRngError, message):
        apply(lambda scope: 0)({}, rngs={"noise": key})


def test_flags():
    def program(scope):
        inner = scope.push("dense")
        return inner.has_flag("train"), inner.get_flag("train"), inner.get_flag("other", 3)

    assert apply(program, flags={"train": True})({}) == (True, True, 3)
    assert init(
        lambda scope: (scope.get_flag("initializing"), scope.get_flag("x")), flags={"x": 1}
    )(KEY)[0] == (True, 1)
    message = (
        r"no flag 'y' in the scope '/dense'; the flags are \['x'\]. Pass it to .*flags=\{'y': ...\}"
    )
    with raises(errors.ScopeFlagNotFoundError, message):
        bind({}, flags={"x": 1}).push("dense").get_flag("y")
    assert bind({}).get_flag("y", None) is None


# Traces.


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_scope_used_in_raw_transformation(transform):
    x = jnp.ones(2) if transform is jax.vmap else 1.0
    name = "remat" if transform is jax.checkpoint else transform.__name__
    why = "so a tracer would leak into it"
    into = (
        rf" in '/dense' inside of jax.{transform.__name__}, which the scope does not cross, %s; "
        rf"use `nn.{name}` of weft.linen in its place \(for scopes `lift.{name}` of weft.core"
    )

    def used(use):
        def program(scope):
            dense = scope.push("dense")
            return transform(lambda x: (use(dense, x), x)[1])(x)

        return apply(program, mutable=True)(VARIABLES, rngs=KEY)

    with raises(
        errors.JaxTransformError, "'b' of the collection 'params' is written to" + into % why
    ):
        used(lambda scope, x: scope.put_variable("params", "b", x))
    same = "so every index or iteration would draw the same"
    with raises(
        errors.JaxTransformError, "a key of the PRNG stream 'params' is drawn" + into % same
    ):
        used(lambda scope, x: scope.make_rng())
    first = "the first value of 'new' of the collection 'state' depends on what is transformed"
    with raises(errors.JaxTransformError, first + into % why):
        used(lambda scope, x: scope.variable("state", "new", lambda: x))
    used(lambda scope, x: scope.get_variable("params", "b"))
    used(lambda scope, x: scope.variable("state", "new", lambda: jnp.ones(2)).value + 1)
    used(lambda scope, x: scope.push("new").param("w", jax.nn.initializers.normal(), (2,)))


def test_outer_scope_in_a_lifted_function():
    def program(scope):
        lift.vmap(lambda inner, x: scope.put_variable("state", "x", x), {}, {})(scope, jnp.ones(2))

    with raises(errors.JaxTransformError, "'x' of the collection 'state' is written to in '/'"):
        apply(program, mutable=True)(VARIABLES)


# The ways in and out.


def test_invalid_variables():
    class_error = errors.ApplyScopeInvalidVariablesTypeError
    with raises(class_error, r"the variables are a list; expected a dict of collections, such as"):
        apply(lambda scope: 0)([1])
    with raises(class_error, r"the variables are a NoneType; expected"):
        apply(lambda scope: 0)(None)
    with raises(TypeError, r"the collection 'kernel' is a float; expected a dict of collections"):
        apply(lambda scope: 0)({"kernel": 1.0})


def test_doubly_nested_variables():
    message = r'have "params" inside of "params"; .* the collections \[\'params\', \'state\'\]'
    with raises(errors.ApplyScopeInvalidVariablesStructureError, message):
        apply(lambda scope: 0)({"params": VARIABLES, "state": {}})


def test_lazy_init_creates_equal_variables():
    def program(scope, x, n):
        scope.variable("state", "calls", lambda: 0)
        scope.push("dense").param("w", with_partitioning(NORMAL, ("a", None)), (x.shape[-1], n))
        return x @ jnp.ones((x.shape[-1], 1 << 40))

    def small(scope, x, n):
        scope.variable("state", "calls", lambda: 0)
        scope.push("dense").param("w", with_partitioning(NORMAL, ("a", None)), (x.shape[-1], n))

    variables = lazy_init(program)(KEY, jax.ShapeDtypeStruct((1 << 40, 3), "float32"), 2)
    expected = init(small)(KEY, jnp.ones((1, 3)), 2)[1]
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    assert type(variables["state"]["calls"]) is int
    assert (variables["params"]["dense"]["w"].value == expected["params"]["dense"]["w"].value).all()


def test_lazy_init_error_names_the_variable():
    def program(scope, x):
        scope.push("norm").variable("state", "mean", lambda: x.mean())

    with raises(errors.LazyInitError, "cannot compute state/norm/mean: its initial value depends"):
        lazy_init(program)(KEY, jax.ShapeDtypeStruct((2,), "float32"))
    made = lazy_init(program)(KEY, jnp.array([1.0, 3.0]))
    assert made["state"]["norm"]["mean"] == 2


# Failures and threads.


def test_concurrent_traces_match_serial_results():
    together = threading.Barrier(4)

    def program(scope, x, wait):
        dense = scope.push("dense")
        w = dense.param("w", NORMAL, x.shape)
        if wait:
            together.wait(timeout=60)
        noise = lift.vmap(
            lambda scope, x: x + jax.random.normal(scope.make_rng("noise")), {}, {"noise": True}
        )(dense, x)
        return w + noise, scope.push("dense", reuse=True).path_text

    def run(seed, wait):
        rngs = {"params": jax.random.key(seed), "noise": jax.random.key(seed + 10)}

        def traced(rngs):
            value, path = None, None

            def inner(rngs):
                nonlocal path
                (value, path), variables = init(program)(rngs, jnp.ones(3), wait)
                return value, variables

            value = jax.jit(inner)(rngs)
            return *value, path

        return traced(rngs)

    serial = [run(seed, False) for seed in range(4)]
    results = [None] * 4

    def work(seed):
        results[seed] = run(seed, True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert jax.tree.map(lambda a: getattr(a, "tolist", lambda: a)(), results) == jax.tree.map(
        lambda a: getattr(a, "tolist", lambda: a)(), serial
    )


STATE = {"state": {"x": 1, "dense": {"y": 2}}}


def test_variable_repr():
    scope = bind(STATE, mutable=["state"])
    x, y = scope.variable("state", "x"), scope.push("dense").variable("state", "y")
    assert x.is_mutable() and not bind(STATE).variable("state", "x").is_mutable()
    assert repr(x) == "Variable(state:/x = 1)"
    assert repr(y) == "Variable(state:/dense/y = 2)"
    scope.invalidate()
    assert repr(y) == "Variable(state:/dense/y = 'ended')"


def test_missing_variable_without_init():
    scope = bind(STATE)
    with pytest.raises(
        ScopeVariableNotFoundError, match=r"no variable 'z' .* 'state' .* '/'; there"
    ):
        scope.variable("state", "z", lambda: 0)
    message = r"'/dense' has no 'z': the collection 'cache' is empty; pass it to"
    with pytest.raises(ScopeCollectionNotFound, match=message):
        scope.push("dense").variable("cache", "z", lambda: 0)
    with pytest.raises(ScopeCollectionNotFound, match="mutable and pass an init_fn"):
        bind({}, mutable=True).variable("state", "z")


def test_immutable_variable_cannot_be_assigned():
    y = bind(STATE, mutable="cache").push("dense").variable("state", "y")
    message = r"'y' in the scope '/dense' was written to, but its collection 'state' is not mutable"
    with pytest.raises(ModifyScopeVariableError, match=message + r"; call apply\(..., mutable=\['"):
        y.value = 3
    assert y.value == 2


def test_variable_of_ended_scope():
    def keep(scope):
        return scope.push("dense").variable("state", "y")

    y = apply(keep, mutable=True)(STATE)[0]
    with pytest.raises(InvalidScopeError, match="the scope '/dense' is used after its end"):
        _ = y.value
    with pytest.raises(InvalidScopeError, match="the scope '/dense' is used after its end"):
        y.value = 3


# Boxes.


@pytest.mark.parametrize("mapping", [freeze, OrderedDict])
def test_value_keeps_its_own_mapping_class(mapping):
    def program(scope):
        scope.push("dense").variable("state", "x", lambda: mapping({"b": 1}))
        made = scope.rewound().push("dense").variable("state", "x")
        made.value = mapping({"b": made.value["b"] + 1})

    _, variables = apply(program, mutable=True)({})
    value = variables["state"]["dense"]["x"]
    assert type(value) in (FrozenDict, OrderedDict) and value == mapping({"b": 2})


# Shapes.


def test_wrong_parameter_shape_is_rejected():
    params = {"params": {"dense": {"kernel": jnp.ones((2, 3))}}}
    dense = bind(params).push("dense")
    message = (
        r"the parameter 'kernel' in the scope '/dense' has shape \(2, 3\), but its initializer "
        r"returns \(4, 3\); the parameters belong to another model"
    )
    with pytest.raises(ScopeParamShapeError, match=message):
        dense.param("kernel", jax.nn.initializers.ones, (4, 3))


def test_shape_argument_avoids_calling_the_initializer():
    def init_fn(key, shape, dtype=None):
        pytest.fail("the shape is known")

    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ((2, 3), float), {})
    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ([2, 3],), {})


def test_direct_construction():
    scope = bind(STATE)
    assert Variable(scope, "state", "x").value == 1
    assert Variable(scope, "state", "x", unbox=False).unbox is False
