import jax
import jax.numpy as jnp
import pytest

from weft.errors import ArgumentShapeError
from weft.functional.attention_cache import attention_cache_step

CACHE = jnp.zeros((2, 3, 1, 4), jnp.bfloat16)
NEW = jnp.ones((2, 1, 1, 4))


def test_a_position_is_put_behind_the_others():
    keys, values, seen = attention_cache_step(CACHE, CACHE, jnp.int32(1), NEW, NEW, 2 * NEW)
    assert keys[:, :, 0, 0].tolist() == [[0, 1, 0]] * 2
    assert values[:, :, 0, 0].tolist() == [[0, 2, 0]] * 2
    assert keys.dtype == jnp.bfloat16
    assert seen.tolist() == [[[[True, True, False]]]] * 2


def test_past_the_end_the_last_position_is_overwritten():
    keys, _, seen = attention_cache_step(CACHE, CACHE, jnp.int32(5), NEW, NEW, NEW)
    assert keys[:, :, 0, 0].tolist() == [[0, 0, 1]] * 2
    assert seen.all()


def test_queries_may_have_more_heads():
    query = jnp.ones((2, 1, 8, 4))
    keys, _, _ = attention_cache_step(CACHE, CACHE, jnp.int32(0), query, NEW, NEW)
    assert keys.shape == CACHE.shape


@pytest.mark.parametrize("query, key, value", [(2, 2, 2), (2, 1, 1), (1, 1, 2)])
def test_one_position_at_a_time(query, key, value):
    inputs = (jnp.ones((2, n, 1, 4)) for n in (query, key, value))
    with pytest.raises(ArgumentShapeError, match=r"It decodes .*expects \(2, 1, 1, 4\): give one"):
        attention_cache_step(CACHE, CACHE, jnp.int32(0), *inputs, layer="It")


def test_a_step_with_64_bits():
    with jax.enable_x64(True):
        empty, new = jnp.zeros((2, 3, 1, 1), jnp.float32), jnp.ones((2, 1, 1, 1))
        for index in (jnp.int32(1), jnp.int64(1), 1):
            keys, _, seen = attention_cache_step(empty, empty, index, new, new, new)
            assert keys.dtype == jnp.float32
            assert keys[0].ravel().tolist() == [0, 1, 0]
            assert seen[0].ravel().tolist() == [True, True, False]
