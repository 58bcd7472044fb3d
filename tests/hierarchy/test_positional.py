import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from weft.hierarchy.module import functional as F
from weft.hierarchy.positional import (
    LearnedPositionalEmbedding,
    SinusoidalPositionalEmbedding,
    sinusoidal_positional_embeddings,
)


def run(layer, state, *inputs, **kwargs):
    return F(layer, None, state, inputs, is_training=False, **kwargs)[0]


def test_sinusoidal():
    cfg = SinusoidalPositionalEmbedding.default_config().set(
        name="p", dim=4, min_timescale=2, max_timescale=50
    )
    y = run(cfg.instantiate(parent=None), {}, jnp.array([[0, 3]]))
    expected = [np.sin(1.5), np.sin(3 / 50), np.cos(1.5), np.cos(3 / 50)]
    np.testing.assert_allclose(y[0], [[0, 0, 1, 1], expected], rtol=1e-5)
    same = sinusoidal_positional_embeddings(
        jnp.array([[0, 3]]), dim=4, min_timescale=2, max_timescale=50
    )
    np.testing.assert_array_equal(y, same)


def learned(**fields):
    cfg = LearnedPositionalEmbedding.default_config().set(name="p", dim=2, **fields)
    return cfg.instantiate(parent=None)


def test_learned_table(filled):
    layer = learned(shape=(3,))
    state = filled(layer)
    table = run(layer, state, method="embeddings")
    np.testing.assert_array_equal(table, state["weight"][0])
    np.testing.assert_array_equal(run(layer, state, jnp.array([2, 0])), table[jnp.array([2, 0])])
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert spec.mesh_axes == PartitionSpec(None, None, "model")


def test_learned_table_with_several_axes(filled):
    layer = learned(shape=(3, 4))
    state = filled(layer)
    assert state["weight"].shape == (1, 3, 4, 2)
    assert run(layer, state, jnp.array([[1, 2]])).shape == (1, 2, 4, 2)
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert spec.mesh_axes == PartitionSpec(None, None, None, "model")
