import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import LayerConfigError
from weft.hierarchy.embedding import Embedding, SeparableSpaceTimePositionalEmbedding
from weft.hierarchy.module import functional as F

KEY = jax.random.key(0)
IDS = jnp.array([[3, 0, 1], [2, 2, 3]])


def make(cls=Embedding, **kwargs):
    if cls is Embedding:
        kwargs = {"num_embeddings": 4, "dim": 6, **kwargs}
    layer = cls.default_config().set(name="emb", **kwargs).instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run(layer, params, *inputs, **kwargs):
    return F(layer, None, params, inputs, is_training=True, **kwargs)[0]


def test_looks_rows_up():
    layer, params = make()
    assert params["weight"].shape == (4, 6)
    np.testing.assert_array_equal(run(layer, params, IDS), params["weight"][IDS])


def test_attend_is_the_product_with_the_transposed_table():
    layer, params = make()
    x = jax.random.normal(KEY, (2, 5, 6))
    logits = run(layer, params, x, method="attend")
    np.testing.assert_allclose(logits, x @ params["weight"].T, rtol=1e-4, atol=1e-6)


def test_vectors_start_with_length_about_one():
    _, params = make(num_embeddings=200, dim=300)
    np.testing.assert_allclose(params["weight"].std(), 300**-0.5, rtol=0.02)


def test_scale():
    layer, params = make(scale=Embedding.Scale.UNIT)
    expected = params["weight"][IDS] * 6**0.5
    np.testing.assert_allclose(run(layer, params, IDS), expected, rtol=1e-6)
    layer, params = make(scale=Embedding.Scale.CONSTANT, scale_constant=3.0)
    np.testing.assert_allclose(run(layer, params, IDS), params["weight"][IDS] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "scale, constant", [(Embedding.Scale.CONSTANT, None), (Embedding.Scale.UNIT, 2.0), (None, 2.0)]
)
def test_a_constant_without_its_scale_is_refused(scale, constant):
    with pytest.raises(LayerConfigError, match=r"emb: scale=.*and scale_constant=.*do not match"):
        make(scale=scale, scale_constant=constant)


def test_the_dtype_is_that_of_the_table():
    layer, params = make(scale=Embedding.Scale.UNIT, dtype=jnp.bfloat16)
    assert run(layer, params, IDS).dtype == jnp.bfloat16


def test_specs_and_layout_over_a_mesh():
    layer, params = make(
        embedding_partition_spec=("model", None),
        input_partition_spec=("data", None),
        output_partition_spec=("data", None, None),
    )
    specs = layer.create_parameter_specs_recursively()
    assert specs["weight"].mesh_axes == PartitionSpec(None, "model")
    with jax.set_mesh(
        jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ):
        y = jax.jit(lambda params, ids: run(layer, params, ids))(params, IDS)
    assert y.sharding.spec[0] == "data"
    np.testing.assert_array_equal(y, params["weight"][IDS])


def test_gradients_reach_the_rows_that_were_looked_up():
    layer, params = make()
    ids = jnp.array([1, 1, 3])
    grads = jax.jit(jax.grad(lambda params: run(layer, params, ids).sum()))(params)
    np.testing.assert_array_equal(grads["weight"][:, 0], [0, 2, 0, 1])


def test_space_and_time_add_up():
    layer, params = make(
        SeparableSpaceTimePositionalEmbedding,
        dim=6,
        spatial_embeddings=Embedding.default_config().set(num_embeddings=3),
        temporal_embeddings=Embedding.default_config().set(num_embeddings=2),
    )
    assert (layer.num_spatial_embeddings, layer.num_temporal_embeddings) == (3, 2)
    assert layer.max_seq_len == 6
    times, places = (params[f"{k}_embeddings"]["weight"] for k in ("temporal", "spatial"))
    expected = (times[:, None] + places[None]).reshape(6, 6)
    np.testing.assert_allclose(run(layer, params, method="embeddings"), expected, rtol=1e-6)
    positions = jnp.array([[5, 0], [2, 3]])
    np.testing.assert_allclose(run(layer, params, positions), expected[positions], rtol=1e-6)
