import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import (
    attention_context,
    attention_logits,
    attention_probs,
    bool_to_bias,
    cap_logits,
    causal_mask,
    dot_product_attention,
    dropout,
    evaluate_mask,
)

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def qkv(heads=4, kv_heads=2, target=5, source=6):
    return array(2, target, heads, 8), array(2, source, kv_heads, 8), array(2, source, kv_heads, 3)


def reference(q, k, v, *, bias=0.0, scale=None, cap=None, sink=None):
    """Attention of one head after the other."""
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


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_each_head(kv_heads):
    q, k, v = qkv(kv_heads=kv_heads)
    y = dot_product_attention(*map(jnp.array, (q, k, v)))
    np.testing.assert_allclose(y, reference(q, k, v), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("shape", [(1, 1, 5, 6), (2, 1, 1, 6), (1, 4, 5, 1)])
def test_biases_broadcast(shape):
    (q, k, v), bias = qkv(), array(*shape)
    y = dot_product_attention(*map(jnp.array, (q, k, v)), bias=jnp.array(bias))
    np.testing.assert_allclose(y, reference(q, k, v, bias=bias), rtol=1e-4, atol=1e-5)


def test_what_is_masked_has_no_influence_and_no_gradient():
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
def test_a_query_that_may_attend_to_nothing_stays_finite(sink):
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


def test_decoding_step_by_step_equals_the_whole():
    q, k, v = map(jnp.array, qkv(target=6))
    positions = jnp.arange(6)[None]
    whole = dot_product_attention(q, k, v, mask=evaluate_mask(causal_mask, positions, positions))
    for step in range(6):
        mask = evaluate_mask(causal_mask, jnp.full((2, 1), step), positions)
        one = dot_product_attention(q[:, step : step + 1], k, v, mask=mask)
        np.testing.assert_allclose(one[:, 0], whole[:, step], rtol=1e-4, atol=1e-5)


def test_logits_and_probabilities_are_float32_and_the_context_as_the_values():
    q, k, v = (jnp.array(x, jnp.bfloat16) for x in qkv())
    logits = attention_logits(q, k)
    probs = attention_probs(logits.astype(jnp.bfloat16))
    assert (logits.dtype, probs.dtype) == (jnp.float32, jnp.float32)
    assert attention_context(probs, v).dtype == jnp.bfloat16
    y = dot_product_attention(q, k, v)
    expected = reference(*(np.asarray(x, np.float32) for x in (q, k, v)))
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=0.05, atol=0.02)


def test_large_logits_do_not_overflow():
    q, k, v = (jnp.array(x) for x in qkv())
    for sink in (None, jnp.full(4, 1e4)):
        y = dot_product_attention(1e4 * q, k, v, logit_sink=sink)
        assert np.isfinite(y).all()


def test_gradient_of_the_sink_is_that_of_an_extra_key():
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


def test_dropout_is_of_the_probabilities():
    q, k, v = map(jnp.array, qkv())
    key = jax.random.key(0)
    y = dot_product_attention(q, k, v, scale=1.0, dropout_rate=0.3, dropout_key=key)
    probs = dropout(attention_probs(attention_logits(q, k)), rate=0.3, prng_key=key)
    np.testing.assert_allclose(y, attention_context(probs, v), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentValueError, match="needs a prng_key"):
        dot_product_attention(q, k, v, dropout_rate=0.3)


def test_keys_and_values_are_not_repeated_for_shared_heads():
    q, k, v = map(jnp.array, qkv(heads=8, kv_heads=2))
    text = jax.jit(dot_product_attention).lower(q, k, v).as_text()
    assert "2x6x8x8" not in text  # batch, source, query heads, dim


def test_capped_logits_stay_within_the_cap():
    x = jnp.linspace(-100, 100, 11)
    np.testing.assert_allclose(cap_logits(x, 5.0), 5 * np.tanh(np.array(x) / 5), rtol=1e-5)


def test_heads_that_cannot_be_shared_are_named():
    q, k, v = map(jnp.array, qkv(heads=4, kv_heads=3))
    with pytest.raises(ArgumentShapeError, match=r"4 heads of queries .* 3 heads of keys"):
        dot_product_attention(q, k, v)


def test_mask_and_its_bias_do_the_same():
    q, k, v = map(jnp.array, qkv())
    mask = jnp.arange(6)[None, None, None, :] < 4
    np.testing.assert_array_equal(
        dot_product_attention(q, k, v, mask=mask),
        dot_product_attention(q, k, v, bias=bool_to_bias(mask)),
    )
