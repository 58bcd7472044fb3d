import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.bias import (
    CausalAttentionBias,
    LeftRightWindowAttentionBias,
    SlidingWindowAttentionBias,
)
from weft.hierarchy.attention.kv_cache import (
    BaseKVCache,
    KVCache,
    PagedKVCache,
    SlidingWindowKVCache,
)
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.module import functional

SHAPE = (2, 5, 1, 3)


def cache(cls: type[BaseKVCache] = KVCache, **fields):
    return cls.default_config().set(name="cache", **fields).instantiate(parent=None)


def step(layer, states, positions, length, **kwargs):
    k = np.arange(2 * length * 3, dtype="f").reshape(2, length, 1, 3) + 1

    @jax.jit
    def extend(states, k, positions, kwargs):
        return layer.extend_step(states, k_proj=k, v_proj=-k, key_positions=positions, **kwargs)

    return extend(states, k, np.asarray(positions), kwargs), k


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


@pytest.mark.parametrize(
    "cls, fields", [(KVCache, {}), (SlidingWindowKVCache, {"cached_kv_length": 2})]
)
def test_pages_are_rejected(cls, fields):
    layer = cache(cls, **fields)
    states = layer.init_states(SHAPE, dtype=jnp.float32)
    pages = cache(PagedKVCache, page_size=2).init_states(SHAPE, dtype=jnp.float32)
    with pytest.raises(ArgumentValueError, match=f"cache is a {cls.__name__}, which has no pages"):
        step(layer, states, [[0]], 1, page_pool=pages)


def test_pages_are_those_of_each_sequence():
    layer = cache(PagedKVCache, page_size=2, num_pages=4)
    states = layer.init_states((2, 3, 1, 3), dtype=jnp.float32)
    assert states.key.shape == (4, 2, 1, 3)
    none = len(states.key)
    np.testing.assert_array_equal(states.page_indices, [[none, none]] * 2)
    # The second sequence has room for two positions.
    states = states.replace(page_indices=jnp.array([[3, 0], [2, none]]))
    (states, kv), k = step(layer, states, [[0, 1, 2]], 3)
    np.testing.assert_array_equal(states.key[3], k[0, :2])
    np.testing.assert_array_equal(states.key[0, 0], k[0, 2])
    np.testing.assert_array_equal(states.key[2], k[1, :2])
    assert not np.any(states.key[1]) and not np.any(states.key[0, 1])
    joined = layer.maybe_normalize_kv(kv)
    np.testing.assert_array_equal(joined.k_proj[0, :3], k[0])
    np.testing.assert_array_equal(joined.v_proj[1, :2], -k[1, :2])
    np.testing.assert_array_equal(joined.key_positions, [[0, 1, 2, 3], [0, 1, -1, -1]])
    assert joined.page_indices is None and layer.maybe_normalize_kv(joined) is joined
    # Past the last page, and for padding, nothing is written.
    (after, _), _ = step(layer, states, [[4, 5]], 2)
    (padding, _), _ = step(layer, states, [[0, 1]], 2, unpadded_len=jnp.array([0, 0]))
    np.testing.assert_array_equal(after.key, states.key)
    np.testing.assert_array_equal(padding.key, states.key)


def test_positions_without_a_page_are_masked(filled, wave):
    pages = PagedKVCache.default_config().set(page_size=2)
    layer = attention_config(pages, mask=CausalAttentionBias.default_config())
    layer = layer.instantiate(parent=None)
    state, x = filled(layer), wave((2, 4, 8))

    def step(cached, x):
        inputs = {"cached_states": cached, "query": x, "return_aux": {"probs"}}
        return functional(layer, None, state, inputs, method="extend_step", is_training=False)[0]

    step = jax.jit(step)
    cached, _ = step(layer.init_states(batch_size=2, max_len=4, dtype=jnp.float32), x[:, :3])
    pages = cached["kv_cache"]
    kept = pages.page_indices.at[1, 0].set(len(pages.key))  # the second one loses its first page
    cached["kv_cache"] = pages.replace(page_indices=kept)
    probs = np.asarray(step(cached, x[:, 3:])[1].probs)[:, :, 0]
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    assert (probs[0] > 0).all() and (probs[1, :, 2:] > 0).all() and not probs[1, :, :2].any()


MASKS = {
    "all": CausalAttentionBias.default_config(),
    "4": SlidingWindowAttentionBias.default_config(4),
    "all ": LeftRightWindowAttentionBias.default_config(None, 0),
}


@pytest.mark.parametrize("attended", MASKS)
def test_window_of_the_mask_must_be_kept(attended):
    cfg = attention_config(SlidingWindowKVCache.default_config().set(cached_kv_length=3))
    message = f"attention: kv_cache keeps cached_kv_length=3 .* attend to {attended.strip()} before"
    with pytest.raises(LayerConfigError, match=message):
        cfg.set(mask=MASKS[attended]).instantiate(parent=None)


def attention_config(kv_cache, **fields):
    return MultiheadAttention.default_config().set(
        name="attention",
        **{"query_dim": 8, "key_dim": 8, "value_dim": 8, "num_heads": 2, "kv_cache": kv_cache},
        **fields,
    )


@pytest.mark.parametrize(
    "cls, fields",
    [
        (KVCache, {}),
        (SlidingWindowKVCache, {"cached_kv_length": 2}),
        (PagedKVCache, {"page_size": 2}),
    ],
)
def test_cache_is_sharded(cls, fields, filled, wave):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    spec = ("data", None, "model", None)
    cfg = attention_config(
        cls.default_config().set(kv_partition_spec=spec, **fields),
        mask=SlidingWindowAttentionBias.default_config(2),
    )
    layer = cfg.instantiate(parent=None)
    state, x = filled(layer), wave((4, 6, 8))

    @jax.jit
    def decode(state, x):
        def step(cached, x, **kwargs):
            return functional(
                layer, None, state, (cached, x), method="extend_step", is_training=False
            )[0]

        cached = layer.init_states(batch_size=4, max_len=6, dtype=jnp.float32)
        cached, first = step(cached, x[:, :4])
        cached, last = step(cached, x[:, 4:])
        return cached["kv_cache"], jnp.concatenate([first.data, last.data], axis=1)

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        kv_cache, decoded = decode(state, x)
    expected = jax.jit(lambda *args: functional(layer, None, *args, is_training=False)[0])(
        state, (x,)
    )
    np.testing.assert_allclose(decoded, expected.data, rtol=1e-4, atol=1e-5)
    keys = kv_cache.key if cls is PagedKVCache else kv_cache["key"]
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    assert keys.sharding.is_equivalent_to(sharding, keys.ndim)
