import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.jaxprs import largest_array
from weft.errors import ArgumentValueError
from weft.functional import (
    and_masks,
    causal_mask,
    dot_product_attention,
    left_right_window_mask,
    truncated_key_mask,
)
from weft.functional import blockwise_attention as blocks
from weft.functional.attention_mask import AttentionMask, as_attention_mask
from weft.functional.blockwise_attention import blockwise_attention

B, H, D = 2, 4, 8
RNG = np.random.default_rng(0)


def array(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape).astype(dtype))


def qkv(target, source, kv_heads=2, value_dim=5, dtype=jnp.float32):
    return (
        array(B, target, H, D, dtype=dtype),
        array(B, source, kv_heads, D, dtype=dtype),
        array(B, source, kv_heads, value_dim, dtype=dtype),
    )


def value_and_grads(fn, *args):
    def loss(*args):
        y = fn(*args)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, range(len(args)), has_aux=True))(*args)
    return [y, *jax.tree.leaves(grads)]


def assert_equal_to_plain(
    qkv, differentiable=None, *, block_size=4, mask=None, atol=1e-5, **options
):
    given = differentiable or {}

    def plain(q, k, v, given):
        return dot_product_attention(q, k, v, mask=mask, implementation="plain", **given, **options)

    def in_blocks(q, k, v, given):
        return blockwise_attention(
            q, k, v, mask=as_attention_mask(mask), block_size=block_size, **given, **options
        )

    expected = value_and_grads(plain, *qkv, given)
    for x, y in zip(value_and_grads(in_blocks, *qkv, given), expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=atol)


SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0], [1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3]])
SPARSE = jnp.array(RNG.random((B, 1, 11, 11)) < 0.3).at[:, :, 3].set(False)
MASKS = {
    "window": left_right_window_mask(2, 1),
    # Some queries have no key.
    "elsewhere": left_right_window_mask(3, -2),
    "truncated": and_masks(causal_mask, truncated_key_mask(7)),
    "other segments": AttentionMask(query_segments=SEGMENTS, key_segments=SEGMENTS[::-1] + 1),
    "positions": AttentionMask(
        causal_mask, query_positions=SEGMENTS, key_positions=SEGMENTS[:1] * 2
    ),
    "all": AttentionMask(causal_mask, query_segments=SEGMENTS, arrays=(SPARSE, SPARSE[:, :, :1])),
}


@pytest.mark.parametrize("name", MASKS)
def test_equals_the_plain_form(name):
    assert_equal_to_plain(qkv(11, 11), mask=MASKS[name])


# Each example compiles two programs.
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    target=st.integers(1, 13),
    source=st.integers(1, 13),
    kv_heads=st.sampled_from([1, 2, 4]),
    block_size=st.integers(1, 9),
    left=st.none() | st.integers(-2, 9),
    right=st.none() | st.integers(-2, 9),
    cap=st.none() | st.just(1.5),
    bias=st.none() | st.tuples(*(st.booleans(),) * 4),
    dtype=st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16]),
)
def test_any_shape_equals_the_plain_form(
    target, source, kv_heads, block_size, left, right, cap, bias, dtype
):
    arrays = qkv(target, source, kv_heads, dtype=dtype)
    full = (B, H, target, source)
    more = {}
    if bias is not None:
        more["bias"] = array(*(n if whole else 1 for n, whole in zip(full, bias, strict=True)))
    assert_equal_to_plain(
        arrays,
        more,
        mask=left_right_window_mask(left, right),
        block_size=block_size,
        logit_cap=cap,
        atol=1e-5 if dtype == jnp.float32 else 0.1,
    )


