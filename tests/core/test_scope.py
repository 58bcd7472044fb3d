import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from weft import errors
from weft.core import FrozenDict, apply, bind, freeze, init, lazy_init, lift
from weft.core.filters import DenyList
from weft.core.meta import Partitioned, with_partitioning
from weft.core.scope import Scope

KEY = jax.random.key(0)
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


def test_default_names_pass_over_those_that_are_taken():
    root = bind({}, mutable=True)
    root.push("dense_1")
    root.variable("state", "dense_0", lambda: 0)
    assert root.default_name("dense_") == "dense_2"
    assert root.default_name("dense_") == "dense_2"


def test_a_name_is_for_a_scope_or_for_variables_of_different_collections():
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


def test_a_parameter_and_a_variable_of_the_same_collection_collide():
    dense = bind(VARIABLES).push("dense")
    dense.param("b", lambda key: 0.0)
    with raises(
        errors.NameInUseError, "'b' is used twice in '/dense', the second time for 'params'"
    ):
        dense.variable("params", "b")


def test_reuse_shares_what_a_scope_holds():
    root = bind({}, rngs=KEY, mutable=True)
    first = root.push("dense").param("w", NORMAL, (2,))
    assert (root.push("dense", reuse=True).param("w", NORMAL, (2,)) == first).all()
    root.push("new", reuse=True)
    with raises(errors.NameInUseError, "'new'"):
        root.push("new")


def test_a_name_is_a_string():
    with raises(errors.ScopeNameError, "the name 3 in the scope '/' is a int; expected a string"):
        bind({}).push(3)
    with raises(TypeError, "the name None in the scope '/dense'"):
        bind({}).push("dense").variable("state", None)


def test_a_scope_below_a_value_is_refused():
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


def test_child_names_itself_after_the_function():
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


def test_a_child_called_twice_uses_the_same_variables():
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


def test_a_child_has_its_name_in_profiles():
    def f(x):
        def program(scope):
            return scope.child(lambda scope: jnp.sin(x), "my_layer")()

        return apply(program)({})

    assert "my_layer" in jax.jit(f).lower(1.0).as_text(debug_info=True)


def test_rewound_forgets_names_and_not_values():
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


def test_a_scope_that_has_ended_is_refused():
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


def test_a_scope_ends_with_apply_also_when_it_fails():
    kept = []

    def fail(scope):
        kept.append(scope)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply(fail)({})
    assert kept[0].invalid


def test_invalidate_ends_what_is_below_and_not_what_is_above():
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


def test_a_missing_parameter_of_a_scope_that_has_others():
    message = r"no parameter 'w' in the scope '/'; there are: a, dense; pass it to `apply`, or run"
    with raises(errors.ScopeParamNotFoundError, message):
        bind(VARIABLES).param("w", NORMAL, (2,))
    with raises(LookupError, "no parameter 'w' in the scope '/other'; there are: none"):
        bind(VARIABLES).push("other").param("w", NORMAL, (2,))


def test_a_parameter_where_there_are_none():
    message = "'/dense' has no 'w': the collection 'params' is empty; pass it to"
    with raises(errors.ScopeCollectionNotFound, message):
        bind({"params": {}}).push("dense").param("w", NORMAL, (2,))


def test_a_parameter_with_a_box():
    root = bind({}, rngs=KEY, mutable=True)
    w = root.param("w", with_partitioning(NORMAL, ("a",)), (2,))
    v = root.param("v", with_partitioning(NORMAL, ("a",)), (2,), unbox=False)
    assert isinstance(w, jax.Array) and v.names == ("a",)
    assert root.get_variable("params", "w").names == ("a",)


# PRNG streams and flags.


def test_a_missing_stream():
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


def test_params_stands_in_for_a_missing_stream():
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
        (jax.random.split(KEY), r"key<fry>\(2,\)"),
    ],
)
def test_what_is_no_key(key, shown):
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
def test_a_scope_used_inside_of_a_transformation_that_it_does_not_cross(transform):
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


def test_the_outer_scope_inside_of_a_lifted_function():
    def program(scope):
        lift.vmap(lambda inner, x: scope.put_variable("state", "x", x), {}, {})(scope, jnp.ones(2))

    with raises(errors.JaxTransformError, "'x' of the collection 'state' is written to in '/'"):
        apply(program, mutable=True)(VARIABLES)


# The ways in and out.


def test_apply_returns_what_can_be_changed():
    def program(scope):
        return scope.get_variable("state", "x")

    assert apply(program)(VARIABLES) == 3
    assert apply(program, mutable="state")(VARIABLES) == (3, {"state": {"x": 3}})
    assert apply(program, mutable=["cache"])(VARIABLES) == (3, {})
    assert apply(program, mutable=[])(VARIABLES) == (3, {})
    assert apply(program, mutable=DenyList("params"))(VARIABLES) == (3, {"state": {"x": 3}})
    assert apply(program, mutable=True)(VARIABLES) == (3, VARIABLES)


def test_frozen_variables_come_back_as_dicts():
    _, variables = apply(lambda scope: 0, mutable=True)(freeze(VARIABLES))
    assert variables == VARIABLES and type(variables["params"]["dense"]) is dict
    kept = apply(lambda scope: scope.get_variable("params", "dense"))(freeze(VARIABLES))
    assert isinstance(kept, FrozenDict)


def test_variables_that_are_no_collections():
    class_error = errors.ApplyScopeInvalidVariablesTypeError
    with raises(class_error, r"the variables are a list; expected a dict of collections, such as"):
        apply(lambda scope: 0)([1])
    with raises(class_error, r"the variables are a NoneType; expected"):
        apply(lambda scope: 0)(None)
    with raises(TypeError, r"the collection 'kernel' is a float; expected a dict of collections"):
        apply(lambda scope: 0)({"kernel": 1.0})


def test_variables_with_a_layer_too_many():
    message = r'have "params" inside of "params"; .* the collections \[\'params\', \'state\'\]'
    with raises(errors.ApplyScopeInvalidVariablesStructureError, message):
        apply(lambda scope: 0)({"params": VARIABLES, "state": {}})


@pytest.mark.parametrize("mutable", [3, None, DenyList(3), [["params"]], ["params", DenyList("x")]])
def test_a_mutable_that_is_no_filter(mutable):
    with raises(errors.InvalidFilterError, "cannot be used as a filter here.*expected True, False"):
        apply(lambda scope: 0, mutable=mutable)(VARIABLES)


def test_init_makes_the_collections_that_are_mutable():
    def program(scope, x, *, y):
        scope.param("w", NORMAL, (2,))
        return x + y

    value, variables = init(program)(KEY, 1, y=2)
    assert value == 3 and variables["params"]["w"].shape == (2,)
    assert init(lambda scope: 0, mutable=False)(KEY) == 0
    with raises(errors.ScopeCollectionNotFound, "has no 'w': the collection 'params'"):
        init(program, mutable="state")(KEY, 1, y=2)


def test_lazy_init_makes_the_same_variables():
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


def test_lazy_init_says_which_variable_needs_an_input():
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


def test_two_threads_that_trace_at_once_give_the_serial_results():
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
