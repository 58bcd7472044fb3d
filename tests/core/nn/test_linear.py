import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core import apply, init
from weft.core.nn import dense, dense_general
from weft.errors import ArgumentShapeError

KEY = jax.random.key(0)


def test_a_linear_map_of_the_last_axis():
    x = jax.random.normal(KEY, (2, 3))
    y, variables = init(dense)(KEY, x, 4, bias_init=jax.nn.initializers.ones)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    np.testing.assert_allclose(y, x @ kernel + bias[None], rtol=1e-5)
    np.testing.assert_array_equal(apply(dense)(variables, x, 4), y)


def test_any_axes_are_contracted():
    x = jax.random.normal(KEY, (2, 3, 4))
    y, variables = init(dense_general)(KEY, x, (5, 6), axis=(1, -1))
    expected = jnp.einsum("bij,ijfg->bfg", x, variables["params"]["kernel"])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_positions_of_batch_axes_have_their_own_parameters():
    x = jax.random.normal(KEY, (2, 3, 4))
    _, variables = init(dense_general)(KEY, x, 5, batch_dims=0)
    params = variables["params"]
    params["kernel"] = params["kernel"] * jnp.array([1.0, 2.0])[:, None, None]
    expected = jnp.einsum("bij,bjf->bif", x, params["kernel"])
    y = apply(dense_general)(variables, x, 5, batch_dims=0)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_batch_axes_come_in_the_order_they_are_named():
    x = jax.random.normal(KEY, (2, 3, 4))
    y, variables = init(dense_general)(KEY, x, 5, batch_dims=(1, 0))
    expected = jnp.einsum("bij,ibjf->ibf", x, variables["params"]["kernel"])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_batch_axes_come_first():
    with pytest.raises(ArgumentShapeError, match=r"batch_dims is \(1,\); expected the first axes"):
        init(dense_general)(KEY, jnp.ones((2, 3, 4)), 5, batch_dims=1)
