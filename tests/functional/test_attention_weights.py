import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from weft import functional
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.attention_weights import (
    attention_weights,
    check_attention_shapes,
    drop_attention_weights,
)

KEYS = jax.random.split(jax.random.key(0), 3)
Q = jax.random.normal(KEYS[0], (2, 5, 3, 4))
K = jax.random.normal(KEYS[1], (2, 7, 3, 4))


def test_is_the_softmax_of_scaled_products():
    logits = np.einsum("bqhd,bkhd->bhqk", Q, K) / 2
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(attention_weights(Q, K), expected, rtol=1e-5)
    np.testing.assert_allclose(attention_weights(Q[0], K[0]), expected[0], rtol=1e-5)
    np.testing.assert_allclose(attention_weights(Q[None], K[None]), expected[None], rtol=1e-5)


def test_bias_and_mask():
    mask = jnp.arange(7) > 3
    weights = attention_weights(Q, K, bias=jnp.full((5, 1), 3.0), mask=mask)
    np.testing.assert_allclose(weights, attention_weights(Q, K, mask=mask), rtol=1e-5)
    assert (weights[..., :4] == 0).all()
    np.testing.assert_allclose(weights[..., 4:], attention_weights(Q, K[:, 4:]), rtol=1e-5)
    np.testing.assert_allclose(
        attention_weights(Q, K, mask=jnp.zeros((5, 7))), jnp.full((2, 3, 5, 7), 1 / 7), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    q, k = Q.astype(dtype), K.astype(dtype)
    assert attention_weights(q, k, mask=jnp.ones(7)).dtype == dtype
    weights = attention_weights(q, k, float32_softmax=True)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights, attention_weights(Q, K), atol=2e-2)


def test_what_multiplies():
    calls = []

    def dot_general(*args, **kwargs):
        calls.append((args[2], kwargs["precision"]))
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
def test_what_does_not_broadcast_is_named(name, shape):
    with pytest.raises(ArgumentShapeError, match=rf"{name} has shape \(.*, \(2, 3, 5, 7\): \(\*ba"):
        attention_weights(Q, K, **{name: jnp.ones(shape)})


def test_heads_that_share_keys():
    shared = functional.attention_logits(Q[:, :, :2], K[:, :, :1])
    each = functional.attention_logits(Q[:, :, :2], jnp.repeat(K[:, :, :1], 2, axis=2))
    np.testing.assert_allclose(shared, each, rtol=1e-5)
    averaged = functional.attention_context(shared, K[:, :, :1])
    np.testing.assert_allclose(
        averaged, functional.attention_context(each, jnp.repeat(K[:, :, :1], 2, axis=2)), rtol=1e-4
    )


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropped_weights(broadcast):
    plain = attention_weights(Q, K)
    kept = drop_attention_weights(plain, rate=0.5, prng_key=KEYS[2], broadcast=broadcast)
    np.testing.assert_allclose(kept, jnp.where(kept == 0, 0, 2 * plain), rtol=1e-5)
    assert bool(((kept == 0) == (kept[:1, :1] == 0)).all()) == broadcast
    assert (drop_attention_weights(plain, rate=1.0, prng_key=KEYS[2]) == 0).all()
    with pytest.raises(ArgumentValueError, match=r"dropout_rate=0.5 without dropout_rng: give a"):
        drop_attention_weights(plain, rate=0.5, prng_key=None)


def test_shapes_that_do_not_fit():
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
