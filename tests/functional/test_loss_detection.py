import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import focal_loss, generalized_iou

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("alpha, gamma", [(0.25, 1.5), (0.5, 2.0), (0.25, 0.0)])
def test_focal_loss_by_its_formula(alpha, gamma):
    logits = RNG.normal(size=(3, 4)).astype(np.float32)
    targets = RNG.integers(0, 2, (3, 4))
    p = 1 / (1 + np.exp(-logits))
    p_t = np.where(targets, p, 1 - p)
    alpha_t = np.where(targets, alpha, 1 - alpha)
    expected = -alpha_t * (1 - p_t) ** gamma * np.log(p_t)
    found = focal_loss(jnp.array(logits), jnp.array(targets), alpha=alpha, gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_focal_loss_has_gradients_at_large_logits():
    grad = jax.grad(lambda x: focal_loss(x, jnp.array([1, 0])).sum())(jnp.array([200.0, 200.0]))
    assert np.isfinite(grad).all()


def iou(a, b):
    """Boxes of whole numbers, by counting unit squares."""

    def cells(box):
        return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}

    low, high = np.minimum(a, b)[:2], np.maximum(a, b)[2:]
    around, union = np.prod(high - low), cells(a) | cells(b)
    return len(cells(a) & cells(b)) / len(union) - (around - len(union)) / around


def test_generalized_iou_by_counting():
    corners = RNG.integers(0, 6, (20, 2, 2))
    boxes = np.concatenate([corners, corners + RNG.integers(1, 5, (20, 2, 2))], axis=2)
    a, b = boxes[:, 0], boxes[:, 1]
    expected = [iou(x, y) for x, y in zip(a, b, strict=True)]
    found = generalized_iou(jnp.array(a, jnp.float32), jnp.array(b, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
