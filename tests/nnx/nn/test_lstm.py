import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import ArgumentShapeError


def one_map_of(cell):
    """An `OptimizedLSTMCell` with the parameters of an `LSTMCell`."""
    new = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    of_input = [cell.ii, cell.if_, cell.ig, cell.io]
    of_state = [cell.hi, cell.hf, cell.hg, cell.ho]
    new.dense_i.kernel[...] = jnp.concatenate([m.kernel[...] for m in of_input], -1)
    new.dense_h.kernel[...] = jnp.concatenate([m.kernel[...] for m in of_state], -1)
    new.dense_h.bias[...] = jnp.concatenate([m.bias[...] for m in of_state], -1)
    return new


def test_one_map_for_all_gates_computes_the_same():
    cell = nnx.LSTMCell(3, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    fast, x = one_map_of(cell), jnp.arange(6.0).reshape(2, 3)
    carry = other = cell.initialize_carry((2, 3))
    for _ in range(2):
        carry, y = cell(carry, x)
        other, z = fast(other, x)
    assert jnp.allclose(y, z, atol=1e-6) and jnp.allclose(carry[0], other[0], atol=1e-6)
    assert y is carry[1] and cell.num_feature_axes == fast.num_feature_axes == 1


@pytest.mark.parametrize("kind", [nnx.LSTMCell, nnx.OptimizedLSTMCell], ids=lambda k: k.__name__)
def test_memory_and_output_are_drawn_apart(kind):
    cell = kind(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    c, h = cell.initialize_carry((2, 3), nnx.Rngs(0), nnx.initializers.normal())
    assert c.shape == h.shape == (2, 4) and (c != h).any() and c.dtype == jnp.bfloat16
    (c, h), y = cell((c, h), jnp.ones((2, 3), jnp.bfloat16))
    assert c.dtype == y.dtype == jnp.bfloat16
    with pytest.raises(ArgumentShapeError, match=r"an input of shape \(2, 5\)"):
        cell((c, h), jnp.ones((2, 5)))
