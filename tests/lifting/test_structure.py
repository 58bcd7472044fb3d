import jax
import jax.numpy as jnp

from tests.lifting.counting import BOXES, Box
from weft.lifting import CARRY, scan


def test_equal_functions_share_a_trace_outside_of_jit():
    traces = []

    def run(scale):
        def body(carry, x):
            traces.append(1)
            return carry * scale + x, None

        return scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))(0.0, jnp.ones(3))[0]

    assert [float(run(2.0)) for _ in range(2)] == [7, 7]
    assert float(run(3.0)) == 13
    # `traces` can change, so the functions themselves are not equal: only a lifted one is kept.
    loop = scan(BOXES, lambda c, x: (traces.append(1), (c + x, None))[1], in_axes=(CARRY, 0),
                out_axes=(CARRY, None))  # fmt: skip
    traces.clear()
    for _ in range(3):
        loop(0.0, jnp.ones(3))
    assert len(traces) == 1


def test_what_is_no_array_stays_what_it_is():
    def body(carry, mode, box):
        assert mode == "add"
        return carry + box.arrays["n"], None

    loop = scan(BOXES, body, in_axes=(CARRY, None, None), out_axes=(CARRY, None), length=3)
    assert loop(0, "add", Box(n=2))[0] == 6


def test_a_loop_leaves_no_mark_in_the_trace_around_it():
    loop = scan(BOXES, lambda c, x: (c + x, None), in_axes=(CARRY, 0), out_axes=(CARRY, None))
    jaxpr = jax.make_jaxpr(lambda x: loop(0.0, x))(jnp.ones(3))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["scan"]


def test_equal_values_of_different_types_are_not_confused():
    def body(carry, mode):
        return carry + {bool: 1, int: 10, float: 100, set: 1000}[type(mode)], None

    loop = scan(BOXES, body, in_axes=(CARRY, None), out_axes=(CARRY, None), length=1)
    assert [int(loop(0, mode)[0]) for mode in (True, 1, 1.0, {1})] == [1, 10, 100, 1000]
