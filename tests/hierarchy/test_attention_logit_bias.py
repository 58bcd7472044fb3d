import jax.numpy as jnp
import numpy as np

from weft.hierarchy.attention_bias import NEG_INF
from weft.hierarchy.attention_logit_bias import (
    ALiBiAttentionLogitBiasLayer,
    CausalAttentionLogitBiasLayer,
    FullAttentionLogitBiasLayer,
    SymmetricALiBiAttentionLogitBiasLayer,
    alibi_get_slopes,
    apply_attention_logit_biases,
    compute_padding_biases,
)
from weft.hierarchy.module import functional as F

# Two segments of 2 and 3; positions are counted within each.
SEGMENTS, POSITIONS = jnp.array([[1, 1, 2, 2, 2]]), jnp.array([[0, 1, 0, 1, 2]])
ROWS, COLUMNS = np.indices((5, 5))
SAME = np.asarray(SEGMENTS[0][:, None] == SEGMENTS[0][None])
DISTANCE = np.asarray(POSITIONS[0][:, None] - POSITIONS[0][None])


def bias(cls, **fields):
    layer = cls.default_config().set(name="bias", **fields).instantiate(parent=None)
    inputs = {"segment_ids": SEGMENTS, "positions": POSITIONS}
    return np.asarray(F(layer, None, {}, inputs, is_training=False)[0])


def test_full():
    np.testing.assert_array_equal(bias(FullAttentionLogitBiasLayer)[0, 0] == 0, SAME)


def test_causal_within_segments():
    got = bias(CausalAttentionLogitBiasLayer)
    assert got.shape == (1, 1, 5, 5)
    np.testing.assert_array_equal(got[0, 0] == 0, SAME & (COLUMNS <= ROWS))


def test_alibi_falls_with_distance():
    for cls, seen in (
        (ALiBiAttentionLogitBiasLayer, SAME & (COLUMNS <= ROWS)),
        (SymmetricALiBiAttentionLogitBiasLayer, SAME),
    ):
        got = bias(cls, num_heads=2)
        for head, slope in enumerate(alibi_get_slopes(2)):
            expected = -slope * np.abs(DISTANCE)
            np.testing.assert_allclose(got[0, head][seen], expected[seen], rtol=1e-6)
            assert np.all(got[0, head][~seen] < -1e14)


def test_padding():
    ids = jnp.array([[5, 7, 0], [1, 0, 0]])
    got = compute_padding_biases(ids, pad_token_id=0)
    real = np.asarray(ids != 0)
    np.testing.assert_array_equal(got[:, 0] == 0, real[:, :, None] & real[:, None])
    np.testing.assert_array_equal(compute_padding_biases(ids, pad_token_id=None), 0.0)


def test_adding_to_logits():
    logits = jnp.ones((1, 1, 2, 2), jnp.bfloat16)
    assert apply_attention_logit_biases(logits) is logits
    got = apply_attention_logit_biases(logits, jnp.array([[0.0, NEG_INF]]))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0, 0, 0, 0], 1.0)
