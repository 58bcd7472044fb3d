import functools
import threading
from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft import errors
from weft.core import AxisMetadata, FrozenDict, apply, bind, freeze, init, lazy_init, lift
from weft.core.filters import DenyList
from weft.core.meta import Partitioned, with_partitioning
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


def test_children_have_names_and_paths():
    root = bind(VARIABLES)
    dense = root.push("dense")
    inner = dense.push(prefix="inner_")
    assert (root.path, root.name, root.path_text, root.parent) == ((), None, "/", None)
    assert (inner.path, inner.name, inner.path_text) == (
        ("dense", "inner_0"),
        "inner_0",
        "/dense/inner_0",
    )
    assert inner.root is root and inner.parent is dense
    assert root.push(prefix="dense").name == "dense0"
    assert root.push(prefix="dense").name == "dense1"
    assert root.push().name == "0"


def test_default_names_skip_taken_names():
    root = bind({}, mutable=True)
    root.push("dense_1")
    root.variable("state", "dense_0", lambda: 0)
    assert root.default_name("dense_") == "dense_2"
    assert root.default_name("dense_") == "dense_2"


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


def test_reuse_shares_variables():
    root = bind({}, rngs=KEY, mutable=True)
    first = root.push("dense").param("w", NORMAL, (2,))
    assert (root.push("dense", reuse=True).param("w", NORMAL, (2,)) == first).all()
    root.push("new", reuse=True)
    with raises(errors.NameInUseError, "'new'"):
        root.push("new")


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


def test_child_is_named_after_function():
    def dense(scope, x, y=1):
        return scope.path, x, y

    class Layer:
        def __call__(self, scope):
            return scope.path

    root = bind({})
    assert root.child(dense)(2) == (("dense_0",), 2, 1)
    assert root.child(dense, y=5)(2) == (("dense_1",), 2, 5)
    assert root.child(dense, "given", y=5)(2, y=3) == (("given",), 2, 3)
    assert root.child(dense, prefix="layer", named_call=False)(2) == (("layer0",), 2, 1)
    assert root.child(functools.partial(dense, x=4))() == (("0",), 4, 1)
    assert root.child(Layer())() == ("1",)
    assert root.child(dense).__name__ == "dense"


def test_child_called_twice_uses_the_same_variables():
    def dense(scope, x):
        return x * scope.param("w", NORMAL, (2,)) + scope.push("inner").param("b", NORMAL, (2,))

    def twice(scope):
        layer = scope.child(dense, "dense")
        return layer(1.0), layer(1.0)

    (a, b), variables = init(twice)(KEY)
    assert (a == b).all()
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"dense": {"w": (2,), "inner": {"b": (2,)}}}
    }


def test_child_has_its_name_in_profiles():
    def f(x):
        def program(scope):
            return scope.child(lambda scope: jnp.sin(x), "my_layer")()

        return apply(program)({})

    assert "my_layer" in jax.jit(f).lower(1.0).as_text(debug_info=True)


def test_rewound_resets_names_keeps_values():
    root = bind({}, rngs=KEY, mutable=True)
    w = root.push("dense").param("w", NORMAL, (2,))
    first = root.make_rng()
    again = root.rewound()
    assert (again.push("dense").param("w", NORMAL, (2,)) == w).all()
    assert again.make_rng() != first
    assert root.rewound(rewind_rngs=True).make_rng() == first
    with raises(errors.NameInUseError, "dense"):
        root.push("dense")


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


def test_invalidate_ends_children_but_not_parents():
    root = bind(VARIABLES)
    dense = root.push("dense")
    inner = dense.push("inner")
    dense.invalidate()
    assert (root.invalid, dense.invalid, inner.invalid) == (False, True, True)


# Collections.


def test_collections_of_a_scope():
    root = bind({**VARIABLES, "empty": {}}, mutable="state")
    dense = root.push("dense")
    assert root.variables() == {**VARIABLES, "empty": {}} and dense.variables() == {
        "params": {"b": 2.0}
    }
    assert root.mutable_variables() == {"state": {"x": 3}} and dense.mutable_variables() == {}
    assert root.is_mutable_collection("state") and not root.is_mutable_collection("params")
    assert root.has_variable("params", "dense") and not root.has_variable("params", "z")
    assert [root.is_collection_empty(c) for c in ("params", "empty", "new")] == [False, True, True]


