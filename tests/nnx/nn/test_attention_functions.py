import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.kinds import Intermediate
from weft.nnx.module import Module
from weft.nnx.nn.attention_functions import dot_product_attention

Q = draw(1, 2, 5, 4, 3)
K = draw(2, 2, 7, 4, 3)
V = draw(3, 2, 7, 4, 6)


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_averages_the_values():
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", Q, K) / np.sqrt(3))
    close(dot_product_attention(Q, K, V), jnp.einsum("bhqk,bkhd->bqhd", weights, V))


def test_heads_share_those_of_keys():
    few = K[:, :, :2], V[:, :, :2]
    each = (jnp.repeat(x, 2, axis=2) for x in few)
    close(dot_product_attention(Q, *few), dot_product_attention(Q, *each))


def test_causal():
    mask = jnp.tril(jnp.ones((5, 7), bool))
    close(dot_product_attention(Q, K, V, is_causal=True), dot_product_attention(Q, K, V, mask=mask))
    first = jnp.arange(7) < 1
    y = dot_product_attention(Q, K, V, mask=first, is_causal=True)
    close(y, jnp.broadcast_to(V[:, :1], y.shape))


def test_weights_are_kept_before_dropout():
    module = Module()
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "module": module}
    for _ in range(2):
        dropped = dot_product_attention(Q, K, V, **options)
    kept = module.attention_weights
    assert isinstance(kept, Intermediate) and len(kept.get_value()) == 2
    close(kept.get_value()[0].sum(-1), 1)
    assert (jnp.abs(dropped - dot_product_attention(Q, K, V)) > 1e-3).any()


def test_all_may_be_dropped():
    y = dot_product_attention(Q, K, V, dropout_rng=jax.random.key(0), dropout_rate=1.0)
    assert (y == 0).all()


def test_dtype():
    half = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    assert dot_product_attention(*half).dtype == jnp.bfloat16
    assert dot_product_attention(Q, *half[1:]).dtype == jnp.float32
    assert dot_product_attention(Q, K, V, dtype=jnp.float16).dtype == jnp.float16


def test_errors():
    with pytest.raises(ArgumentShapeError, match="agree in the axes before the last three"):
        dot_product_attention(Q, K[:1], V[:1])
    with pytest.raises(ArgumentShapeError, match=r"4 heads of queries .* cannot share 3 heads"):
        dot_product_attention(Q, K[:, :, :3], V[:, :, :3])
    with pytest.raises(ArgumentShapeError, match="agree in features, the last axis"):
        dot_product_attention(Q, K[..., :2], V)
    with pytest.raises(ArgumentShapeError, match="agree between key and value in all axes but"):
        dot_product_attention(Q, K, V[:, :5])
    with pytest.raises(ArgumentShapeError, match=r"mask has shape \(5, 8\)"):
        dot_product_attention(Q, K, V, mask=jnp.ones((5, 8)))
    with pytest.raises(ArgumentValueError, match=r"dropout_rate=0.5 without dropout_rng: give a"):
        dot_product_attention(Q, K, V, dropout_rate=0.5)
