"""Embeddings of NNX: what they compute, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.embed import Embed


def test_ids_become_rows_and_queries_logits():
    layer = Embed(10, 4, rngs=nnx.Rngs(0))
    rows = layer([3, -1])
    np.testing.assert_array_equal(rows, layer.embedding[...][jnp.array([3, 9])])
    expected = rows @ layer.embedding[...].T
    np.testing.assert_allclose(layer.attend(rows), expected, rtol=1e-5, atol=1e-6)
    assert jnp.isnan(layer(10)).all()


def test_results_have_the_dtype_of_the_table_by_default():
    half = Embed(10, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert (half.dtype, half(0).dtype, half.attend(jnp.ones(4)).dtype) == (jnp.bfloat16,) * 3
    wide = Embed(10, 4, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert wide(0).dtype == jnp.float32


def test_results_are_laid_out_as_asked():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        layer = Embed(10, 4, rngs=nnx.Rngs(0))
        rows = layer(jax.device_put(jnp.arange(2), P("data")), out_sharding=P("data", "model"))
        logits = layer.attend(jnp.ones((2, 4)), out_sharding=P("data", None))
    assert rows.sharding.spec == P("data", "model")
    assert logits.sharding.spec == P("data", None)


def test_what_does_not_fit_is_shown_with_the_layer():
    layer = Embed(10, 4, rngs=nnx.Rngs(0))
    message = "Embed with num_embeddings=10 was given ids of dtype float32; expected integers"
    with pytest.raises(ArgumentValueError, match=message):
        layer(jnp.ones(2))
    message = r"Embed with features=4 was given queries of shape \(2, 3\); expected \(\.\.\., 4\)"
    with pytest.raises(ArgumentShapeError, match=message):
        layer.attend(jnp.ones((2, 3)))
