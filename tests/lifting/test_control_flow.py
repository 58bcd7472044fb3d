import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import (
    AxisSizeError,
    BranchStructureError,
    CarryStructureError,
    ForkError,
    RoleError,
)
from weft.lifting import CARRY, DIFF, FORK, cond, fori_loop, scan, switch, while_loop


@pytest.fixture(autouse=True)
def no_leaks():
    with jax.checking_leaks():
        yield


def test_reverse_and_length():
    _, ys = scan(
        BOXES, lambda c, x: (c + x, c), in_axes=(CARRY, 0), out_axes=(CARRY, 0), reverse=True
    )(0.0, jnp.arange(3.0))
    np.testing.assert_array_equal(ys, [3, 2, 0])
    total, _ = scan(
        BOXES, lambda c: (c + 1, None), in_axes=(CARRY,), out_axes=(CARRY, 0), length=5
    )(0)
    assert total == 5


def test_zero_iterations_leave_the_carry():
    box = Box(count=jnp.int32(4))
    lifted = scan(
        BOXES,
        lambda box, x: box.write("count", box.arrays["count"] + 1),
        in_axes=(CARRY, 0),
        out_axes=0,
    )
    lifted(box, jnp.zeros((0, 2)))
    assert box.arrays["count"] == 4


def test_without_jit_the_body_runs_as_python():
    seen = []

    def body(carry, x):
        seen.append(isinstance(x, jax.core.Tracer))
        return carry + x, carry

    lifted = scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, 0))
    with jax.disable_jit():
        total, ys = lifted(0.0, jnp.arange(3.0))
    assert total == 3 and ys.tolist() == [0, 0, 1]
    assert seen == [False, False, False]


def test_body_is_traced_once_for_any_length():
    traces = []

    def body(c, x):
        traces.append(1)
        return c + x, None

    for n in (2, 50):
        scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, 0))(0.0, jnp.zeros(n))
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda c, x: (c[:1], None),
            r"the carry at input 0 is given as float32\[2\] .* float32\[1\]",
        ),
        (lambda c, x: (c.astype(jnp.int32), None), r"float32\[2\] and returned as int32\[2\]"),
        (lambda c, x: ((c, c), None), "carry of another structure"),
    ],
)
def test_carry_keeps_its_structure(body, message):
    with pytest.raises(CarryStructureError, match=message):
        scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, 0))(jnp.zeros(2), jnp.zeros(3))


@pytest.mark.parametrize(
    "other",
    [
        lambda c: {"a": c["a"], "z": c["b"]},
        lambda c: [c["a"], c["b"]],
        lambda c: {"a": c["a"], "b": (c["b"],)},
    ],
)
@pytest.mark.parametrize("way", ["scan", "one_of_two", "while_loop", "fori_loop"])
def test_carry_keeps_its_containers(other, way):
    """Leaves as many as before, elsewhere: the next iteration would find them at a wrong place."""
    carry = {"a": jnp.zeros(2), "b": jnp.ones(2)}
    with pytest.raises(CarryStructureError, match="carry of another structure than it was given"):
        if way == "scan":
            scan(BOXES, other, in_axes=CARRY, out_axes=CARRY, length=2)(carry)
        elif way == "one_of_two":
            both = lambda c, n: (n + 1, None, other(c))  # noqa: E731
            roles = {"in_axes": (CARRY, CARRY), "out_axes": (CARRY, None, CARRY)}
            swapped = lambda n, c: both(c, n)  # noqa: E731
            scan(BOXES, swapped, **roles, length=2)(0, carry)
        elif way == "while_loop":
            while_loop(BOXES, lambda c: c["a"].sum() < 3, other, in_axes=CARRY)(carry)
        else:
            fori_loop(BOXES, 0, jnp.int32(3), lambda i, c: other(c), in_axes=CARRY)(carry)


def test_shared_state_cannot_be_written():
    box = Box(scale=jnp.float32(1))
    lifted = scan(
        BOXES,
        lambda box: box.write("scale", 2 * box.arrays["scale"]),
        in_axes=(None,),
        out_axes=0,
        length=2,
    )
    with pytest.raises(RoleError, match=r"what is shared by all iterations \(None\)"):
        lifted(box)
    assert box.writes == 0


def test_bad_roles_and_sizes():
    with pytest.raises(RoleError, match="scan has no role DIFF"):
        scan(BOXES, lambda x: x, in_axes=DIFF, out_axes=0)(jnp.ones(2))
    with pytest.raises(AxisSizeError, match=r"the size given: 4, input 0: 3"):
        scan(BOXES, lambda x: x, in_axes=0, out_axes=0, length=4)(jnp.ones(3))


def test_while_loops_cannot_write_shared_state():
    box = Box(total=jnp.float32(1))
    body = lambda box, i: (box.write("total", 2 * box.arrays["total"]), i + 1)[1]  # noqa: E731
    with pytest.raises(RoleError, match="while_loop: the body returns or changes what is shared"):
        while_loop(BOXES, lambda box, i: i < 3, body, in_axes=(None, CARRY))(box, 0)
    assert (box.arrays["total"], box.writes) == (1, 0)


def test_loop_of_unknown_length_has_no_axis():
    with pytest.raises(RoleError, match="its length is unknown, so it has no axis; give CARRY"):
        while_loop(BOXES, lambda x: True, lambda x: x, in_axes=0)(jnp.ones(2))


def test_carry_keeps_its_dtype():
    with pytest.raises(
        CarryStructureError, match=r"while_loop: the carry at input 0 is given as int32\[\]"
    ):
        while_loop(BOXES, lambda x: x < 3, lambda x: x + 0.5, in_axes=(CARRY,))(jnp.int32(0))


def test_while_loop_splits_keys_only():
    loop = while_loop(BOXES, lambda b, i: i < 3, lambda b, i: i + 1, in_axes=(FORK, CARRY))
    with pytest.raises(
        ForkError, match=r"\['n'\] is float32\[\], not a PRNG key.*share it or carry"
    ):
        loop(Box(n=jnp.float32(0)), 0)


def test_fori_loop_of_known_length_is_differentiated():
    def power(x):
        return fori_loop(BOXES, 0, 3, lambda i, y: y * x, in_axes=(CARRY,))(jnp.float32(1))

    assert jax.grad(power)(2.0) == 3 * 2.0**2


def test_loop_is_traced_once_for_equal_structure():
    traces = []

    def body(box, i):
        traces.append(1)
        return i + 1

    loop = while_loop(BOXES, lambda box, i: i < 3, body, in_axes=(None, CARRY))
    for start in range(3):
        assert loop(Box(x=jnp.float32(start)), start) == 3
    assert len(traces) == 1


def double(box, x):
    box.write("total", 2 * box.arrays["total"])
    return x + 1


def leave(box, x):
    return x - 1


def test_branches_must_match():
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
