import jax.numpy as jnp
import pytest

from weft.core.nn import avg_pool, max_pool

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
