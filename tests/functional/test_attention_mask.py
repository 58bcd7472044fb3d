import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.functional import (
    NEG_INF,
    and_masks,
    bool_to_bias,
    causal_mask,
    evaluate_mask,
    left_right_window_mask,
    or_masks,
    segment_mask,
    sliding_window_causal_mask,
    truncated_key_mask,
)
from weft.functional.attention_mask import combine_masks, make_attention_mask, make_causal_mask

MASKS = {
    "causal": (causal_mask, lambda q, k: k <= q),
    "sliding": (sliding_window_causal_mask(2), lambda q, k: q - 2 <= k <= q),
    "window": (left_right_window_mask(1, 2), lambda q, k: q - 1 <= k <= q + 2),
    "left": (left_right_window_mask(1, None), lambda q, k: q - 1 <= k),
    "right": (left_right_window_mask(None, 0), lambda q, k: k <= q),
    "all": (left_right_window_mask(None, None), lambda q, k: True),
    "truncated": (truncated_key_mask(3), lambda q, k: k < 3),
    "and": (and_masks(causal_mask, truncated_key_mask(2)), lambda q, k: k <= q and k < 2),
    "or": (or_masks(causal_mask, truncated_key_mask(2)), lambda q, k: k <= q or k < 2),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_pairs(name):
    mask, rule = MASKS[name]
    queries, keys = np.array([[0, 1, 2], [3, 5, 4]]), np.array([[0, 1, 2, 3, 4, 5]] * 2)
    out = evaluate_mask(mask, jnp.array(queries), jnp.array(keys))
    expected = [[[[bool(rule(q, k)) for k in keys[b]] for q in queries[b]]] for b in range(2)]
    assert out.dtype == bool
    np.testing.assert_array_equal(out, expected)


def test_valid_keys_may_differ_by_example():
    mask = truncated_key_mask(jnp.array([1, 3])[:, None, None, None])
    out = evaluate_mask(mask, jnp.zeros((2, 1), int), jnp.arange(4)[None])
    assert out[:, 0, 0].sum(-1).tolist() == [1, 3]


def test_segments_attend_to_themselves():
    out = segment_mask(jnp.array([[1, 2]]), jnp.array([[1, 1, 2]]))
    assert out.astype(int).tolist() == [[[[1, 1, 0], [0, 0, 1]]]]


def test_bias_is_zero_or_hides_every_logit():
    bias = bool_to_bias(jnp.array([True, False]))
    assert bias.dtype == jnp.float32
    assert bias[0] == 0
    assert bias[1] == np.float32(NEG_INF) == np.float32(NEG_INF) + np.float32(1e6)


VALID = jnp.array([[1, 1, 0], [1, 0, 0]])


def test_mask_requires_query_and_key():
    mask = make_attention_mask(VALID, VALID[:, :2])
    assert mask.shape == (2, 1, 3, 2) and mask.dtype == jnp.float32
    assert mask[0, 0].tolist() == [[1, 1], [1, 1], [0, 0]]


def test_combined():
    causal = make_causal_mask(VALID)
    combined = combine_masks(None, causal, make_attention_mask(VALID, VALID))
    assert combined.dtype == jnp.float32
    assert combined[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert combine_masks() is None and combine_masks(None) is None
    assert combine_masks(causal, causal[:1], dtype=bool).shape == causal.shape


def test_errors():
    with pytest.raises(ArgumentShapeError, match=r"shapes \[\(2, 3\), \(3,\)\]; expected the same"):
        combine_masks(VALID, VALID[0])
    with pytest.raises(
        ArgumentShapeError, match=r"shapes \(\) and \(2, 3\); expected \(\*batch, l"
    ):
        make_attention_mask(1.0, VALID)
