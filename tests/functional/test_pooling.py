import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.functional import avg_pool, max_pool, min_pool

X = np.random.default_rng(0).normal(size=(2, 6, 7, 3)).astype(np.float32)


def windows(x, window, strides):
    view = np.lib.stride_tricks.sliding_window_view(x, window, axis=(1, 2))
    return view[:, :: strides[0], :: strides[1]]


@pytest.mark.parametrize("window, strides", [((2, 2), (1, 1)), ((3, 2), (2, 2))])
@pytest.mark.parametrize(
    "pool, reduce", [(max_pool, np.max), (min_pool, np.min), (avg_pool, np.mean)]
)
def test_pooling_reduces_each_window(pool, reduce, window, strides):
    y = pool(jnp.array(X), window, strides=strides)
    np.testing.assert_allclose(y, reduce(windows(X, window, strides), (-1, -2)), rtol=1e-5)


def test_padding_is_never_max():
    negative = -jnp.ones((1, 4, 1))
    assert max_pool(negative, (3,), padding="SAME").tolist() == negative.tolist()
    assert min_pool(-negative, (3,), padding="SAME").tolist() == (-negative).tolist()


def test_average_may_exclude_padding():
    ones = jnp.ones((1, 4, 1))
    counted = avg_pool(ones, (3,), padding="SAME").ravel()
    np.testing.assert_allclose(counted, [2 / 3, 1, 1, 2 / 3], rtol=1e-6)
    left_out = avg_pool(ones, (3,), padding="SAME", count_include_pad=False).ravel()
    np.testing.assert_allclose(left_out, [1, 1, 1, 1], rtol=1e-6)


def test_integer_max_pooling():
    assert max_pool(jnp.array([[[-3], [-5]]]), (2,), padding=((1, 1),)).ravel().tolist() == [
        -3,
        -3,
        -5,
    ]


@pytest.mark.parametrize("pool", [max_pool, min_pool, avg_pool])
def test_dtype_jit_and_gradient(pool):
    x = jnp.array(X, jnp.bfloat16)
    assert jax.jit(lambda x: pool(x, (2, 2), padding="SAME"))(x).dtype == jnp.bfloat16
    grad = jax.grad(lambda x: pool(x, (2, 2)).sum())(jnp.array(X))
    np.testing.assert_allclose(grad.sum(), 2 * 5 * 6 * 3, rtol=1e-5)


def test_wrong_window_rank_is_named():
    with pytest.raises(ArgumentShapeError, match=r"window=\(2,\) .* 2 spatial axes"):
        max_pool(jnp.array(X), (2,))
