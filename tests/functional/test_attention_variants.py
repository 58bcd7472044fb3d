import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import (
    per_dim_scale,
    relative_to_absolute,
    sigmoid_attention_probs,
    xl_attention_logits,
)


def test_sigmoid_probs():
    logits = jnp.array([-1.0, 0.0, 2.0], jnp.bfloat16).reshape(1, 1, 1, 3)
    bias = jnp.array([0.5, 0.0, -1e15]).reshape(1, 1, 1, 3)
    probs = sigmoid_attention_probs(logits, bias)
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs.ravel(), [1 / (1 + np.exp(0.5)), 0.5, 0.0], rtol=1e-6)


def test_per_dim_scale():
    param = np.array([-1.0, 0.0, 3.0], np.float32)
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    expected = x * np.log1p(np.exp(param)) / np.log(2)
    np.testing.assert_allclose(per_dim_scale(jnp.array(x), jnp.array(param)), expected, rtol=1e-6)
    assert per_dim_scale(jnp.array(x, jnp.bfloat16), jnp.array(param)).dtype == jnp.bfloat16


@pytest.mark.parametrize("length", [1, 2, 5])
def test_relative_to_absolute(length):
    x = np.random.default_rng(0).normal(size=(2, length, 2 * length - 1))
    y = relative_to_absolute(jnp.array(x))
    for i in range(length):
        for j in range(length):
            np.testing.assert_allclose(y[:, i, j], x[:, i, j - i + length - 1], rtol=1e-6)


def test_xl_logits_by_hand():
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
