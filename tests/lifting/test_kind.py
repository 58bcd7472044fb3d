import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import RoleError
from weft.lifting.kind import (
    PureArgs,
    Static,
    call_pure,
    commit_results,
    split_args,
)
from weft.lifting.roles import Roles


def trip(fn, args, roles=None):
    outer, pure_args = split_args(BOXES, args, roles)
    return commit_results(BOXES, outer, call_pure(BOXES, fn, pure_args))


def test_failure_leaves_original_unchanged():
    box = Box(x=jnp.float32(1))

    def fn(box):
        box.write("x", jnp.float32(5))
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        trip(fn, (box,))
    assert box.arrays == {"x": 1}
    assert box.writes == 0


def test_static_part_is_structure_compared_by_value():
    assert jax.tree.leaves(Static(("a", 1))) == []
    assert jax.tree.structure(Static(("a", 1))) == jax.tree.structure(Static(("a", 1)))
    assert jax.tree.structure(Static(("a", 1))) != jax.tree.structure(Static(("a", 2)))


def test_state_roles_of_arrays_are_rejected():
    with pytest.raises(RoleError, match=r"gives .* to a ArrayImpl, which carries no state"):
        split_args(BOXES, (jnp.zeros(2),), (Roles((("x", 0),)),))


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
