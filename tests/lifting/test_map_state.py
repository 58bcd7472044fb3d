import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.lifting import Roles, map_state

ROLES = Roles((("x", None), (True, None)))


def negated(groups):
    return jax.tree.map(jnp.negative, groups[0]), *groups[1:]


def test_initial_run_creates_state():
    box, runs = Box(y=jnp.float32(5)), []

    def f(box):
        runs.append(sorted(box.arrays))
        if "x" not in box.arrays:
            box.write("x", jnp.float32(1))
        return box.arrays["x"]

    def join(before, after):
        return tuple({**b, **a} for b, a in zip(before, after, strict=True))

    mapped = map_state(BOXES, f, in_axes=(ROLES,), map_in=negated, initialize=join)
    assert mapped(box) == -1
    assert runs == [["y"], ["x", "y"]]


def test_failure_leaves_the_original():
    box = Box(x=jnp.float32(3))

    def f(box):
        box.write("x", 0.0)
        raise KeyError("no")

    with pytest.raises(KeyError):
        map_state(BOXES, f)(box)
    assert (box.arrays["x"], box.writes) == (3, 0)
