"""Values that NumPy moves for JAX outside of jit, in tests only, are those that JAX compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 1, 4) / 3

MOVES = {
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (3, 2, 5, 4), (0, 2, 3)),
    "to bfloat16": lambda x: lax.convert_element_type(x, jnp.bfloat16),
    "to int32": lambda x: lax.convert_element_type(x, jnp.int32),
    "weak": lambda x: lax.convert_element_type(x, float),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (-1, 0, 9), (2, 1, 3)),
    "reshape": lambda x: lax.reshape(x, (2, 6)),
    "squeeze": lambda x: lax.squeeze(x, (1,)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("committed", [False, True])
def test_moved_as_compiled(move, committed):
    x = jax.device_put(X, jax.devices()[1]) if committed else jnp.asarray(X)
    moved, compiled = move(x), jax.jit(move)(x)
    np.testing.assert_array_equal(moved, compiled)
    assert jax.typeof(moved) == jax.typeof(compiled)
    assert (moved.sharding, moved.committed) == (compiled.sharding, compiled.committed)


def test_mesh_lays_values_out():
    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        assert len(jnp.zeros(8).devices()) == 8


def test_moved_value_has_memory_of_its_own():
    x = jnp.asarray(X)
    y = lax.reshape(x, (12,))
    jax.jit(lambda x: x + 1, donate_argnums=0)(y)
    np.testing.assert_array_equal(x, X)


def test_mistakes_are_those_of_jax():
    with pytest.raises(ValueError, match="number of output elements"):
        lax.reshape(jnp.asarray(X), (5,))
