import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxprs import largest_array
from tests.keys import draw, quick_key
from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
    InvalidRngError,
    ModifyScopeVariableError,
    WeftError,
)
from weft.functional.attention_mask import (
    AttentionMask,
    causal_mask,
    left_right_window_mask,
    make_causal_mask,
)
from weft.linen.attention import (
    MultiHeadAttention,
    SelfAttention,
    dot_product_attention,
    dot_product_attention_weights,
)
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = draw(1, 2, 5, 8)
OTHER = draw(2, 2, 7, 6)


def test_dropout_needs_key_and_deterministic():
    layer = MultiHeadAttention(2, dropout_rate=0.5)
    variables = layer.init(KEY, X, deterministic=True)
    plain = MultiHeadAttention(2).apply(variables, X)
    np.testing.assert_array_equal(layer.apply(variables, X, deterministic=True), plain)
    dropped = layer.apply(variables, X, deterministic=False, rngs={"dropout": KEY})
    assert not jnp.allclose(dropped, plain)
    with pytest.raises(InvalidRngError, match="dropout"):
        layer.apply(variables, X, deterministic=False)
    with pytest.raises(WeftError, match="deterministic"):
        layer.apply(variables, X)
    given = [layer.apply(variables, X, deterministic=False, dropout_rng=KEY) for _ in range(2)]
    np.testing.assert_array_equal(*given)


def test_decoding_equals_causal_attention():
    layer = SelfAttention(2, decode=True)
    variables = layer.init(KEY, X)
    assert variables["cache"]["cached_key"].shape == (2, 5, 2, 4)
    whole = SelfAttention(2).apply(variables, X, make_causal_mask(X[..., 0]))
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable="cache"))
    for i in range(5):
        y, changed = step(variables, X[:, i : i + 1])
        variables = {**variables, **changed}
        np.testing.assert_allclose(y, whole[:, i : i + 1], rtol=1e-5, atol=1e-5)
    assert variables["cache"]["cache_index"] == 5
    y, changed = step(variables, X[:, :1])
    assert jnp.isnan(y).all() and changed["cache"]["cache_index"] == 5
    with pytest.raises(ArgumentValueError, match=r"decodes position 5, .* room for 5 positions"):
        layer.apply(variables, X[:, :1], mutable="cache")


def test_decoding_with_a_mask_of_the_cache():
    layer = SelfAttention(2, decode=True)
    variables = layer.init(KEY, X)
    first_only = jnp.arange(5)[None, None, None] == 0
    for i in range(2):
        y, changed = layer.apply(variables, X[:, i : i + 1], first_only, mutable="cache")
        variables = {**variables, **changed}
    first = SelfAttention(2).apply(variables, X[:, :1])
    np.testing.assert_allclose(y, first, rtol=1e-5, atol=1e-5)


def test_errors_of_decoding():
    layer = SelfAttention(2, decode=True)
    variables = layer.init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"expects \(2, 1, 2, 4\): give one position at a"):
        layer.apply(variables, X[:, :2], mutable="cache")
    with pytest.raises(ArgumentShapeError, match="batch that the cache was made with"):
        layer.apply(variables, X[:1, :1], mutable="cache")
    with pytest.raises(ModifyScopeVariableError, match="cached_key"):
        layer.apply(variables, X[:, :1])


def test_errors_of_arguments():
    layer = MultiHeadAttention(2)
    with pytest.raises(ArgumentValueError, match="was given inputs_v without inputs_k"):
        layer.init(KEY, X, None, OTHER)
    with pytest.raises(
        ArgumentValueError, match="was given both inputs_kv and inputs_k or inputs_v"
    ):
        layer.init(KEY, X, OTHER, inputs_kv=OTHER)
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) has 8 features .*=3"):
        MultiHeadAttention(3).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=r"mask has shape \(2, 1, 5, 9\), which does not"):
        layer.init(KEY, X, mask=jnp.ones((2, 1, 5, 9)))


Q = draw(1, 2, 5, 3, 4)
K = draw(2, 2, 7, 3, 4)
V = draw(3, 2, 7, 3, 6)


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


def test_blocks_compute_the_same():
    x, ids = draw(8, 2, 5, 8), jnp.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2]])
    mask = AttentionMask(causal_mask, query_segments=ids)

    def loss(implementation, params, x):
        layer = MultiHeadAttention(num_heads=2, implementation=implementation)
        return (layer.apply(params, x, mask=mask) ** 2).sum()

    params = MultiHeadAttention(num_heads=2).init(KEY, x)
    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, name), (0, 1)))(params, x)
        for name in ("plain", "blockwise")
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_long_layer_has_no_array_of_all_pairs():
    length, layer = 4096, MultiHeadAttention(num_heads=1)
    x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
    params = jax.eval_shape(layer.init, KEY, x)

    def loss(params, x):
        return layer.apply(params, x, mask=causal_mask).sum()

    assert largest_array(jax.grad(loss, (0, 1)), params, x) < length**2 / 16


def test_what_blocks_cannot_compute():
    def attend(query, key, value, mask=None):
        return value

    x = draw(8, 2, 5, 8)
    layer = MultiHeadAttention(num_heads=2, implementation="blockwise")
    with pytest.raises(ArgumentValueError, match=r"'blockwise' cannot .* sow_weights stores"):
        layer.init(KEY, x, sow_weights=True)
    with pytest.raises(ArgumentValueError, match=r"cannot .* einsum_dot_general computes"):
        dot_product_attention(
            *[x[:, :, None]] * 3, implementation="blockwise", einsum_dot_general=jax.lax.dot_general
        )
    with pytest.raises(ArgumentValueError, match="attention_fn accepts no `implementation`"):
        layer.clone(attention_fn=attend).init(KEY, x)


def test_a_structured_mask_in_decoding():
    x, mask = draw(9, 2, 5, 8), left_right_window_mask(2, 0)
    layer = MultiHeadAttention(num_heads=2)
    variables = layer.init(KEY, x)
    whole = layer.apply(variables, x, mask=mask)
    layer = layer.clone(decode=True)
    cache = layer.init(KEY, x)["cache"]
    for i in range(5):
        given = {**variables, "cache": cache}
        step, new = layer.apply(given, x[:, i : i + 1], mask=mask, mutable="cache")
        cache = new["cache"]
        np.testing.assert_allclose(step[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)


def test_dot_general_modules():
    class Scaled(Module):
        @compact
        def __call__(self, *args):
            return self.param("scale", jax.nn.initializers.ones, ()) * jnp.einsum(*args)

    layer = SelfAttention(
        2, qk_attn_weights_einsum_cls=Scaled, attn_weights_value_einsum_cls=Scaled
    )
    y, variables = layer.init_with_output(KEY, X)
    assert sorted(variables["params"]) == ["Scaled_0", "Scaled_1", "key", "out", "query", "value"]
    np.testing.assert_allclose(y, SelfAttention(2).apply(variables, X), rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentValueError, match="give both, or none"):
        SelfAttention(2, qk_attn_weights_einsum_cls=Scaled).init(KEY, X)
