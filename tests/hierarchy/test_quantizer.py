"""Quantizers, against NumPy and hand-computed values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import ArgumentShapeError, MissingPrngKeyError
from weft.hierarchy.module import functional as F
from weft.hierarchy.param_init import ConstantInitializer, DefaultInitializer
from weft.hierarchy.quantizer import (
    BaseQuantizer,
    GumbelSoftmaxVectorQuantizer,
    KmeansVectorQuantizer,
    RandomVectorQuantizer,
    SimilarityMetric,
    quantize_by_nearest_neighbor,
)

SIZE, DIM, BOOKS = 5, 2, 3
PADDINGS = np.array([[0, 0, 0, 1], [0, 1, 1, 1]], bool)


def made(cls, **fields):
    sizes = {"codebook_size": SIZE, "codebook_dim": DIM, "num_codebooks": BOOKS}
    cfg = cls.default_config().set(name="quantizer", **{**sizes, **fields})
    return cfg.instantiate(parent=None)


def run(layer, state, *args, is_training=False, key=None, method="forward"):
    @jax.jit
    def compiled(key, state, args):
        return F(layer, key, state, args, is_training=is_training, method=method)

    return compiled(key, state, args)


def nearest(x, codebook):
    """Returns the ids of `x`, `(*batch, books, dim)`."""
    codebook = np.asarray(codebook)
    distances = ((x[..., None, :] - np.swapaxes(codebook, 0, 1)) ** 2).sum(-1)
    return distances.argmin(-1)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def chosen(codebook, ids):
    return np.asarray(codebook)[ids, np.arange(BOOKS)]


def test_kmeans(filled, wave):
    layer, x = made(KmeansVectorQuantizer, beta=0.5), wave((2, 4, BOOKS * DIM))
    state = filled(layer)
    output, outputs = run(layer, state, x, PADDINGS)
    frames = np.asarray(x).reshape(2, 4, BOOKS, DIM)
    ids = nearest(frames, state["codebook"])
    vectors = chosen(state["codebook"], ids)
    np.testing.assert_array_equal(output.ids, np.where(PADDINGS[..., None], -1, ids))
    expected = np.where(PADDINGS[..., None, None], 0, vectors)
    np.testing.assert_array_equal(output.quantized_vectors, expected)
    mse = np.mean((frames - vectors)[~PADDINGS] ** 2)
    np.testing.assert_allclose(output.loss, 1.5 * mse, rtol=1e-5)
    for name in ("kmeans_loss", "commitment_loss"):
        np.testing.assert_allclose(outputs.summaries[name], mse, rtol=1e-5)
    np.testing.assert_array_equal(
        run(layer, state, output.ids, method="lookup")[0].quantized_vectors, expected
    )


def test_summaries_count_real_frames(filled, wave):
    layer, x = made(KmeansVectorQuantizer), wave((2, 4, BOOKS * DIM))
    output, outputs = run(layer, filled(layer), x, PADDINGS)
    ids = np.asarray(output.ids)[~PADDINGS]
    shares = np.stack([np.bincount(ids[:, g], minlength=SIZE) / len(ids) for g in range(BOOKS)])
    entropies = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in shares]
    reported = outputs.summaries
    assert reported["codebook/num_frames"] == 4
    expected = {"coverage": np.mean(shares > 0), "entropy": np.mean(entropies)}
    expected["pplx"] = np.mean(np.exp(entropies))
    for name, value in expected.items():
        summary = reported[f"codebook/{name}"]
        np.testing.assert_allclose(summary.mean, value, rtol=1e-5)
        assert summary.weight == 4


def test_kmeans_gradients(filled, wave):
    layer, x = made(KmeansVectorQuantizer), wave((1, 2, BOOKS * DIM))
    state, weights = filled(layer), wave((1, 2, BOOKS, DIM), offset=1.0)

    def of_vectors(state, x):
        return jnp.sum(weights * F(layer, None, state, (x,), is_training=True)[0].quantized_vectors)

    of_codebook, of_inputs = jax.jit(jax.grad(of_vectors, argnums=(0, 1)))(state, x)
    np.testing.assert_array_equal(of_codebook["codebook"], 0)
    np.testing.assert_array_equal(of_inputs.reshape(weights.shape), weights)

    def loss(state, x):
        return F(layer, None, state, (x,), is_training=True)[0].loss

    of_codebook, of_inputs = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, x)
    frames = np.asarray(x).reshape(1, 2, BOOKS, DIM)
    ids = nearest(frames, state["codebook"])
    per_frame = 2 * (chosen(state["codebook"], ids) - frames) / frames.size
    expected = np.zeros((SIZE, BOOKS, DIM))
    np.add.at(expected, (ids, np.arange(BOOKS)), per_frame)
    np.testing.assert_allclose(of_codebook["codebook"], expected, rtol=1e-4, atol=1e-6)
    expected = -0.25 * per_frame.reshape(x.shape)
    np.testing.assert_allclose(of_inputs, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalizes", [True, False])
def test_random_projection(normalizes, filled, wave):
    fields = {"normalize_codebook": normalizes, "normalize_inputs": normalizes, "input_dim": 4}
    layer, x = made(RandomVectorQuantizer, **fields), wave((2, 4, 4))
    state = filled(layer)
    output, _ = run(layer, state, x, PADDINGS)
    projected = np.einsum("bti,igd->btgd", x, state["rand_proj"]["weight"])
    codebook = np.asarray(state["codebook"])
    if normalizes:
        projected, codebook = unit(projected), unit(codebook)
    ids = nearest(projected, codebook)
    np.testing.assert_array_equal(output.ids, np.where(PADDINGS[..., None], -1, ids))
    np.testing.assert_allclose(
        output.quantized_vectors[~PADDINGS], chosen(codebook, ids)[~PADDINGS], rtol=1e-5
    )
    # Nothing is trained.
    specs = jax.tree.leaves(layer.create_parameter_specs_recursively())
    assert all(spec.is_state for spec in specs)

    def total(x):
        return F(layer, None, state, (x,), is_training=True)[0].quantized_vectors.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(x), 0)


def test_similarity():
    codebook = jnp.array([[[1.0, 0.0]], [[3.0, 3.0]]])
    for metric, expected in ((SimilarityMetric.L2_DISTANCE, 0), (SimilarityMetric.DOT_PRODUCT, 1)):
        output = quantize_by_nearest_neighbor(
            jnp.array([[1.0, 0.5]]), codebook=codebook, metric=metric
        )
        assert output.ids.tolist() == [expected]


def gumbel(**fields):
    return made(GumbelSoftmaxVectorQuantizer, input_dim=4, **fields)


def test_gumbel_outside_of_training_is_the_maximum(filled, wave):
    layer, x = gumbel(), wave((2, 4, 4))
    state = filled(layer)
    output, outputs = run(layer, state, x, PADDINGS)
    projection = state["input_proj"]
    logits = np.einsum("bti,igv->btgv", x, projection["weight"]) + np.asarray(projection["bias"])
    ids = logits.argmax(-1)
    np.testing.assert_array_equal(output.ids, np.where(PADDINGS[..., None], -1, ids))
    np.testing.assert_array_equal(
        output.quantized_vectors[~PADDINGS], chosen(state["codebook"], ids)[~PADDINGS]
    )
    assert output.loss is None and "step" not in outputs.state_updates


def test_gumbel_draws_with_the_probabilities(filled):
    layer = made(GumbelSoftmaxVectorQuantizer, input_dim=1)
    state = jax.tree.map(jnp.zeros_like, filled(layer))
    probs = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    bias = np.log(np.maximum(probs, 1e-9), dtype="f")
    state["input_proj"]["bias"] = jnp.broadcast_to(bias, (BOOKS, SIZE))
    x = jnp.zeros((1, 2000, 1))
    output, _ = run(layer, state, x, is_training=True, key=jax.random.key(0))
    share = np.bincount(np.asarray(output.ids).ravel(), minlength=SIZE) / output.ids.size
    np.testing.assert_allclose(share, probs, atol=0.02)
    with pytest.raises(MissingPrngKeyError, match="the noise of quantizer"):
        run(layer, state, x, is_training=True)


def test_gumbel_gradient_is_that_of_the_softmax(filled, wave):
    layer, x = gumbel(temperature_schedule=lambda step: 2.0 / (step + 1)), wave((1, 2, 4))
    state, key = {**filled(layer), "step": jnp.array(3)}, jax.random.key(1)

    def forward(projection):
        return F(layer, key, {**state, "input_proj": projection}, (x,), is_training=True)

    def soft(projection):
        noise = jax.random.gumbel(key, (1, 2, BOOKS, SIZE))
        logits = jnp.einsum("bti,igv->btgv", x, projection["weight"])
        probs = jax.nn.softmax((logits + projection["bias"][None, None] + noise) / 0.5)
        return jnp.einsum("btgv,vgd->btgd", probs, state["codebook"]).sum()

    def total(projection):
        output, outputs = forward(projection)
        return output.quantized_vectors.sum(), outputs

    got, outputs = jax.jit(jax.grad(total, has_aux=True))(state["input_proj"])
    expected = jax.jit(jax.grad(soft))(state["input_proj"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
    assert outputs.state_updates["step"] == 4 and outputs.summaries["temperature"] == 0.5


def test_initial_values():
    state = made(KmeansVectorQuantizer, codebook_size=2000).initialize_parameters_recursively(
        jax.random.key(0)
    )
    np.testing.assert_allclose(jnp.std(state["codebook"]), 1.0, atol=0.02)
    rules = {"codebook": ConstantInitializer.default_config().set(value=2.0)}
    param_init = DefaultInitializer.default_config().set(init_by_param_name=rules)
    state = gumbel(param_init=param_init).initialize_parameters_recursively(jax.random.key(0))
    np.testing.assert_array_equal(state["codebook"], 2.0)
    assert state["step"].dtype == jnp.int32
    specs = made(KmeansVectorQuantizer, param_partition_spec=("model",))
    specs = specs.create_parameter_specs_recursively()
    assert specs["codebook"].partition_spec == PartitionSpec("model", None, None)


def test_wrong_input_raises(wave):
    layer = made(KmeansVectorQuantizer)
    said = "quantizer: inputs of shape (1, 2, 4); expected a last axis of num_codebooks * codebook_"
    with pytest.raises(ArgumentShapeError, match=re.escape(said)):
        run(layer, {}, wave((1, 2, 4)))
    with pytest.raises(NotImplementedError):
        run(made(BaseQuantizer), {}, wave((1, 2, 4)))
