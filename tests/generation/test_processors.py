"""The changes of logits are those of the processors of `transformers`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import (
    EXCLUDED_LOGIT,
    min_p_logits,
    penalize_repetition,
    top_k_logits,
    top_p_logits,
)

IDS = np.array([[3, 5, 5], [0, 1, 2]])


def penalized(logits):
    seen = jnp.any(jax.nn.one_hot(IDS, logits.shape[-1], dtype=bool), axis=1)
    return penalize_repetition(logits, seen, 1.3)


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("TopKLogitsWarper", 5, top_k_logits(5)),
        ("TopPLogitsWarper", 0.8, top_p_logits(0.8)),
        ("MinPLogitsWarper", 0.1, min_p_logits(0.1)),
        ("RepetitionPenaltyLogitsProcessor", 1.3, penalized),
    ],
)
def test_change_is_that_of_transformers(transformers, name, value, change):
    import torch

    logits = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    processor = getattr(transformers, name)(value)
    expected = processor(torch.tensor(IDS), torch.tensor(logits)).numpy()
    changed = np.asarray(change(jnp.asarray(logits)))
    is_kept = np.isfinite(expected)
    np.testing.assert_array_equal(changed > EXCLUDED_LOGIT, is_kept)
    np.testing.assert_allclose(changed[is_kept], expected[is_kept], rtol=1e-6)