def test_mutable_variables_are_new_dicts():
    root = bind(VARIABLES, mutable=True)
    root.mutable_variables()["params"]["dense"]["b"] = 5
    assert root.get_variable("params", "dense") == {"b": 2.0}
    root.put_variable("params", "a", 9.0)
    assert VARIABLES["params"]["a"] == 1.0


def test_get_variable():
    boxed = bind({"params": {"w": Partitioned(jnp.ones(2), ("a",)), "none": None}})
    assert isinstance(boxed.get_variable("params", "w"), Partitioned)
    assert isinstance(boxed.get_variable("params", "w", unbox=True), jax.Array)
    assert boxed.get_variable("params", "none", 3) is None
    assert boxed.get_variable("params", "z", 3) == 3 and boxed.get_variable("z", "z") is None


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


def test_parameter_with_a_box():
    root = bind({}, rngs=KEY, mutable=True)
    w = root.param("w", with_partitioning(NORMAL, ("a",)), (2,))
    v = root.param("v", with_partitioning(NORMAL, ("a",)), (2,), unbox=False)
    assert isinstance(w, jax.Array) and v.names == ("a",)
    assert root.get_variable("params", "w").names == ("a",)


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


def test_params_stream_is_the_default():
    def program(scope):
        return scope.has_rng("dropout"), scope.make_rng("params"), scope.make_rng("dropout")

    has, first, second = apply(program)({}, rngs=KEY)
    assert not has
    assert first == bind({}, rngs=KEY).make_rng() and second != first


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


def test_init_needs_a_key():
    with raises(errors.InvalidRngError, "'params' was given None; expected a key"):
        init(lambda scope: 0)(None)


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


def test_apply_returns_mutable_state():
    def program(scope):
        return scope.get_variable("state", "x")

    assert apply(program)(VARIABLES) == 3
    assert apply(program, mutable="state")(VARIABLES) == (3, {"state": {"x": 3}})
    assert apply(program, mutable=["cache"])(VARIABLES) == (3, {})
    assert apply(program, mutable=[])(VARIABLES) == (3, {})
    assert apply(program, mutable=DenyList("params"))(VARIABLES) == (3, {"state": {"x": 3}})
    assert apply(program, mutable=True)(VARIABLES) == (3, VARIABLES)


def test_frozen_variables_return_dicts():
    _, variables = apply(lambda scope: 0, mutable=True)(freeze(VARIABLES))
    assert variables == VARIABLES and type(variables["params"]["dense"]) is dict
    kept = apply(lambda scope: scope.get_variable("params", "dense"))(freeze(VARIABLES))
    assert isinstance(kept, FrozenDict)


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


@pytest.mark.parametrize("mutable", [3, None, DenyList(3), [["params"]], ["params", DenyList("x")]])
def test_mutable_must_be_a_filter(mutable):
    with raises(errors.InvalidFilterError, "cannot be used as a filter here.*expected True, False"):
        apply(lambda scope: 0, mutable=mutable)(VARIABLES)


def test_init_creates_mutable_collections():
    def program(scope, x, *, y):
        scope.param("w", NORMAL, (2,))
        return x + y

    value, variables = init(program)(KEY, 1, y=2)
    assert value == 3 and variables["params"]["w"].shape == (2,)
    assert init(lambda scope: 0, mutable=False)(KEY) == 0
    with raises(errors.ScopeCollectionNotFound, "has no 'w': the collection 'params'"):
        init(program, mutable="state")(KEY, 1, y=2)


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


def test_bind_takes_one_key_or_several():
    assert bind({}, rngs=KEY).has_rng("params")
    assert sorted(bind({}, rngs={"a": KEY, "b": KEY}).rngs) == ["a", "b"]
    assert isinstance(bind(VARIABLES, mutable="state"), Scope)


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


def test_variable_is_a_reference():
    scope = bind(STATE, mutable="state")
    x = scope.variable("state", "x")
    assert x.value == 1
    x.value += 4
    assert scope.get_variable("state", "x") == x.value == 5
    scope.put_variable("state", "x", 6)
    assert x.value == 6
    assert STATE["state"]["x"] == 1


