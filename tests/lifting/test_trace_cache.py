"""Loops that are compiled once outside of traces."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.lifting.counting import BOXES
from weft.lifting import CARRY, scan


def test_loop_is_traced_once_outside_of_traces():
    traces = []

    def body(carry, x):
        traces.append(1)
        return carry + x, None

    loop = scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))
    assert [float(loop(0.0, jnp.ones(3))[0]) for _ in range(3)] == [3, 3, 3]
    assert len(traces) == 1
    loop(0.0, jnp.ones(4))
    assert len(traces) == 2


def test_equal_values_of_different_types_are_not_confused():
    def body(carry, mode):
        return carry + {bool: 1, int: 10, float: 100, set: 1000}[type(mode)], None

    loop = scan(BOXES, body, in_axes=(CARRY, None), out_axes=(CARRY, None), length=1)
    assert [int(loop(0, mode)[0]) for mode in (True, 1, 1.0, {1})] == [1, 10, 100, 1000]


def test_present_values_of_captured_names():
    def run(x):
        def body(c, i):
            return c + scale * i, None

        loop = scan(BOXES, body, in_axes=(CARRY, 0), out_axes=(CARRY, None))
        scale = x
        before = loop(x, jnp.arange(2.0))[0]
        scale = 3 * x
        return before, loop(x, jnp.arange(2.0))[0]

    np.testing.assert_allclose(jax.jit(run)(2.0), [4, 8])
