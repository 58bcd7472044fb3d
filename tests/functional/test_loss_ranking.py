import jax.numpy as jnp
import numpy as np

from weft.functional import pairwise_loss, rank_pairs

RNG = np.random.default_rng(0)


def test_pairs_are_of_different_ranks():
    pairs = np.asarray(rank_pairs(jnp.array([[2, 1, 2, 0, 3]])))[0]
    expected = np.zeros((5, 5))
    expected[1, [0, 2, 4]] = expected[[0, 2], 4] = 1
    np.testing.assert_array_equal(pairs, expected)


def test_pairwise_loss_by_its_sum():
    logits = RNG.normal(size=(2, 3)).astype(np.float32)
    weights = RNG.uniform(size=(2, 3, 3)).astype(np.float32)
    scale = np.array([1.0, 3.0], np.float32)
    total = sum(
        scale[b] * weights[b, i, j] * np.log1p(np.exp(logits[b, j] - logits[b, i]))
        for b in range(2)
        for i in range(3)
        for j in range(3)
    )
    loss, weight = pairwise_loss(
        logits=jnp.array(logits), pair_weights=jnp.array(weights), loss_scale=jnp.array(scale)
    )
    np.testing.assert_allclose(loss, total / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-5)


def test_without_pairs_there_is_no_loss():
    nothing = jnp.zeros((1, 2, 2))
    loss, weight = pairwise_loss(
        logits=jnp.ones((1, 2)), pair_weights=nothing, loss_scale=jnp.ones(1)
    )
    assert (float(loss), float(weight)) == (0, 0)