def test_variable_repr():
    scope = bind(STATE, mutable=["state"])
    x, y = scope.variable("state", "x"), scope.push("dense").variable("state", "y")
    assert x.is_mutable() and not bind(STATE).variable("state", "x").is_mutable()
    assert repr(x) == "Variable(state:/x = 1)"
    assert repr(y) == "Variable(state:/dense/y = 2)"
    scope.invalidate()
    assert repr(y) == "Variable(state:/dense/y = 'ended')"


def test_new_variable_calls_init_with_arguments():
    scope = bind({}, mutable=True)
    made = scope.variable("state", "pair", lambda a, b=1: (a, b), 3, b=4)
    assert made.value == (3, 4)
    again = scope.rewound().variable("state", "pair", lambda: pytest.fail("it is there already"))
    assert again.value == (3, 4)


def test_none_is_a_value():
    scope = bind({"state": {"x": None}}, mutable=True)
    assert scope.variable("state", "x", lambda: 3).value is None
    assert scope.variable("state", "y", lambda: None).value is None
    assert scope.has_variable("state", "y")


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


def test_assigned_value_is_boxed():
    scope = bind({"state": {"x": Partitioned(jnp.zeros(2), ("a",))}}, mutable=True)
    x = scope.variable("state", "x")
    assert isinstance(x.value, jax.Array)
    x.value = jnp.ones(2)
    box = scope.get_variable("state", "x")
    assert isinstance(box, AxisMetadata) and box.names == ("a",)
    assert box.value.sum() == 2


def test_unbox_false_shows_the_box_and_replaces_it():
    scope = bind({"state": {"x": Partitioned(jnp.zeros(2), ("a",))}}, mutable=True)
    x = scope.variable("state", "x", unbox=False)
    assert isinstance(x.value, Partitioned)
    x.value = jnp.ones(2)
    assert isinstance(scope.get_variable("state", "x"), jax.Array)


def test_unboxed_value_may_change_structure():
    scope = bind({"state": {"x": (1, 2)}}, mutable=True)
    x = scope.variable("state", "x")
    x.value = {"b": 3}
    assert x.value == {"b": 3}
    x.value = 4
    assert x.value == 4


@pytest.mark.parametrize("mapping", [freeze, OrderedDict])
def test_value_keeps_its_own_mapping_class(mapping):
    def program(scope):
        scope.push("dense").variable("state", "x", lambda: mapping({"b": 1}))
        made = scope.rewound().push("dense").variable("state", "x")
        made.value = mapping({"b": made.value["b"] + 1})

    _, variables = apply(program, mutable=True)({})
    value = variables["state"]["dense"]["x"]
    assert type(value) in (FrozenDict, OrderedDict) and value == mapping({"b": 2})


def test_input_is_not_mutated():
    given = {"b": 1}

    def program(scope):
        scope.put_variable("state", "x", given)
        scope.put_variable("state", "x", {"b": 2})

    assert apply(program, mutable=True)({})[1] == {"state": {"x": {"b": 2}}}
    assert given == {"b": 1}


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


def test_shape_is_checked_in_boxes_and_trees():
    boxed = Partitioned(jnp.ones(3), ("a",))
    check_shape(bind({}), "w", boxed, jax.nn.initializers.ones, ((3,),), {})
    tree = {"u": jnp.ones(3), "v": jnp.ones(())}
    check_shape(bind({}), "w", tree, lambda key, n: {"u": jnp.ones(n), "v": 1.0}, (3,), {})
    with pytest.raises(ScopeParamShapeError, match=r"has shape \(3,\), but .* returns \(4,\)"):
        check_shape(bind({}), "w", tree, lambda key, n: {"u": jnp.ones(n), "v": 1.0}, (), {"n": 4})


def test_shape_argument_avoids_calling_the_initializer():
    def init_fn(key, shape, dtype=None):
        pytest.fail("the shape is known")

    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ((2, 3), float), {})
    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ([2, 3],), {})


def test_dtype_may_differ():
    half = bind({"params": {"w": jnp.ones(3, "bfloat16")}})
    assert half.param("w", jax.nn.initializers.ones, (3,)).dtype == "bfloat16"


def test_direct_construction():
    scope = bind(STATE)
    assert Variable(scope, "state", "x").value == 1
    assert Variable(scope, "state", "x", unbox=False).unbox is False
