import jax
import jax.numpy as jnp
import numpy as np

from weft.hierarchy.modality_embedding import ModalityEmbedding, ModalityVocabInfo
from weft.hierarchy.module import functional as F

KEY = jax.random.key(0)
IDS = jnp.array([[0, 3, 5], [4, 7, 2]])


def info(start, end, name="image"):
    return ModalityVocabInfo(name, 0, 0, start, end, generate_logits=True)


def make(start, end, **kwargs):
    cfg = ModalityEmbedding.default_config().set(
        name="emb", dim=4, modality_vocab_info=info(start, end), **kwargs
    )
    layer = cfg.instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run(layer, params, *inputs, method="forward"):
    return F(layer, None, params, inputs, is_training=True, method=method)[0]


def test_only_ids_of_the_modality_are_embedded():
    layer, params = make(3, 6)
    assert params["weight"].shape == (3, 4)
    y = run(layer, params, {"inputs": IDS})
    expected = np.zeros((2, 3, 4), np.float32)
    for place, row in {(0, 1): 0, (0, 2): 2, (1, 0): 1}.items():
        expected[place] = params["weight"][row]
    np.testing.assert_array_equal(y, expected)


def test_modalities_add_up():
    text, of_text = make(0, 3)
    image, of_image = make(3, 8)
    x = run(text, of_text, {"inputs": IDS})
    y = run(image, of_image, IDS, x, method="lookup_modality_embeddings")
    whole = jnp.concatenate([of_text["weight"], of_image["weight"]])
    np.testing.assert_array_equal(y, whole[IDS])


def test_attend_gives_logits_of_the_modality():
    layer, params = make(3, 6)
    x = jax.random.normal(KEY, (2, 3, 4))
    logits = run(layer, params, x, method="attend")
    np.testing.assert_allclose(logits, x @ params["weight"].T, rtol=1e-4, atol=1e-6)


def test_other_modalities_have_no_gradient():
    layer, params = make(3, 6)
    grads = jax.jit(jax.grad(lambda params: run(layer, params, {"inputs": IDS}).sum()))(params)
    np.testing.assert_array_equal(grads["weight"][:, 0], [1, 1, 1])


def test_decoding_embeds_one_step_after_the_other():
    layer, params = make(0, 8)
    whole = run(layer, params, {"inputs": IDS})
    cached = layer.init_states(batch_size=2, dtype=jnp.float32)
    for step in range(3):
        inputs = {"cached_states": cached, "input_batch": {"inputs": IDS[:, step : step + 1]}}
        (cached, x), _ = F(layer, None, params, inputs, method="extend_step", is_training=False)
        np.testing.assert_array_equal(x, whole[:, step : step + 1])


def test_vocab_size():
    assert info(10, 14).vocab_size == 4
