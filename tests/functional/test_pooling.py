import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError
from weft.functional import avg_pool, max_pool, min_pool

X = np.random.default_rng(0).normal(size=(2, 6, 7, 3)).astype(np.float32)


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


def test_wrong_window_rank_is_named():
    with pytest.raises(ArgumentShapeError, match=r"window=\(2,\) .* 2 spatial axes"):
        max_pool(jnp.array(X), (2,))
