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
from weft.functional import attention_mask
from weft.functional.attention_mask import (
    AttentionMask,
    causal_mask,
    left_right_window_mask,
    make_causal_mask,
)
from weft.linen.attention import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    SelfAttention,
    dot_product_attention,
    dot_product_attention_weights,
)
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = draw(1, 2, 5, 8)
OTHER = draw(2, 2, 7, 6)


@jax.jit
def reference(params, x, other, mask=None):
    def project(name, x):
        return (
            jnp.einsum("bld,dhf->blhf", x, params[name]["kernel"])
            + params[name]["bias"][None, None]
        )

    query, key, value = project("query", x), project("key", other), project("value", other)
    logits = jnp.einsum("bqhf,bkhf->bhqk", query, key) / jnp.sqrt(query.shape[-1])
    logits = logits if mask is None else jnp.where(mask, logits, -1e30)
    found = jnp.einsum("bhqk,bkhf->bqhf", jax.nn.softmax(logits), value)
    return (
        jnp.einsum("bqhf,hfo->bqo", found, params["out"]["kernel"])
        + params["out"]["bias"][None, None]
    )


def test_matches_reference():
    layer = MultiHeadDotProductAttention(2, qkv_features=6, out_features=3)
    y, variables = jax.jit(layer.init_with_output)(KEY, X, OTHER)
    np.testing.assert_allclose(y, reference(variables["params"], X, OTHER), rtol=1e-5, atol=1e-5)
    y, variables = jax.jit(SelfAttention(4).init_with_output)(KEY, X, make_causal_mask(X[..., 0]))
    mask = jnp.tril(jnp.ones((5, 5), bool))
    np.testing.assert_allclose(y, reference(variables["params"], X, X, mask), rtol=1e-5, atol=1e-5)


def test_input_defaults():
    layer = MultiHeadAttention(2)
    variables = layer.init(KEY, X)
    itself = layer.apply(variables, X)
    np.testing.assert_array_equal(itself, layer.apply(variables, X, X, X))
    np.testing.assert_array_equal(itself, SelfAttention(2).apply(variables, X))
    variables = layer.init(KEY, X, OTHER)
    other = layer.apply(variables, X, OTHER)
    np.testing.assert_array_equal(other, layer.apply(variables, X, inputs_kv=OTHER))
    np.testing.assert_array_equal(other, layer.apply(variables, X, OTHER, OTHER))


def test_weights_are_kept():
    layer = MultiHeadAttention(2, dropout_rate=0.5, deterministic=False)
    y, kept = layer.apply(
        layer.init(KEY, X), X, sow_weights=True, rngs={"dropout": KEY}, mutable="intermediates"
    )
    (weights,) = kept["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 5, 5) and y.shape == X.shape
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


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


def test_custom_attention_fn():
    seen = {}

    def some(query, key, value, mask=None, dtype=None):
        seen["some"] = mask.shape, dtype
        return value

    def anything(*args, **kwargs):
        seen["anything"] = len(args), kwargs
        return args[2]

    mask = jnp.ones((2, 1, 5, 5))
    SelfAttention(2, attention_fn=some, dtype=jnp.float16).init(KEY, X, mask)
    SelfAttention(2, attention_fn=anything).init(KEY, X)
    assert seen == {"some": ((2, 1, 5, 5), jnp.float16), "anything": (3, {})}


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


def test_queries_and_keys_are_normalised():
    layer = SelfAttention(2, normalize_qk=True)
    variables = layer.init(KEY, X)
    assert variables["params"]["query_ln"]["scale"].shape == (4,)
    shifted = jax.tree.map(jnp.copy, variables)
    shifted["params"]["query"]["kernel"] *= 7
    np.testing.assert_allclose(
        layer.apply(variables, X), layer.apply(shifted, X), rtol=1e-3, atol=1e-3
    )


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


def test_default_attention_fn():
    assert MultiHeadAttention(2).attention_fn is dot_product_attention


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


def test_causal_padding_mask():
    valid = jnp.array([[1, 1, 0]])
    mask = attention_mask.combine_masks(
        attention_mask.make_causal_mask(valid), attention_mask.make_attention_mask(valid, valid)
    )
    assert mask[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


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
