import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.attention_functions import dot_product_attention, dot_product_attention_weights

KEY = jax.random.key(0)
Q = draw(1, 2, 5, 3, 4)
K = draw(2, 2, 7, 3, 4)
V = draw(3, 2, 7, 3, 6)


def test_averages_the_values():
    weights = dot_product_attention_weights(Q, K)
    expected = jnp.einsum("bhqk,bkhd->bqhd", weights, V)
    np.testing.assert_allclose(dot_product_attention(Q, K, V), expected, rtol=1e-5, atol=1e-6)
    one = dot_product_attention(Q[0], K[0], V[0])
    np.testing.assert_allclose(one, expected[0], rtol=1e-5, atol=1e-6)


def test_dtype():
    half = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    assert dot_product_attention(*half).dtype == jnp.bfloat16
    assert dot_product_attention(*half, force_fp32_for_softmax=True).dtype == jnp.float32
    assert dot_product_attention(Q, K, V, dtype=jnp.float16).dtype == jnp.float16
    assert dot_product_attention(Q, *half[1:]).dtype == jnp.float32


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(broadcast):
    kept = dot_product_attention_weights(
        Q, K, dropout_rng=KEY, dropout_rate=0.5, broadcast_dropout=broadcast
    )
    plain = dot_product_attention_weights(Q, K, dropout_rate=0.5, deterministic=True)
    np.testing.assert_allclose(kept, jnp.where(kept == 0, 0, 2 * plain), rtol=1e-5)
    assert bool(((kept == 0) == (kept[:1, :1] == 0)).all()) == broadcast
    nothing = dot_product_attention(Q, K, V, dropout_rng=KEY, dropout_rate=1.0)
    assert (nothing == 0).all()


def test_errors():
    with pytest.raises(
        ArgumentShapeError, match=r"'query': \(2, 5, 3, 4\).*the axes before the la"
    ):
        dot_product_attention_weights(Q, K[:1])
    with pytest.raises(ArgumentShapeError, match="agree in heads and features, the last two"):
        dot_product_attention(Q, K[:, :, :1], V[:, :, :1])
    with pytest.raises(ArgumentShapeError, match="agree in heads and features, the last two"):
        dot_product_attention(Q, K[..., :3], V)
    with pytest.raises(ArgumentShapeError, match="agree between key and value in all axes but"):
        dot_product_attention(Q, K, V[:, :5])
    with pytest.raises(ArgumentShapeError, match=r"expected \(\*batch, length, heads, features\)"):
        dot_product_attention_weights(jnp.ones((3, 4)), jnp.ones((3, 4)))
    with pytest.raises(ArgumentValueError, match=r"dropout_rate=0.5 without dropout_rng: give a"):
        dot_product_attention(Q, K, V, dropout_rate=0.5)
    with pytest.raises(ArgumentValueError, match="was given; give both, or none"):
        dot_product_attention(Q, K, V, qk_attn_weights_einsum=jnp.einsum)
