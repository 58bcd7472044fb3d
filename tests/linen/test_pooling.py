import jax
import jax.numpy as jnp
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen import pooling

X = jnp.arange(1.0, 7.0).reshape(1, 6, 1)


def flat(y):
    return y.ravel().tolist()


def test_each_window_gives_one_number():
    assert flat(pooling.max_pool(X, (2,), (2,))) == [2, 4, 6]
    assert flat(pooling.min_pool(X, (2,), (2,))) == [1, 3, 5]
    assert flat(pooling.avg_pool(X, (3,), (3,))) == [2, 5]
    assert flat(pooling.pool(X, 1.0, jax.lax.mul, (3,), (3,), "VALID")) == [6, 120]


def test_padding_never_wins():
    assert flat(pooling.max_pool(-X, (3,), (3,), ((1, 2),))) == [-1, -3, -6]
    assert flat(pooling.min_pool(X, (3,), (3,), ((1, 2),))) == [1, 3, 6]


def test_a_window_for_more_axes_than_there_are():
    with pytest.raises(ArgumentShapeError, match=r"window_shape=\(2, 2, 2\) is for 3 spatial axes"):
        pooling.pool(X, 0.0, jax.lax.add, (2, 2, 2), None, "VALID")


def test_an_unknown_padding():
    with pytest.raises(ArgumentValueError, match="padding='HALF' is neither one of SAME, VALID"):
        pooling.min_pool(X, (2,), padding="HALF")
