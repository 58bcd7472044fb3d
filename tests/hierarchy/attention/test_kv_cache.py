import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.hierarchy.attention.kv_cache import KVCache

SHAPE = (2, 5, 1, 3)


def cache(**fields):
    return KVCache.default_config().set(name="cache", **fields).instantiate(parent=None)


def step(layer, states, positions, length, **kwargs):
    k = jnp.arange(2 * length * 3.0).reshape(2, length, 1, 3) + 1
    return layer.extend_step(
        states, k_proj=k, v_proj=-k, key_positions=jnp.asarray(positions), **kwargs
    ), k


def test_writes_at_each_time_step():
    layer = cache()
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    (states, kv), k = step(layer, states, [[0, 1], [2, 3]], 2)
    np.testing.assert_array_equal(kv.k_proj[0, :2], k[0])
    np.testing.assert_array_equal(kv.k_proj[1, 2:4], k[1])
    np.testing.assert_array_equal(kv.v_proj, -kv.k_proj)
    assert not np.any(kv.k_proj[0, 2:]) and not np.any(kv.k_proj[1, :2])
    np.testing.assert_array_equal(kv.key_positions, [range(5)])
    (_, later), k = step(layer, states, [[2], [4]], 1)
    np.testing.assert_array_equal(later.k_proj[0, :2], kv.k_proj[0, :2])
    np.testing.assert_array_equal(later.k_proj[0, 2], k[0, 0])
    np.testing.assert_array_equal(later.k_proj[1, 4], k[1, 0])


def test_padding_is_not_written():
    layer = cache()
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    (_, kv), k = step(layer, states, [[0, 1, 2]], 3, unpadded_len=jnp.array([1, 3]))
    np.testing.assert_array_equal(kv.k_proj[0, 0], k[0, 0])
    assert not np.any(kv.k_proj[0, 1:])
    np.testing.assert_array_equal(kv.k_proj[1, :3], k[1])


def test_positions_past_the_end_are_dropped():
    layer = cache()
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    (_, kv), k = step(layer, states, [[4, 5]], 2)
    np.testing.assert_array_equal(kv.k_proj[:, 4], k[:, 0])
    assert not np.any(kv.k_proj[:, :4])


def test_cache_dtype():
    layer = cache(cache_dtype=jnp.bfloat16)
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    (states, kv), _ = step(layer, states, [[0]], 1)
    assert states["key"].dtype == states["value"].dtype == jnp.bfloat16
    assert kv.k_proj.dtype == jnp.float32


def test_pages_are_rejected():
    layer = cache()
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    with pytest.raises(ArgumentValueError, match="cache is a KVCache, which has no pages"):
        step(layer, states, [[0]], 1, page_pool={})
