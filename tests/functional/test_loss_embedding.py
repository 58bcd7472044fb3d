import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import (
    activation_flops,
    elementwise_similarity,
    nearest_neighbor_entropy_loss,
    with_cosine_margin,
)

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
UNIT = X / np.linalg.norm(X, axis=1, keepdims=True)


def test_the_nearest_neighbor_counts():
    distances = np.linalg.norm(UNIT[:, None] - UNIT[None], axis=-1) + 9 * np.eye(5)
    expected = -np.log(distances.min(1)).mean()
    np.testing.assert_allclose(nearest_neighbor_entropy_loss(jnp.array(X)), expected, rtol=1e-4)
    # Without the sphere, the nearest is the one of the largest inner product.
    nearest = (X @ X.T - 99 * np.eye(5)).argmax(1)
    expected = -np.log(np.linalg.norm(X - X[nearest], axis=1)).mean()
    found = nearest_neighbor_entropy_loss(jnp.array(X), normalize_embedding=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_equal_vectors_have_finite_gradients():
    grad = jax.grad(nearest_neighbor_entropy_loss)(jnp.ones((3, 2)).at[0].set(0.0))
    assert np.isfinite(grad).all()


def test_one_vector_has_no_neighbor():
    with pytest.raises(ArgumentValueError, match=r"\(1, 3\) have no neighbors; expected at least"):
        nearest_neighbor_entropy_loss(jnp.array(X[:1]))


def test_products_add_up_to_the_cosine():
    y = X[::-1]
    products = elementwise_similarity(jnp.array(X), jnp.array(y))
    np.testing.assert_allclose(products, UNIT * UNIT[::-1], rtol=1e-5)
    plain = elementwise_similarity(jnp.array(X), jnp.array(y), normalize_embedding=False)
    np.testing.assert_allclose(plain, X * y, rtol=1e-5)


def test_a_zero_vector_has_cosine_zero_and_a_gradient():
    zero = jnp.zeros(3)
    assert elementwise_similarity(zero, jnp.ones(3)).tolist() == [0, 0, 0]
    grad = jax.grad(lambda x: elementwise_similarity(x, jnp.ones(3)).sum())(zero)
    assert np.isfinite(grad).all()


def test_flops_are_squares_of_mean_magnitudes():
    cost, zeros = activation_flops(jnp.array(X), sparsity_threshold=0.5)
    np.testing.assert_allclose(cost, (np.abs(X).mean(0) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(zeros, (np.abs(X) <= 0.5).sum(1).mean(), rtol=1e-5)
    cost, zeros = activation_flops(jnp.array(X), paddings=jnp.array([0, 1, 0, 1, 1]))
    np.testing.assert_allclose(cost, (np.abs(X[[0, 2]]).mean(0) ** 2).sum(), rtol=1e-5)
    assert zeros == 0


def test_the_margin_holds_back_the_right_class():
    targets = np.eye(3, dtype=np.float32)[[0, 1, 2, 1, 0]]
    found = with_cosine_margin(jnp.array(X), jnp.array(targets), alpha=3.0, margin=0.2)
    np.testing.assert_allclose(found, 3 * X - 0.6 * targets, rtol=1e-5, atol=1e-6)
