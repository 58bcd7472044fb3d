import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError
from weft.interop.bridge.functional import functional


class Counter(nnx.Module):
    def __init__(self, start, *, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.count = nnx.BatchStat(jnp.array(start))

    def __call__(self, x):
        self.count[...] += 1
        return self.linear(x)


def test_states_in_and_out():
    made = functional(Counter)(4)
    assert (made.module_type, made.graphdef, made.args, made.kwargs) == (Counter, None, (4,), {})
    state = made.init(rngs=nnx.Rngs(0))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    y, (_, after) = made.apply(params, rest)(jnp.ones((1, 3)))
    assert y.shape == (1, 2)
    assert after["count"][...] == 5
    assert state["count"][...] == 4
    z, _ = made.apply(state).linear(jnp.ones((1, 3)))
    assert (y == z).all()


def test_apply_before_init_is_refused():
    with pytest.raises(GraphStructureError, match="Counter is known after `init` was called"):
        functional(Counter)(4).apply({})
