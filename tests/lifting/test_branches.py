import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import BranchStructureError
from weft.lifting import cond, switch


def double(box, x):
    box.write("total", 2 * box.arrays["total"])
    return x + 1


def leave(box, x):
    return x - 1


@pytest.mark.parametrize(("taken", "total", "result"), [(True, 6, 1), (False, 3, -1)])
def test_the_branch_that_is_taken_changes_the_state(taken, total, result):
    box = Box(total=jnp.float32(3))
    assert cond(BOXES, double, leave)(taken, box, 0) == result
    assert box.arrays["total"] == total


def test_switch_takes_the_nearest_branch():
    box = Box(total=jnp.float32(3))
    chosen = switch(BOXES, [leave, double, double])
    assert chosen(7, box, 0) == 1
    assert chosen(-2, box, 0) == -1
    assert box.arrays["total"] == 6


def test_branches_leave_alike():
    box = Box(total=jnp.float32(3))

    def round_off(box, x):
        box.write("total", jnp.int32(0))
        return x

    with pytest.raises(
        BranchStructureError,
        match=r"the state\['total'\] is float32\[\] in true_fun, and int32\[\] in",
    ):
        cond(BOXES, double, round_off)(True, box, 0)
    with pytest.raises(
        BranchStructureError, match=r"branch 1 returns another structure than branch 0"
    ):
        switch(BOXES, [double, lambda box, x: (x, x)])(0, box, 0)
    with pytest.raises(BranchStructureError, match=r"the result is float32\[2\] in branch 1"):
        switch(BOXES, [leave, lambda box, x: jnp.ones(2)])(0, box, 0.0)
    assert (box.arrays["total"], box.writes) == (3, 0)


def test_branches_are_traced_once_for_equal_structure():
    traces = []

    def branch(box, x):
        traces.append(1)
        return x

    chosen = cond(BOXES, branch, leave)
    for taken in (True, False, True):
        chosen(taken, Box(total=jnp.float32(3)), 0)
    assert len(traces) == 1
