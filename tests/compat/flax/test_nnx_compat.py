"""Modules of Flax NNX's layout that have names of their own."""

import jax
import jax.numpy as jnp

from weft import nnx
from weft.nnx import compat, tracers


def test_functions_of_graphs():
    shared = nnx.Param(jnp.ones(1))
    module = nnx.Dict(a=shared, b=shared)
    with nnx.set_graph_mode(False):
        graphdef, state = compat.split(module)
        assert list(state) == ["a"]
        assert compat.clone(module).a is not shared

        @compat.jit
        def add(module):
            module.new = nnx.Param(module.a + module.b)

        add(module)
    assert module.new.tolist() == [2]
    assert nnx.merge(graphdef, state).b.tolist() == [1]


def test_state_of_a_trace():
    outside = tracers.TraceState()
    assert outside == tracers.TraceState()
    assert outside.is_valid()
    assert not jax.eval_shape(lambda: jnp.zeros(outside.is_valid())).shape[0]
