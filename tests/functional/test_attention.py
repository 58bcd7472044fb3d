import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from weft import functional, nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import (
    AttentionMask,
    attention_context,
    attention_logits,
    attention_probs,
    bool_to_bias,
    cap_logits,
    causal_mask,
    dot_product_attention,
    dropout,
    evaluate_mask,
    per_dim_scale,
    xl_attention_logits,
)
from weft.functional.attention import (
    attention_cache_step,
    attention_weights,
    check_attention_shapes,
    drop_attention_weights,
    plain_attention,
)

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def qkv(heads=4, kv_heads=2, target=5, source=6):
    return array(2, target, heads, 8), array(2, source, kv_heads, 8), array(2, source, kv_heads, 3)


def reference(q, k, v, *, bias=0.0, scale=None, cap=None, sink=None):
    """Computes attention head by head."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    share = q.shape[2] // k.shape[2]
    bias = np.broadcast_to(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            logits = q[b, :, h].astype(np.float64) @ k[b, :, h // share].T
            logits *= q.shape[-1] ** -0.5 if scale is None else scale
            logits = logits if cap is None else cap * np.tanh(logits / cap)
            weights = np.exp(logits + bias[b, h])
            total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink[h]))
            out[b, :, h] = (weights / total) @ v[b, :, h // share]
    return out


def test_bias_scale_cap_and_sink():
    q, k, v = qkv()
    bias, sink = array(2, 4, 5, 6), array(4)
    y = dot_product_attention(
        *map(jnp.array, (q, k, v)),
        bias=jnp.array(bias),
        scale=2.0,
        logit_cap=3.0,
        logit_sink=jnp.array(sink),
    )
    expected = reference(q, k, v, bias=bias, scale=2.0, cap=3.0, sink=sink)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_masked_positions_have_no_gradient():
    q, k, v = map(jnp.array, qkv(target=6))
    positions = jnp.arange(6)[None]
    mask = evaluate_mask(causal_mask, positions, positions)

    def first_three(k, v):
        return dot_product_attention(q, k, v, mask=mask)[:, :3]

    np.testing.assert_array_equal(
        first_three(k, v), first_three(k.at[:, 3:].add(100.0), v.at[:, 3:].add(100.0))
    )
    grads = jax.jit(jax.grad(lambda k, v: jnp.sum(first_three(k, v) ** 2), (0, 1)))(k, v)
    assert all((g[:, 3:] == 0).all() and (g[:, 0] != 0).any() for g in grads)


def test_mask_and_bias_add_up():
    (q, k, v), bias = qkv(), array(2, 4, 5, 6)
    mask = RNG.random((2, 1, 5, 6)) < 0.7
    mask[..., 0] = True
    y = dot_product_attention(
        *map(
            jnp.array,
            (
                q,
                k,
                v,
            ),
        ),
        bias=jnp.array(bias),
        mask=mask,
    )
    expected = reference(q, k, v, bias=np.where(mask, bias, -np.inf))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sink", [None, jnp.zeros(4)])
def test_fully_masked_query_stays_finite(sink):
    q, k, v = map(jnp.array, qkv())
    mask = jnp.zeros((2, 1, 5, 6), bool)

    def loss(q, k, v):
        return jnp.sum(dot_product_attention(q, k, v, mask=mask, logit_sink=sink) ** 2)

    y = dot_product_attention(q, k, v, mask=mask, logit_sink=sink)
    if sink is None:
        mean = jnp.repeat(v.mean(1), 2, axis=1)[:, None]
        np.testing.assert_allclose(y, jnp.broadcast_to(mean, y.shape), rtol=1e-4, atol=1e-5)
    else:
        assert (y == 0).all()
    assert all(np.isfinite(g).all() for g in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))


def test_logits_are_float32_and_context_has_value_dtype():
    q, k, v = (jnp.array(x, jnp.bfloat16) for x in qkv())
    logits = attention_logits(q, k)
    probs = attention_probs(logits.astype(jnp.bfloat16))
    assert (logits.dtype, probs.dtype) == (jnp.float32, jnp.float32)
    assert attention_context(probs, v).dtype == jnp.bfloat16
    y = dot_product_attention(q, k, v)
    expected = reference(*(np.asarray(x, np.float32) for x in (q, k, v)))
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=0.05, atol=0.02)


def test_sink_gradient_matches_an_extra_key():
    logits, sink, g = (
        jnp.array(array(2, 4, 3, 5)),
        jnp.array(array(4)),
        jnp.array(array(2, 4, 3, 5)),
    )

    def with_key(logits, sink):
        extra = jnp.broadcast_to(sink[None, :, None, None], (2, 4, 3, 1))
        probs = jax.nn.softmax(jnp.concatenate([logits, extra], -1), -1)[..., :-1]
        return jnp.sum(g * probs)

    def ours(logits, sink):
        return jnp.sum(g * attention_probs(logits, logit_sink=sink))

    for a, b in zip(
        *(jax.jit(jax.grad(f, (0, 1)))(logits, sink) for f in (ours, with_key)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_dropout_on_probabilities():
    q, k, v = map(jnp.array, qkv())
    key = jax.random.key(0)
    y = dot_product_attention(q, k, v, scale=1.0, dropout_rate=0.3, dropout_key=key)
    probs = dropout(attention_probs(attention_logits(q, k)), rate=0.3, prng_key=key)
    np.testing.assert_allclose(y, attention_context(probs, v), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentValueError, match="needs a prng_key"):
        dot_product_attention(q, k, v, dropout_rate=0.3)


def test_capped_logits_of_half_precision_have_gradients():
    # Their tangent rounds to 1 in bfloat16.
    x = jnp.bfloat16(16.0)
    assert cap_logits(x, 5.0).dtype == jnp.bfloat16
    exact = jax.grad(lambda x: cap_logits(x, 5.0))(16.0)
    np.testing.assert_allclose(jax.grad(lambda x: cap_logits(x, 5.0))(x), exact, rtol=1e-2)


def test_indivisible_heads_are_rejected():
    q, k, v = map(jnp.array, qkv(heads=4, kv_heads=3))
    with pytest.raises(ArgumentShapeError, match=r"4 heads of queries .* 3 heads of keys"):
        dot_product_attention(q, k, v)


def test_per_dim_scale():
    param = np.array([-1.0, 0.0, 3.0], np.float32)
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    expected = x * np.log1p(np.exp(param)) / np.log(2)
    np.testing.assert_allclose(per_dim_scale(jnp.array(x), jnp.array(param)), expected, rtol=1e-6)
    assert per_dim_scale(jnp.array(x, jnp.bfloat16), jnp.array(param)).dtype == jnp.bfloat16


def test_xl_logits():
    length, heads, dim = 3, 2, 4
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    q, k = (np.asarray(jax.random.normal(key, (2, length, heads, dim))) for key in keys[:2])
    r = np.asarray(jax.random.normal(keys[2], (2 * length - 1, heads, dim)))
    u, v = (np.asarray(jax.random.normal(key, (heads, dim))) for key in keys[3:])
    logits = xl_attention_logits(*map(jnp.asarray, (q, k, r, u, v)))
    for i in range(length):
        for j in range(length):
            for n in range(heads):
                distance = r[(length - 1) - (i - j), n]  # the first row is the greatest i - j
                by_hand = (q[:, i, n] + u[n]) * k[:, j, n] + (q[:, i, n] + v[n]) * distance
                np.testing.assert_allclose(
                    logits[:, n, i, j], by_hand.sum(-1), rtol=2e-5, atol=1e-5
                )


KEYS = jax.random.split(jax.random.key(0), 3)
Q = jax.random.normal(KEYS[0], (2, 5, 3, 4))
K = jax.random.normal(KEYS[1], (2, 7, 3, 4))


def test_custom_einsum_and_dot_general():
    calls = []

    def dot_general(*args, **kwargs):
        calls.append(args[2:4])
        return lax.dot_general(*args, **kwargs)

    def einsum(*args):
        calls.append(args[0])
        return jnp.einsum(*args)

    plain = attention_weights(Q, K)
    given = attention_weights(Q, K, dot_general=dot_general, precision="highest")
    np.testing.assert_allclose(given, plain, rtol=1e-5)
    np.testing.assert_allclose(attention_weights(Q, K, einsum=einsum), plain, rtol=1e-5)
    assert calls == [((((3,), (3,)), ((0, 2), (0, 2))), "highest"), "...qhd,...khd->...hqk"]


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("shape", [(5, 8), (1, 2, 3, 5, 7), (3, 1, 1, 1)])
def test_broadcast_errors(name, shape):
    with pytest.raises(ArgumentShapeError, match=rf"{name} has shape \(.*, \(2, 3, 5, 7\)\."):
        attention_weights(Q, K, **{name: jnp.ones(shape)})


def test_custom_dot_general_of_heads_that_share_keys():
    def doubled(*args, **kwargs):
        return 2 * lax.dot_general(*args, **kwargs)

    shared = K[:, :, :1]
    plain = functional.attention_logits(Q[:, :, :2], shared)
    given = functional.attention_logits(Q[:, :, :2], shared, dot_general=doubled)
    np.testing.assert_allclose(given, 2 * plain, rtol=1e-6)
    context = functional.attention_context(plain, shared, dot_general=doubled)
    np.testing.assert_allclose(context, 2 * functional.attention_context(plain, shared), rtol=1e-6)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropped_weights(broadcast):
    plain = attention_weights(Q, K)
    kept = drop_attention_weights(plain, rate=0.5, prng_key=KEYS[2], broadcast=broadcast)
    np.testing.assert_allclose(kept, jnp.where(kept == 0, 0, 2 * plain), rtol=1e-5)
    assert bool(((kept == 0) == (kept[:1, :1] == 0)).all()) == broadcast
    assert (drop_attention_weights(plain, rate=1.0, prng_key=KEYS[2]) == 0).all()
    with pytest.raises(ArgumentValueError, match=r"dropout_rate=0.5 without dropout_rng: give a"):
        drop_attention_weights(plain, rate=0.5, prng_key=None)


def test_mismatched_shapes():
    check_attention_shapes(Q, K, K)
    check_attention_shapes(Q, K[:, :, :1], shared_heads=True)
    with pytest.raises(ArgumentShapeError, match="agree in the axes before the last three"):
        check_attention_shapes(Q, K[:1])
    with pytest.raises(ArgumentShapeError, match="agree in heads and features, the last two"):
        check_attention_shapes(Q, K[:, :, :1])
    with pytest.raises(ArgumentShapeError, match="agree in features, the last axis"):
        check_attention_shapes(Q, K[..., :3], shared_heads=True)
    with pytest.raises(
        ArgumentShapeError, match=r"'value': \(2, 6, .* agree between key and value"
    ):
        check_attention_shapes(Q, K, K[:, :6])
    with pytest.raises(ArgumentShapeError, match=r"expected \(\*batch, length, heads, features\)"):
        check_attention_shapes(Q[0, 0], K[0, 0])


CACHE = jnp.zeros((2, 3, 1, 4), jnp.bfloat16)
NEW = jnp.ones((2, 1, 1, 4))


def test_nothing_is_written_past_the_end():
    with pytest.raises(ArgumentValueError, match=r"It decodes position 3, .* room for 3 positions"):
        attention_cache_step(CACHE, CACHE, jnp.int32(3), NEW, NEW, NEW, layer="It")
    step = jax.jit(lambda index: attention_cache_step(CACHE, CACHE, index, NEW, NEW, NEW))
    _, values, seen = step(5)
    assert np.isnan(values[:, -1]).all() and seen.all()


def test_step_with_64_bits():
    with jax.enable_x64(True):
        empty, new = jnp.zeros((2, 3, 1, 1), jnp.float32), jnp.ones((2, 1, 1, 1))
        for index in (jnp.int32(1), jnp.int64(1), 1):
            keys, _, seen = attention_cache_step(empty, empty, index, new, new, new)
            assert keys.dtype == jnp.float32
            assert keys[0].ravel().tolist() == [0, 1, 0]
            assert seen[0].ravel().tolist() == [True, True, False]


# Attention without weights.


@pytest.mark.parametrize("masked_gradient", [True, False])
def test_plain_attention_and_its_derivatives_equal_those_of_probabilities(masked_gradient):
    q, k, v = qkv()
    bias, mask = array(2, 4, 5, 6), RNG.random((2, 1, 5, 6)) < 0.7
    mask[0, :, 2] = False

    def of_probs(q, k, v, bias):
        logits = attention_logits(q, k) * 8**-0.5 + bias
        masked = logits + bool_to_bias(mask) if masked_gradient else jnp.where(mask, logits, -1e15)
        return attention_context(jax.nn.softmax(masked, axis=-1), v)

    def plain(q, k, v, bias):
        structured = AttentionMask(arrays=(jnp.asarray(mask),))
        return plain_attention(q, k, v, bias=bias, mask=structured, masked_gradient=masked_gradient)

    tangents = tuple(np.roll(x, 1) for x in (q, k, v, bias))
    for derive in (jax.jvp, lambda fn, x, t: jax.vjp(fn, *x)[1](fn(*x))):
        expected, actual = (
            jax.jit(functools.partial(derive, fn))((q, k, v, bias), tangents)
            for fn in (of_probs, plain)
        )
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_nnx_attention_is_the_same_with_and_without_weights(rate):
    q = array(2, 5, 4, 8)
    options = {"mask": RNG.random((2, 1, 5, 5)) < 0.7, "bias": array(1, 4, 5, 5)}
    options |= {"dropout_rate": rate, "dropout_rng": jax.random.key(0)}
    module = nnx.Module()  # it sows the weights
    with_weights = nnx.dot_product_attention(q, q, q, module=module, **options)
    np.testing.assert_allclose(
        nnx.dot_product_attention(q, q, q, **options), with_weights, rtol=1e-5, atol=1e-6
    )


def test_scale_may_be_traced():
    q, k, v = qkv()
    scaled = jax.jit(lambda scale: dot_product_attention(q, k, v, scale=scale))(0.3)
    np.testing.assert_allclose(scaled, dot_product_attention(q, k, v, scale=0.3), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_half_precision_are_those_of_probabilities(dtype):
    """Gradients of weights that are not divided yet would underflow."""
    q, k, v, cotangent = (jnp.asarray(array(1, 90, 1, 8) * 0.1, dtype) for _ in range(4))

    def of_probs(q, k, v):
        return attention_context(attention_probs(attention_logits(q, k) * 8**-0.5), v)

    expected, actual = (
        jax.jit(lambda q, k, v, g, fn=fn: jax.vjp(fn, q, k, v)[1](g))(q, k, v, cotangent)
        for fn in (of_probs, dot_product_attention)
    )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_masks_have_all_axes_of_the_batch(implementation):
    """Segments and positions of each of 2 × 2 sequences, against each sequence alone."""
    q = array(2, 2, 3, 2, 4)
    segments = jnp.asarray(RNG.integers(0, 2, (2, 2, 3)))
    positions = jnp.asarray(RNG.integers(0, 3, (2, 2, 3)))

    @jax.jit
    def attend(q, segments, positions):
        mask = AttentionMask(causal_mask, positions, positions, segments)
        return nnx.dot_product_attention(q, q, q, mask=mask, implementation=implementation)

    together = attend(q, segments, positions)
    for i in np.ndindex(2, 2):
        alone = attend(q[i][None], segments[i][None], positions[i][None])[0]
        np.testing.assert_allclose(together[i], alone, rtol=1e-5, atol=1e-6)


def test_queries_whose_keys_are_masked_or_padded_attend_to_all():
    """As with weights: a bias of the lowest number does not push a query to masked keys."""
    q = array(1, 3, 1, 4)
    bias = jnp.full((1, 1, 3, 3), jnp.finfo(jnp.float32).min)
    actual = nnx.dot_product_attention(q, q, q, bias=bias, mask=causal_mask)
    expected = nnx.dot_product_attention(q, q, q, bias=bias, mask=causal_mask, module=nnx.Module())
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
