"""Pooling of NNX: the functions of `weft.functional.window_pooling`, which are tested there."""

import jax.numpy as jnp

from weft.nnx.nn.pooling import avg_pool, max_pool, min_pool, pool

X = jnp.arange(4.0).reshape(1, 4, 1)


def test_windows_are_pooled():
    pooled = [f(X, (2,), strides=(2,)).ravel().tolist() for f in (avg_pool, max_pool, min_pool)]
    assert pooled == [[0.5, 2.5], [1.0, 3.0], [0.0, 2.0]]
    assert pool(X, 0.0, jnp.add, (2,), (2,), "VALID").ravel().tolist() == [1.0, 5.0]
