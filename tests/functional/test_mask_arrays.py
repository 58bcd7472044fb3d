import jax.numpy as jnp
import pytest

from weft.errors import ArgumentShapeError
from weft.functional.mask_arrays import combine_masks, make_attention_mask, make_causal_mask

VALID = jnp.array([[1, 1, 0], [1, 0, 0]])


def test_both_must_be_there():
    mask = make_attention_mask(VALID, VALID[:, :2])
    assert mask.shape == (2, 1, 3, 2) and mask.dtype == jnp.float32
    assert mask[0, 0].tolist() == [[1, 1], [1, 1], [0, 0]]


def test_segments():
    segments = jnp.array([1, 1, 2])
    mask = make_attention_mask(segments, segments, jnp.equal, extra_batch_dims=2, dtype=bool)
    assert mask.shape == (1, 1, 1, 3, 3) and mask.dtype == bool
    assert mask[0, 0, 0].astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_causal():
    mask = make_causal_mask(jnp.ones((4, 2, 3)), extra_batch_dims=1, dtype=jnp.int32)
    assert mask.shape == (1, 4, 2, 1, 3, 3) and mask.dtype == jnp.int32
    assert mask[0, 3, 1, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


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
