import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.cli.collectives import collectives_of
from weft.errors import LayerConfigError
from weft.functional import linear_cross_entropy
from weft.hierarchy.layers.embedding import (
    Embedding,
    LearnedPositionalEmbedding,
    ModalityEmbedding,
    ModalityVocabInfo,
    SeparableSpaceTimePositionalEmbedding,
)
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


def test_vectors_start_with_length_about_one():
    _, params = make(num_embeddings=200, dim=300)
    np.testing.assert_allclose(params["weight"].std(), 300**-0.5, rtol=0.02)


@pytest.mark.parametrize(
    "scale, constant", [(Embedding.Scale.CONSTANT, None), (Embedding.Scale.UNIT, 2.0), (None, 2.0)]
)
def test_missing_scale_constant_is_rejected(scale, constant):
    with pytest.raises(LayerConfigError, match=r"emb: scale=.*and scale_constant=.*do not match"):
        make(scale=scale, scale_constant=constant)


def test_specs_and_layout_over_a_mesh():
    layer, params = make(
        embedding_partition_spec=("model", None),
        input_partition_spec=("data", None),
        output_partition_spec=("data", None, None),
    )
    specs = layer.create_parameter_specs_recursively()
    assert specs["weight"].mesh_axes == P(None, "model")
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        y = jax.jit(lambda params, ids: run(layer, params, ids))(params, IDS)
    assert y.sharding.spec[0] == "data"
    np.testing.assert_array_equal(y, params["weight"][IDS])


def loss_of_vectors(layer, params, ids):
    return jnp.sum(jnp.sin(run(layer, params, ids)))


def loss_of_logits(layer, params, ids):
    x = jax.nn.one_hot(ids, 16)
    table = run(layer, params, method="embeddings")
    return linear_cross_entropy(x, table, ids, chunk_size=4)[0]


def program_of_gradient(loss, axis_type):
    """Returns the program of a loss and its gradient, which equal those of one device."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    layer, params = make(num_embeddings=24, dim=16, embedding_partition_spec=(None, None))
    fn = jax.value_and_grad(functools.partial(loss, layer))
    ids = np.arange(8 * 3).reshape(8, 3)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    rows, columns = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
    with jax.set_mesh(mesh):
        operands = jax.device_put(params, columns), jax.device_put(ids, rows)
        results = (NamedSharding(mesh, P()), columns)
        program = jax.jit(fn, out_shardings=results).lower(*operands).compile()
    for x, y in zip(
        jax.tree.leaves(program(*operands)), jax.tree.leaves(fn(params, ids)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    return program


def test_parts_of_vectors_move_to_the_devices_of_the_gradient():
    program = program_of_gradient(loss_of_vectors, AxisType.Auto)
    moved = [c for c in collectives_of(program.as_text()) if c.bytes > 4]
    assert {c.kind for c in moved} == {"all-gather", "all-to-all"}


def test_gradients_of_chunks_of_logits_are_in_parts():
    program = program_of_gradient(loss_of_logits, AxisType.Auto)
    # Those of six chunks are summed over devices one by one, and each device keeps its part.
    assert "f32[1,6,4,2]" in program.as_text()


@pytest.mark.parametrize("loss", [loss_of_vectors, loss_of_logits])
def test_gradients_over_explicit_axes(loss):
    program_of_gradient(loss, AxisType.Explicit)


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


def run_positional(layer, state, *inputs, **kwargs):
    return F(layer, None, state, inputs, is_training=False, **kwargs)[0]


def learned(**fields):
    cfg = LearnedPositionalEmbedding.default_config().set(name="p", dim=2, **fields)
    return cfg.instantiate(parent=None)


def test_learned_table(filled):
    layer = learned(shape=(3,))
    state = filled(layer)
    table = run_positional(layer, state, method="embeddings")
    np.testing.assert_array_equal(table, state["weight"][0])
    np.testing.assert_array_equal(
        run_positional(layer, state, jnp.array([2, 0])), table[jnp.array([2, 0])]
    )
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert spec.mesh_axes == P(None, None, "model")


MODALITY_IDS = jnp.array([[0, 3, 5], [4, 7, 2]])


def info(start, end, name="image"):
    return ModalityVocabInfo(name, 0, 0, start, end, generate_logits=True)


def make_modality(start, end, **kwargs):
    cfg = ModalityEmbedding.default_config().set(
        name="emb", dim=4, modality_vocab_info=info(start, end), **kwargs
    )
    layer = cfg.instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run_modality(layer, params, *inputs, method="forward"):
    return F(layer, None, params, inputs, is_training=True, method=method)[0]


def test_only_ids_of_the_modality_are_embedded():
    layer, params = make_modality(3, 6)
    assert params["weight"].shape == (3, 4)
    y = run_modality(layer, params, {"inputs": MODALITY_IDS})
    expected = np.zeros((2, 3, 4), np.float32)
    for place, row in {(0, 1): 0, (0, 2): 2, (1, 0): 1}.items():
        expected[place] = params["weight"][row]
    np.testing.assert_array_equal(y, expected)


def test_modalities_add_up():
    text, of_text = make_modality(0, 3)
    image, of_image = make_modality(3, 8)
    x = run_modality(text, of_text, {"inputs": MODALITY_IDS})
    y = run_modality(image, of_image, MODALITY_IDS, x, method="lookup_modality_embeddings")
    whole = jnp.concatenate([of_text["weight"], of_image["weight"]])
    np.testing.assert_array_equal(y, whole[MODALITY_IDS])


def test_attend_gives_logits_of_the_modality():
    layer, params = make_modality(3, 6)
    x = jax.random.normal(KEY, (2, 3, 4))
    logits = run_modality(layer, params, x, method="attend")
    np.testing.assert_allclose(logits, x @ params["weight"].T, rtol=1e-4, atol=1e-6)


def test_decoding_embeds_step_by_step():
    layer, params = make_modality(0, 8)
    whole = run_modality(layer, params, {"inputs": MODALITY_IDS})
    cached = layer.init_states(batch_size=2, dtype=jnp.float32)
    for step in range(3):
        inputs = {
            "cached_states": cached,
            "input_batch": {"inputs": MODALITY_IDS[:, step : step + 1]},
        }
        (cached, x), _ = F(layer, None, params, inputs, method="extend_step", is_training=False)
        np.testing.assert_array_equal(x, whole[:, step : step + 1])


def test_scale():
    layer, params = make(scale=Embedding.Scale.UNIT)
    expected = params["weight"][IDS] * 6**0.5
    np.testing.assert_allclose(run(layer, params, IDS), expected, rtol=1e-6)
    layer, params = make(scale=Embedding.Scale.CONSTANT, scale_constant=3.0)
    np.testing.assert_allclose(run(layer, params, IDS), params["weight"][IDS] * 3, rtol=1e-6)
