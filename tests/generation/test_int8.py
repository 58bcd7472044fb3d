"""Texts of models whose weights are in int8: nearly the same logits, in a quarter of the memory."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from tests.interop.huggingface.test_checkpoint import GPT2
from tests.interop.huggingface.test_families import GROUPED
from tests.keys import quick_key
from weft import linen
from weft.config import config_for_class
from weft.errors import GenerationError
from weft.functional import Int8Weight
from weft.generation import Generator, LanguageModel
from weft.generation.decoding_models import decoding_model
from weft.hierarchy import TransformerFeedForwardMoE
from weft.hierarchy.module import functional
from weft.input import ByteTokenizer
from weft.interop.huggingface import FAMILIES
from weft.interop.huggingface.settings import Settings
from weft.recipes.lm import lm_tiny
from weft.trainer.model import LibraryModel

pytestmark = pytest.mark.usefixtures("one_device")

TEXT = b"to be or not to be, that is the question"


def tiny_layer():
    return lm_tiny().model.set(name="model").instantiate(parent=None)


@functools.cache
def trained_params():
    """Returns parameters of a tiny model that has learned a text by heart."""
    layer = tiny_layer()
    tokens = jnp.array([ByteTokenizer.eos_id, *TEXT])[None, :33]
    batch = {"input_ids": tokens[:, :-1], "target_labels": tokens[:, 1:]}
    optimizer = optax.adam(1e-2)

    def loss(params):
        outputs, _ = functional(layer, None, params, (batch,), is_training=False)
        return outputs[0]

    @jax.jit
    def train(params):
        def step(_, carry):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return optax.apply_updates(params, updates), state

        params, _ = jax.lax.fori_loop(0, 120, step, (params, optimizer.init(params)))
        return params

    return train(layer.initialize_parameters_recursively(quick_key(0)))


def language_model(params):
    end_ids = [ByteTokenizer.eos_id]
    return LanguageModel(tiny_layer(), params, ByteTokenizer(), end_ids, start_ids=end_ids)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_likeliest_text_of_a_trained_model_is_the_same(batch_size):
    model = language_model(trained_params())
    prompts = ["to be or ", "to be"]
    settings = {"tokens": 12, "temperature": 0, "batch_size": batch_size}
    completions = weft.generate(model, prompts, weights="int8", **settings)
    assert completions == weft.generate(model, prompts, **settings)
    assert completions[0].text.startswith("not to be")


def logits(layer, params, weights):
    """Returns the logits after a prompt, and after one more token."""
    decoding = decoding_model(layer, weights)

    @jax.jit
    def compute(params):
        params = decoding.prepare(params)
        state, first = decoding.prefill(params, jnp.arange(16), jnp.int32(9))
        _, second = decoding.step(params, state, jnp.array([3]))
        return jnp.stack([first, second[0]])

    return compute(params)


# With fused and separate projections, biases, a tied embedding and an output layer.
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_logits_are_near_those_of_floats(family):
    settings = GPT2 if family == "gpt2" else GROUPED
    settings = {"model_type": family, "hidden_act": "silu", **settings}
    cfg = FAMILIES[family].read(Settings(settings))
    layer = cfg.set(name="model").instantiate(parent=None)
    params = layer.initialize_parameters_recursively(quick_key(0))
    noise = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.2 * noise.normal(size=x.shape).astype(x.dtype), params)
    expected = logits(layer, params, None)
    difference = logits(layer, params, "int8") - expected
    assert 0 < jnp.linalg.norm(difference) < 0.03 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_parameters_of_the_model_are_not_kept(weights):
    params = tiny_layer().initialize_parameters_recursively(quick_key(0))
    stacked = params["decoder"]["transformer"]["repeat"]["layer"]
    (first, *_) = map(weakref.ref, jax.tree.leaves(stacked))
    generator = Generator(language_model(params), weights=weights)
    del params, stacked
    gc.collect()
    assert first() is None
    assert len(generator.generate("to", tokens=2)) == 1


def test_no_copy_in_floats_is_kept():
    layer = tiny_layer()
    params = layer.initialize_parameters_recursively(quick_key(0))
    float_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim > 1}

    def num_matrices():
        gc.collect()
        return sum(x.shape in shapes and x.dtype == jnp.float32 for x in jax.live_arrays())

    before = num_matrices()
    generator = Generator(language_model(params), weights="int8")
    kept = generator._engine._params
    generator.generate("to", tokens=2)
    del params
    assert num_matrices() < before
    weights = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, Int8Weight))
    assert all(isinstance(x, Int8Weight) or x.ndim == 1 for x in weights)
    # The model is so narrow that scales and norms take a part.
    assert sum(x.nbytes for x in jax.tree.leaves(kept)) < 0.33 * float_bytes


def test_new_parameters_are_in_int8():
    model = language_model(trained_params())
    zeros = jax.tree.map(jnp.zeros_like, trained_params())
    generator = Generator(language_model(zeros), weights="int8")
    generator.set_params(trained_params())
    settings = {"tokens": 6, "temperature": 0}
    assert generator.generate("to be", **settings) == weft.generate(model, "to be", **settings)
    assert np.dtype("int8") in {x.dtype for x in jax.tree.leaves(generator._engine._params)}


def test_weights_without_int8_are_refused():
    with pytest.raises(GenerationError, match=r"weights='int4'; expected 'int8', or None"):
        decoding_model(tiny_layer(), "int4")  # type: ignore[arg-type]

    class NextByte(linen.Module):
        def __call__(self, input_batch):
            return jnp.float32(0), {}

        def predict(self, input_batch):
            return {"logits": jax.nn.one_hot(input_batch["input_ids"], 258)}

    inputs = ({"input_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)},)
    cfg = LibraryModel.default_config().set(layer=config_for_class(NextByte), inputs=inputs)
    layer = cfg.set(name="model").instantiate(parent=None)
    message = r"weights='int8' is for language models of the hierarchy.*a LibraryModel; leave"
    with pytest.raises(GenerationError, match=message):
        weft.generate(LanguageModel(layer, {}), [1], weights="int8")

    cfg = lm_tiny().model
    moe = TransformerFeedForwardMoE.default_config().set(num_experts=2, hidden_dim=8, num_groups=1)
    cfg.decoder.transformer.layer.feed_forward = moe
    layer = cfg.set(name="model").instantiate(parent=None)
    with pytest.raises(GenerationError, match=r"those of experts, such as model\.decoder.*leave"):
        decoding_model(layer, "int8")
