import jax.numpy as jnp
import pytest

from weft.core.nn import avg_pool, max_pool
from weft.errors import ArgumentShapeError, ArgumentValueError

X = jnp.arange(5.0).reshape(1, 5, 1)


@pytest.mark.parametrize(
    ("pool", "kwargs", "expected"),
    [
        (max_pool, {}, [1, 2, 3, 4]),
        (max_pool, {"strides": (2,), "padding": "SAME"}, [1, 3, 4]),
        (avg_pool, {"strides": (2,)}, [0.5, 2.5]),
        (avg_pool, {"strides": (2,), "padding": "SAME"}, [0.5, 2.5, 2]),
        (avg_pool, {"strides": (2,), "padding": "SAME", "count_include_pad": False}, [0.5, 2.5, 4]),
        (max_pool, {"padding": ((1, 0),)}, [0, 1, 2, 3, 4]),
    ],
)
def test_windows(pool, kwargs, expected):
    assert pool(X, (2,), **kwargs).ravel().tolist() == expected


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_bad_windows(pool):
    with pytest.raises(ArgumentShapeError, match=r"for 3 spatial axes, but .* there are 2"):
        pool(X, (2, 2, 2))
    with pytest.raises(ArgumentShapeError, match=r"window=\(2,\), strides=\(1, 1\)"):
        pool(X, (2,), strides=(1, 1))
    with pytest.raises(ArgumentValueError, match="'FULL' is neither one of SAME, VALID"):
        pool(X, (2,), padding="FULL")
