from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest

from weft.core import AxisMetadata, FrozenDict, apply, bind, freeze
from weft.core.meta import Partitioned
from weft.core.variable import Variable, check_shape
from weft.errors import (
    InvalidScopeError,
    ModifyScopeVariableError,
    ScopeCollectionNotFound,
    ScopeParamShapeError,
    ScopeVariableNotFoundError,
)

STATE = {"state": {"x": 1, "dense": {"y": 2}}}


def test_a_variable_is_a_reference():
    scope = bind(STATE, mutable="state")
    x = scope.variable("state", "x")
    assert x.value == 1
    x.value += 4
    assert scope.get_variable("state", "x") == x.value == 5
    scope.put_variable("state", "x", 6)
    assert x.value == 6
    assert STATE["state"]["x"] == 1


def test_what_it_says_of_itself():
    scope = bind(STATE, mutable=["state"])
    x, y = scope.variable("state", "x"), scope.push("dense").variable("state", "y")
    assert x.is_mutable() and not bind(STATE).variable("state", "x").is_mutable()
    assert repr(x) == "Variable(state:/x = 1)"
    assert repr(y) == "Variable(state:/dense/y = 2)"
    scope.invalidate()
    assert repr(y) == "Variable(state:/dense/y = 'ended')"


def test_a_new_one_is_made_with_the_arguments_given():
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


def test_one_that_is_missing_and_cannot_be_made():
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


def test_one_of_an_immutable_collection_cannot_be_assigned_to():
    y = bind(STATE, mutable="cache").push("dense").variable("state", "y")
    message = r"'y' in the scope '/dense' was written to, but its collection 'state' is not mutable"
    with pytest.raises(ModifyScopeVariableError, match=message + r"; call apply\(..., mutable=\['"):
        y.value = 3
    assert y.value == 2


def test_one_of_a_scope_that_has_ended():
    def keep(scope):
        return scope.push("dense").variable("state", "y")

    y = apply(keep, mutable=True)(STATE)[0]
    with pytest.raises(InvalidScopeError, match="the scope '/dense' is used after its end"):
        _ = y.value
    with pytest.raises(InvalidScopeError, match="the scope '/dense' is used after its end"):
        y.value = 3


# Boxes.


def test_what_is_assigned_goes_into_the_box():
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


def test_a_value_without_boxes_may_get_another_structure():
    scope = bind({"state": {"x": (1, 2)}}, mutable=True)
    x = scope.variable("state", "x")
    x.value = {"b": 3}
    assert x.value == {"b": 3}
    x.value = 4
    assert x.value == 4


@pytest.mark.parametrize("mapping", [freeze, OrderedDict])
def test_a_value_keeps_its_own_mapping_class(mapping):
    def program(scope):
        scope.push("dense").variable("state", "x", lambda: mapping({"b": 1}))
        made = scope.rewound().push("dense").variable("state", "x")
        made.value = mapping({"b": made.value["b"] + 1})

    _, variables = apply(program, mutable=True)({})
    value = variables["state"]["dense"]["x"]
    assert type(value) in (FrozenDict, OrderedDict) and value == mapping({"b": 2})


def test_what_was_given_is_not_written_to():
    given = {"b": 1}

    def program(scope):
        scope.put_variable("state", "x", given)
        scope.put_variable("state", "x", {"b": 2})

    assert apply(program, mutable=True)({})[1] == {"state": {"x": {"b": 2}}}
    assert given == {"b": 1}


# Shapes.


def test_a_parameter_of_another_shape_is_refused():
    params = {"params": {"dense": {"kernel": jnp.ones((2, 3))}}}
    dense = bind(params).push("dense")
    message = (
        r"the parameter 'kernel' in the scope '/dense' has shape \(2, 3\), but its initializer "
        r"returns \(4, 3\); the parameters belong to another model"
    )
    with pytest.raises(ScopeParamShapeError, match=message):
        dense.param("kernel", jax.nn.initializers.ones, (4, 3))


def test_the_shape_is_checked_in_boxes_and_trees():
    boxed = Partitioned(jnp.ones(3), ("a",))
    check_shape(bind({}), "w", boxed, jax.nn.initializers.ones, ((3,),), {})
    tree = {"u": jnp.ones(3), "v": jnp.ones(())}
    check_shape(bind({}), "w", tree, lambda key, n: {"u": jnp.ones(n), "v": 1.0}, (3,), {})
    with pytest.raises(ScopeParamShapeError, match=r"has shape \(3,\), but .* returns \(4,\)"):
        check_shape(bind({}), "w", tree, lambda key, n: {"u": jnp.ones(n), "v": 1.0}, (), {"n": 4})


def test_the_shape_is_checked_without_calling_an_initializer_that_is_told_the_shape():
    def init_fn(key, shape, dtype=None):
        pytest.fail("the shape is known")

    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ((2, 3), float), {})
    check_shape(bind({}), "w", jnp.ones((2, 3)), init_fn, ([2, 3],), {})


def test_a_dtype_may_differ():
    half = bind({"params": {"w": jnp.ones(3, "bfloat16")}})
    assert half.param("w", jax.nn.initializers.ones, (3,)).dtype == "bfloat16"


def test_it_can_be_made_by_hand():
    scope = bind(STATE)
    assert Variable(scope, "state", "x").value == 1
    assert Variable(scope, "state", "x", unbox=False).unbox is False
