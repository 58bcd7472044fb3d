import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import RoleError
from weft.lifting.kind import (
    PureArgs,
    StateNode,
    Static,
    call_pure,
    commit_results,
    split_args,
)
from weft.lifting.roles import CARRY, Roles
from weft.lifting.units import Units


def trip(fn, args, roles=None):
    outer, pure_args = split_args(BOXES, args, roles)
    return commit_results(BOXES, outer, call_pure(BOXES, fn, pure_args))


def test_results_and_writes_are_returned():
    box = Box(x=jnp.float32(1))

    def fn(box, y):
        box.write("x", box.arrays["x"] + y)
        return {"twice": box.arrays["x"] * 2}

    out = trip(fn, (box, jnp.float32(2)))
    assert out["twice"] == 6
    assert box.arrays["x"] == 3
    assert box.writes == 1


def test_function_gets_a_copy_of_the_carrier():
    box = Box(x=jnp.float32(1))
    trip(lambda box: box.arrays.clear(), (box,))
    assert "x" in box.arrays


def test_failure_leaves_original_unchanged():
    box = Box(x=jnp.float32(1))

    def fn(box):
        box.write("x", jnp.float32(5))
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        trip(fn, (box,))
    assert box.arrays == {"x": 1}
    assert box.writes == 0


def test_returned_carriers_are_merged():
    made = trip(lambda y: [Box(y=y + 1)], (jnp.float32(1),))
    assert isinstance(made[0], Box)
    assert made[0].arrays["y"] == 2


def test_unmatched_state_is_not_passed():
    box = Box(x=jnp.float32(1), y=jnp.float32(2))
    seen = []
    roles = (Roles(((("x",), None),)),)
    trip(lambda box: seen.extend(box.arrays), (box,), roles)
    assert seen == ["x"]
    assert box.arrays["y"] == 2


def test_users_tree_keeps_its_shape():
    _, pure_args = split_args(BOXES, {"a": [Box(x=jnp.zeros(2))], "b": jnp.ones(3)}, None)
    assert jax.tree.structure(pure_args.packed) == jax.tree.structure(
        {"a": [StateNode(({"x": 0},))], "b": 0}
    )


def test_static_part_is_structure_compared_by_value():
    assert jax.tree.leaves(Static(("a", 1))) == []
    assert jax.tree.structure(Static(("a", 1))) == jax.tree.structure(Static(("a", 1)))
    assert jax.tree.structure(Static(("a", 1))) != jax.tree.structure(Static(("a", 2)))


def test_state_roles_of_arrays_are_rejected():
    with pytest.raises(RoleError, match=r"gives .* to a ArrayImpl, which carries no state"):
        split_args(BOXES, (jnp.zeros(2),), (Roles((("x", 0),)),))


def test_units_are_groups_and_other_leaves():
    box = Box(a=jnp.zeros(1), b=jnp.ones(1))
    roles = (Roles((("a", CARRY), ("b", 0))), None)
    _, pure_args = split_args(BOXES, (box, jnp.full(1, 2)), roles)
    units = Units.of_pure_args(BOXES, pure_args)
    assert [unit.role for unit in units.layout.units] == [CARRY, 0, None]
    assert [unit.carrier for unit in units.layout.units] == [0, 0, None]
    assert jax.tree.structure(units.packed()) == jax.tree.structure(pure_args.packed)
    replaced = units.with_role_replaced(CARRY, [{"a": jnp.full(1, 7)}]).packed()
    assert replaced[0].groups[0]["a"] == 7


def test_returned_carriers_keep_input_roles():
    box = Box(a=jnp.zeros(1))
    _, pure_args = split_args(BOXES, (box,), (Roles((("a", 3),)),))
    results = call_pure(BOXES, lambda box: (jnp.ones(2), Box(z=jnp.ones(1))), pure_args, (None, 1))
    units = Units.of_pure_args(BOXES, pure_args).of_results(results, (None, 1))
    assert [unit.role for unit in units.layout.units] == [3, None, 1]


def test_pure_args_are_cached_by_structure_in_jit():
    traces = []

    @jax.jit
    def go(pure_args):
        traces.append(1)
        return call_pure(BOXES, lambda box: box.arrays["x"] * 2, pure_args)

    for value in (1.0, 2.0):
        box = Box(x=jnp.float32(value))
        outer, pure_args = split_args(BOXES, (box,), None)
        assert commit_results(BOXES, outer, go(PureArgs(*pure_args))) == 2 * value
    assert len(traces) == 1
