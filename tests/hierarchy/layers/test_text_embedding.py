import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.layers import Dropout, Embedding, LayerNorm
from weft.hierarchy.layers.embedding import LearnedPositionalEmbedding, TransformerTextEmbeddings
from weft.hierarchy.module import functional

IDS = jnp.array([[1, 4, 2], [3, 3, 0]])
DIM, VOCAB = 4, 5


def make(**fields):
    cfg = TransformerTextEmbeddings.default_config().set(
        name="emb", dim=DIM, vocab_size=VOCAB, **fields
    )
    emb = cfg.instantiate(parent=None)
    return emb, emb.initialize_parameters_recursively(jax.random.key(0))


def call(emb, state, *inputs, method="forward", is_training=False, **kwargs):
    return functional(
        emb,
        prng_key=jax.random.key(1),
        state=state,
        inputs=kwargs or inputs,
        method=method,
        is_training=is_training,
    )[0]


def test_token_only_lookup():
    emb, state = make()
    x = call(emb, state, {"inputs": IDS})
    np.testing.assert_array_equal(x, state["token_emb"]["weight"][IDS])


def test_token_type_and_position_embeddings_add():
    emb, state = make(
        type_emb=Embedding.default_config().set(num_embeddings=2),
        pos_emb=LearnedPositionalEmbedding.default_config().set(shape=(7,)),
    )
    token, kind, place = (
        np.asarray(state[name]["weight"]).reshape(-1, DIM)
        for name in ("token_emb", "type_emb", "pos_emb")
    )
    x = call(emb, state, {"inputs": IDS})
    np.testing.assert_allclose(x, token[IDS] + kind[0] + place[:3], rtol=1e-6)
    types, positions = jnp.array([[0, 1, 1], [1, 0, 0]]), jnp.array([[0, 1, 0], [5, 6, 0]])
    x = call(emb, state, {"inputs": IDS, "token_type_ids": types, "positions": positions})
    np.testing.assert_allclose(x, token[IDS] + kind[types] + place[positions], rtol=1e-6)


def test_norm_precedes_dropout():
    emb, state = make(
        norm=LayerNorm.default_config(), dropout=Dropout.default_config().set(rate=0.5)
    )
    x = call(emb, state, {"inputs": IDS})
    np.testing.assert_allclose(np.mean(x, axis=-1), 0, atol=1e-5)
    dropped = call(emb, state, {"inputs": IDS}, is_training=True)
    kept = np.asarray(dropped) != 0
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(np.asarray(dropped)[kept], 2 * np.asarray(x)[kept], rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_attend_applies_soft_cap(cap):
    emb, state = make(soft_cap_logits=cap)
    x = jax.random.normal(jax.random.key(2), (2, 3, DIM))
    logits = np.asarray(x) @ np.asarray(state["token_emb"]["weight"]).T
    expected = logits if cap is None else cap * np.tanh(logits / cap)
    np.testing.assert_allclose(call(emb, state, x, method="attend"), expected, rtol=1e-4)


def test_stepwise_embedding_equals_the_whole_sequence():
    emb, state = make(pos_emb=LearnedPositionalEmbedding.default_config().set(shape=(7,)))
    together = call(emb, state, {"inputs": IDS})
    states = call(emb, state, method="init_states", batch_size=2, dtype=jnp.float32)
    for t in range(3):
        states, x = call(
            emb,
            state,
            method="extend_step",
            cached_states=states,
            input_batch={"inputs": IDS[:, t : t + 1], "positions": jnp.full((2, 1), t)},
        )
        np.testing.assert_array_equal(x[:, 0], together[:, t])
