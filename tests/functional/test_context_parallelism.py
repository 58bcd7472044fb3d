"""Attention over a sequence that is split over eight virtual devices: equal to one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.cli.collectives import collectives_of
from weft.errors import ArgumentShapeError, ArgumentValueError, MeshError
from weft.functional import (
    AttentionMask,
    alibi_slopes,
    all_to_all_attention,
    and_masks,
    causal_mask,
    dot_product_attention,
    left_right_window_mask,
    ring_attention,
    sliding_window_causal_mask,
    truncated_key_mask,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
B, T, H, D = 2, 32, 8, 4
RNG = np.random.default_rng(0)
WAYS = {"ring": ring_attention, "all_to_all": all_to_all_attention}
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 4, (B, T))))


def array(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32), dtype)


def qkv(kv_heads=2, target=T, source=T, dtype=jnp.float32):
    return (
        array(B, target, H, D, dtype=dtype),
        array(B, source, kv_heads, D, dtype=dtype),
        array(B, source, kv_heads, 5, dtype=dtype),
    )


def mesh_of(axis_type=AxisType.Auto, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def value_and_grads(fn, *args):
    def loss(*args):
        y = fn(*args)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, range(len(args)), has_aux=True))(*args)
    return [y, *jax.tree.leaves(grads)]


def assert_equal_to_one_device(
    way, arrays, differentiable=None, *, rtol=1e-5, sizes=None, **options
):
    """Compares values, and gradients by queries, keys, values and what is `differentiable`."""
    attention = functools.partial(WAYS[way], axis_name="seq", **options)
    plain = functools.partial(dot_product_attention, implementation="plain", **options)
    arguments = (*arrays, differentiable or {})
    expected = value_and_grads(lambda q, k, v, more: plain(q, k, v, **more), *arguments)
    with jax.set_mesh(mesh_of(AxisType.Auto, **(sizes or {"seq": 8}))):
        actual = value_and_grads(lambda q, k, v, more: attention(q, k, v, **more), *arguments)
    for x, y in zip(actual, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


# Some queries have no key, or only keys of other devices.
SPARSE = jnp.array(RNG.random((B, 1, T, T)) < 0.1).at[:, :, 3].set(False)
MASKS = {
    "none": None,
    "causal": causal_mask,
    "window": sliding_window_causal_mask(5),
    "window of one device": sliding_window_causal_mask(0),
    "long window": sliding_window_causal_mask(21),
    "both sides": left_right_window_mask(6, 4),
    "long sides": left_right_window_mask(15, 11),
    "window of positions": AttentionMask(
        sliding_window_causal_mask(5), query_positions=SEGMENTS, key_positions=SEGMENTS
    ),
    "window in segments": AttentionMask(sliding_window_causal_mask(5), query_segments=SEGMENTS),
    "elsewhere": left_right_window_mask(9, -7),
    "truncated": and_masks(causal_mask, truncated_key_mask(7)),
    "segments": AttentionMask(causal_mask, query_segments=SEGMENTS),
    "other segments": AttentionMask(query_segments=SEGMENTS, key_segments=SEGMENTS[::-1] + 2),
    "positions": AttentionMask(
        causal_mask, query_positions=SEGMENTS, key_positions=SEGMENTS[:1] * 2
    ),
    "arrays": AttentionMask(
        causal_mask, query_segments=SEGMENTS, arrays=(SPARSE, SPARSE[:, :, :1], SPARSE[0, 0])
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_masks(way, name):
    assert_equal_to_one_device(way, qkv(), mask=MASKS[name])


@pytest.mark.parametrize(
    ("mask", "num_steps"),
    [
        # Of 32 positions, each device has 4.
        (causal_mask, 7),
        (sliding_window_causal_mask(0), 0),
        (sliding_window_causal_mask(4), 1),
        (sliding_window_causal_mask(5), 2),
        (sliding_window_causal_mask(12), 3),
        # More than half of the devices: these balance their work instead.
        (sliding_window_causal_mask(13), 7),
        (left_right_window_mask(4, 5), 3),
        (left_right_window_mask(None, 4), 7),
        # Whether the window is short depends on values.
        (AttentionMask(sliding_window_causal_mask(4), query_positions=SEGMENTS), 7),
        (and_masks(sliding_window_causal_mask(4), truncated_key_mask(7)), 7),
    ],
)
def test_keys_move_as_far_as_the_window(mask, num_steps):
    attention = functools.partial(ring_attention, axis_name="seq", mask=mask)
    with jax.set_mesh(mesh_of(seq=8)):
        gradients = jax.grad(lambda *qkv: jnp.sum(attention(*qkv)), (0, 1, 2))
        compiled = jax.jit(gradients).lower(*qkv()).compile()
    moved = [c for c in collectives_of(compiled.as_text()) if c.kind == "collective-permute"]
    assert max((c.times for c in moved), default=0) == num_steps


def test_masks_by_head():
    keeps = jnp.asarray(RNG.random((1, H, 1, 1)) < 0.5)
    for way in WAYS:
        assert_equal_to_one_device(way, qkv(), mask=lambda q, k: (q >= k)[:, None] | keeps)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("way", WAYS)
def test_shared_heads(way, kv_heads):
    assert_equal_to_one_device(way, qkv(kv_heads), mask=causal_mask, sizes={"seq": 4})


@pytest.mark.parametrize("way", WAYS)
def test_options(way):
    more = {"logit_sink": array(H), "alibi_slopes": alibi_slopes(H), "bias": array(1, H, T, T)}
    assert_equal_to_one_device(way, qkv(), more, mask=causal_mask, logit_cap=1.5, scale=0.7)
    more = {"bias": array(B, 1, 1, T), "logit_sink": array(H)}
    assert_equal_to_one_device(way, qkv(), more)


@pytest.mark.parametrize("way", WAYS)
def test_other_lengths_and_dtypes(way):
    # Of 24 positions, a device has 3, which are not two halves.
    assert_equal_to_one_device(way, qkv(target=24, source=24), mask=causal_mask)
    assert_equal_to_one_device(way, qkv(target=16, source=40), {"bias": array(1, 1, 16, 40)})
    assert_equal_to_one_device(way, qkv(dtype=jnp.bfloat16), mask=causal_mask, rtol=0.05)


def test_blocks_of_queries_may_overlap():
    # A device's chunk of 150 queries is two blocks of 75, one of 130 keys is a block and an end.
    q, k, v = qkv(2, 600, 600)
    options = {"mask": causal_mask, "sizes": {"seq": 2}}
    assert_equal_to_one_device("ring", (q, k, v), **options)
    assert_equal_to_one_device("ring", (q[:, :524], k[:, :540], v[:, :540]), **options)


@pytest.mark.parametrize("way", WAYS)
def test_mesh_with_other_axes(way):
    sizes = {"data": 2, "seq": 2, "model": 2}
    more = {"logit_sink": array(H)}
    assert_equal_to_one_device(way, qkv(4), more, mask=MASKS["segments"], sizes=sizes)
    assert_equal_to_one_device(way, qkv(4), mask=MASKS["arrays"], sizes=sizes)


@pytest.mark.parametrize("way", WAYS)
def test_explicit_axes(way):
    arrays = qkv(4)
    expected = dot_product_attention(*arrays, mask=causal_mask)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, seq=4)):
        sharded = [jax.device_put(x, PartitionSpec("data", "seq")) for x in arrays]
        y = WAYS[way](*sharded, mask=causal_mask, axis_name="seq")
        assert jax.typeof(y).sharding.spec == PartitionSpec("data", "seq", None, None)
        # It needs no layout of its own.
        whole = WAYS[way](*arrays, mask=causal_mask, axis_name="seq")
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(whole, expected, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_under_vmap_over_an_axis(way):
    arrays = [jnp.stack([x, -x]) for x in qkv()]
    plain = functools.partial(dot_product_attention, mask=causal_mask)
    attention = functools.partial(
        WAYS[way], mask=causal_mask, axis_name="seq", replicated_axes=("stage",)
    )
    expected = value_and_grads(jax.vmap(plain), *arrays)
    with jax.set_mesh(mesh_of(stage=2, seq=4)):
        actual = value_and_grads(jax.vmap(attention, spmd_axis_name="stage"), *arrays)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_dropout(way):
    q, k, v = qkv()
    attention = functools.partial(WAYS[way], axis_name="seq", dropout_rate=0.5)
    with jax.set_mesh(mesh_of(seq=8)):
        y = attention(q, k, jnp.ones_like(v), dropout_key=jax.random.key(0))
        # Each weight has its own: the means of all queries and heads differ.
        assert len(np.unique(np.asarray(y[..., 0]).round(5))) > B * T * H * 0.9
        np.testing.assert_allclose(y.mean(), 1, atol=0.05)

        def loss(v):
            return jnp.sum(attention(q, k, v, dropout_key=jax.random.key(0)) ** 2)

        # It is quadratic, so that the difference is exact: both passes drop the same.
        direction = array(*v.shape)
        difference = (loss(v + direction) - loss(v - direction)) / 2
        np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(v), direction), difference, rtol=1e-3)
        with pytest.raises(ArgumentValueError, match=r"without dropout_key|needs a prng_key"):
            attention(q, k, v)


def temporaries(attention, size):
    """Returns the bytes of temporaries on each device, with the gradient."""
    mesh = mesh_of(seq=size)
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    x = jax.ShapeDtypeStruct((1, 2**14, 8, 128), jnp.float32, sharding=sharding)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, mask=causal_mask) ** 2)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("way", WAYS)
def test_memory_per_device_is_a_part(way):
    attention = functools.partial(WAYS[way], axis_name="seq")
    on_eight = temporaries(attention, 8)
    # As 1/N, with copies of what moves.
    assert on_eight < temporaries(attention, 2) / 4 * 1.2
    assert on_eight < temporaries(dot_product_attention, 1) / 8 * 2.2


def test_what_is_refused():
    q, k, v = qkv()
    with pytest.raises(MeshError, match="over the mesh axis 'seq', and the mesh has no axes"):
        ring_attention(q, k, v, axis_name="seq")
    with jax.set_mesh(mesh_of(seq=8)):
        with pytest.raises(ArgumentShapeError, match=r"32 queries to 20 keys .* does not divide"):
            ring_attention(q, k[:, :20], v[:, :20], axis_name="seq")
        with pytest.raises(ArgumentShapeError, match=r"6 heads of queries .* use ring_attention"):
            all_to_all_attention(q[:, :, :6], k, v, axis_name="seq")
        with pytest.raises(ArgumentShapeError, match=r"8 heads of queries .* cannot share 3 heads"):
            ring_attention(q, k[:, :, :1].repeat(3, 2), v, axis_name="seq")
        with pytest.raises(ArgumentValueError, match="no forward-mode derivative"):
            jax.jvp(lambda q: ring_attention(q, k, v, axis_name="seq"), (q,), (q,))
