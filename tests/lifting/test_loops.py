import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import CarryStructureError, RoleError
from weft.lifting import CARRY, FORK, Roles, fori_loop, while_loop


def test_while_loop_equals_the_python_loop():
    box, by_hand = Box(total=jnp.float32(1), step=jnp.float32(2)), 1.0
    roles = Roles((("total", CARRY), ("step", None)))

    def body(box, i):
        box.write("total", box.arrays["total"] * box.arrays["step"])
        return i + 1

    last = while_loop(BOXES, lambda box, i: i < 4, body, in_axes=(roles, CARRY))(box, 0)
    for _ in range(4):
        by_hand *= 2
    assert (last, box.arrays["total"], box.writes) == (4, by_hand, 1)


def test_a_loop_that_never_runs_changes_nothing():
    box = Box(total=jnp.float32(1))
    body = lambda box, i: (box.write("total", 2 * box.arrays["total"]), i + 1)[1]  # noqa: E731
    loop = while_loop(BOXES, lambda box, i: i < 0, body, in_axes=(Roles(((True, CARRY),)), CARRY))
    assert (loop(box, 0), box.arrays["total"]) == (0, 1)


def test_shared_state_cannot_be_written():
    box = Box(total=jnp.float32(1))
    body = lambda box, i: (box.write("total", 2 * box.arrays["total"]), i + 1)[1]  # noqa: E731
    with pytest.raises(RoleError, match="while_loop: the body returns or changes what is shared"):
        while_loop(BOXES, lambda box, i: i < 3, body, in_axes=(None, CARRY))(box, 0)
    assert (box.arrays["total"], box.writes) == (1, 0)


def test_a_loop_of_unknown_length_has_no_axis():
    with pytest.raises(RoleError, match="its length is unknown, so it has no axis; give CARRY"):
        while_loop(BOXES, lambda x: True, lambda x: x, in_axes=0)(jnp.ones(2))


def test_a_carry_keeps_its_dtype():
    with pytest.raises(
        CarryStructureError, match=r"while_loop: the carry at input 0 is given as int32\[\]"
    ):
        while_loop(BOXES, lambda x: x < 3, lambda x: x + 0.5, in_axes=(CARRY,))(jnp.int32(0))


def test_keys_cannot_be_folded_by_a_kind_that_has_none():
    loop = while_loop(BOXES, lambda b, i: i < 3, lambda b, i: i + 1, in_axes=(FORK, CARRY))
    with pytest.raises(ValueError, match="BoxKind has no PRNG keys to fork; share the group"):
        loop(Box(key=jax.random.key(0)), 0)


@pytest.mark.parametrize("upper", [5, jnp.int32(5)], ids=["known", "unknown"])
def test_fori_loop_equals_the_python_loop(upper):
    box = Box(total=jnp.float32(0))

    def body(i, box, carry):
        box.write("total", box.arrays["total"] + i)
        return carry * 2

    loop = fori_loop(BOXES, 2, upper, body, in_axes=(Roles(((True, CARRY),)), CARRY))
    assert loop(box, jnp.int32(1)) == 2**3
    assert box.arrays["total"] == 2 + 3 + 4


def test_a_fori_loop_of_known_length_is_differentiated():
    def power(x):
        return fori_loop(BOXES, 0, 3, lambda i, y: y * x, in_axes=(CARRY,))(jnp.float32(1))

    assert jax.grad(power)(2.0) == 3 * 2.0**2


def test_a_loop_is_traced_once_for_equal_structure():
    traces = []

    def body(box, i):
        traces.append(i)
        return i + 1

    loop = while_loop(BOXES, lambda box, i: i < 3, body, in_axes=(None, CARRY))
    for start in range(3):
        assert loop(Box(x=jnp.float32(start)), start) == 3
    assert len(traces) == 1