def test_dropout_drops_the_same_weights_in_both_passes():
    q, k, _ = qkv(11, 11)
    key, rate = jax.random.key(0), 0.4
    attend = jax.jit(
        functools.partial(blockwise_attention, dropout_rate=rate, dropout_key=key, block_size=4),
        static_argnames="broadcast_dropout",
    )
    # With the identity as values, the output is the weights.
    identity = jnp.broadcast_to(jnp.eye(11)[:, None], (B, 11, 2, 11))
    dropped = attend(q, k, identity)
    kept = dropped != 0
    assert 0.5 < kept.mean() < 0.7
    assert (kept[0] != kept[1]).any() and (kept[:, :, 0] != kept[:, :, 1]).any()
    whole = jax.jit(functools.partial(blockwise_attention, block_size=4))(q, k, identity)
    np.testing.assert_allclose(dropped, jnp.where(kept, whole / (1 - rate), 0), atol=1e-6)

    def by_hand(q, k, v):
        weights = dot_product_attention(q, k, identity) * kept / (1 - rate)
        return jnp.einsum("bths,bshd->bthd", weights, jnp.repeat(v, 2, axis=2))

    args = qkv(11, 11)
    args = (q, k, args[2])
    for x, y in zip(value_and_grads(attend, *args), value_and_grads(by_hand, *args), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    same = attend(q, k, identity, broadcast_dropout=True) != 0
    assert (same == same[:1, :, :1]).all() and not same.all()
    with pytest.raises(ArgumentValueError, match=r"dropout_rate=0.4 without dropout_key"):
        blockwise_attention(q, k, q, dropout_rate=rate)


def test_no_array_has_all_pairs():
    length = 4096
    q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(implementation, x, ids):
        mask = AttentionMask(left_right_window_mask(700, 0), query_segments=ids)
        options = {"mask": mask, "alibi_slopes": jnp.ones(1), "implementation": implementation}
        return dot_product_attention(x, x, x, **options).sum()

    def largest(implementation):
        return largest_array(jax.grad(functools.partial(loss, implementation)), q, ids)

    assert largest(None) < length**2 / 16  # chosen for so long a sequence
    assert largest("plain") == length**2


def test_blocks_that_the_mask_excludes_are_skipped():
    def visited(mask, length=16):
        division = blocks.Blocks(length, size=4)
        first, number = blocks._needed_keys(division, division, mask)
        return [(int(i), int(n)) for i, n in zip(first, number, strict=True)]

    assert visited(AttentionMask()) == [(0, 4)] * 4
    assert visited(AttentionMask(causal_mask)) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert visited(AttentionMask(left_right_window_mask(1, 0))) == [(0, 1), (0, 2), (1, 2), (2, 2)]
    ids = jnp.array([[1] * 8 + [2] * 8])
    mask = AttentionMask(causal_mask, query_segments=ids, key_segments=ids)
    assert visited(mask) == [(0, 1), (0, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("transform", ["vmap", "remat and scan"])
def test_under_transformations(transform):
    q, k, v = qkv(11, 11)
    ids = SEGMENTS

    def attend(q, k, v, ids, implementation):
        mask = AttentionMask(causal_mask, query_segments=ids)
        if implementation == "plain":
            return dot_product_attention(q, k, v, mask=mask, implementation="plain")
        return blockwise_attention(q, k, v, mask=mask, block_size=4)

    def of_each(implementation):
        one = functools.partial(attend, implementation=implementation)

        def run(q, k, v):
            xs = tuple(x[:, None] for x in (q, k, v, ids))
            if transform == "vmap":
                return jax.vmap(one)(*xs)
            return jax.lax.scan(lambda c, x: (c, jax.checkpoint(one)(*x)), 0, xs)[1]

        return value_and_grads(run, q, k, v)

    for x, y in zip(of_each("blockwise"), of_each("plain"), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_batch_and_heads_can_be_sharded():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
    args = qkv(11, 11, kv_heads=4)
    attend = functools.partial(blockwise_attention, mask=AttentionMask(causal_mask), block_size=4)
    expected = value_and_grads(attend, *args)
    sharded = value_and_grads(attend, *(jax.device_put(x, sharding) for x in args))
    for x, y in zip(sharded, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
        assert x.sharding.spec[0] == "data" and x.sharding.spec[2] == "model"


@pytest.mark.parametrize("kind", ["shard_map", "explicit mesh"])
def test_in_programs_that_say_where_arrays_are(kind):
    x = array(8, 11, H, D)

    def grads(x):
        mask = AttentionMask(causal_mask)
        return jax.grad(lambda x: jnp.sum(blockwise_attention(x, x, x, mask=mask) ** 2))(x)

    axis_type = AxisType.Explicit if kind == "explicit mesh" else AxisType.Auto
    mesh, spec = jax.make_mesh((8,), ("data",), axis_types=(axis_type,)), PartitionSpec("data")
    expected = jax.jit(grads)(x)
    if kind == "shard_map":
        sharded = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    else:
        with jax.set_mesh(mesh):
            sharded = jax.jit(grads)(jax.device_put(x, NamedSharding(mesh, spec)))
    np.testing.assert_allclose(sharded, expected, atol=1e-5)


def test_forward_mode_says_what_to_use():
    q, k, v = qkv(5, 5)
    with pytest.raises(ArgumentValueError, match=r'use dot_product_attention.*"plain"'):
        jax.jvp(functools.partial(blockwise_attention, block_size=4), (q, k, v), (q, k, v))
    plain = functools.partial(dot_product_attention, implementation="plain")
    _, tangent = jax.eval_shape(lambda *x: jax.jvp(plain, x, x), q, k, v)
    assert tangent.shape == (B, 5, H, 5)
