import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional.weight_norm import spectral_norm, weight_features, weight_norm

RNG = np.random.default_rng(0)
WEIGHT = jnp.array(RNG.normal(size=(3, 4, 5)).astype(np.float32))


@pytest.mark.parametrize(
    "axes, norms", [(-1, (5,)), ((0, -1), (3, 5)), ((2, 1), (4, 5)), (None, ())]
)
def test_norms_are_the_scales(axes, norms):
    scale = jnp.array(RNG.uniform(1, 2, size=norms).astype(np.float32))
    features = weight_features(WEIGHT.shape, axes)
    shared = tuple(a for a in range(3) if a not in features)
    norm = np.sqrt(np.square(weight_norm(WEIGHT, scale, feature_axes=axes)).sum(shared))
    np.testing.assert_allclose(norm, scale, rtol=1e-5)
    norm = np.sqrt(np.square(weight_norm(WEIGHT, feature_axes=axes)).sum(shared))
    np.testing.assert_allclose(norm, np.ones(norms), rtol=1e-5)


def test_direction_stays():
    y = weight_norm(3 * WEIGHT, jnp.arange(5.0))
    np.testing.assert_allclose(y, weight_norm(WEIGHT, jnp.arange(5.0)), rtol=1e-5)


def test_the_largest_singular_value_is_one():
    u = jnp.ones((1, 5))
    weight, new, sigma = spectral_norm(WEIGHT, u, n_steps=60)
    exact = np.linalg.svd(WEIGHT.reshape(12, 5), compute_uv=False)[0]
    np.testing.assert_allclose(sigma, exact, rtol=1e-4)
    np.testing.assert_allclose(weight, WEIGHT / exact, rtol=1e-4)
    _, _, again = spectral_norm(WEIGHT, new)
    np.testing.assert_allclose(again, exact, rtol=1e-4)


def test_zeros_stay_zeros():
    weight, _, _ = spectral_norm(jnp.zeros((3, 4)), jnp.ones((1, 4)))
    assert weight.tolist() == jnp.zeros((3, 4)).tolist()


def test_gradients_see_the_vectors_as_constants():
    matrix, u = WEIGHT[0], jnp.ones((1, 5))
    _, new, _ = spectral_norm(matrix, u)
    v = u @ matrix.T
    v = v / jnp.linalg.norm(v)
    found = jax.grad(lambda w: spectral_norm(w, u)[2])(matrix)
    np.testing.assert_allclose(found, v.T @ new, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_named():
    with pytest.raises(ArgumentValueError, match=r"feature_axes=3 .* shape \(3, 4, 5\)"):
        weight_norm(WEIGHT, feature_axes=3)
    with pytest.raises(ArgumentValueError, match="n_steps=0: expected at least one"):
        spectral_norm(WEIGHT, jnp.ones((1, 5)), n_steps=0)
