import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxprs import largest_array
from tests.keys import draw
from weft import nnx
from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
    MissingCacheError,
    MissingModeError,
)
from weft.functional.attention_mask import (
    AttentionMask,
    as_attention_mask,
    causal_mask,
    left_right_window_mask,
)
from weft.nnx.module import Module, view
from weft.nnx.nn.attention import (
    MultiHeadAttention,
    dot_product_attention,
)
from weft.nnx.rngs import Rngs
from weft.nnx.split_merge import merge, split
from weft.nnx.state import to_flat_state
from weft.nnx.variables import Cache

X = draw(1, 2, 5, 8)
OTHER = draw(2, 2, 7, 6)


def attention(*args, **kwargs):
    return MultiHeadAttention(*(args or (2, 8)), **{"decode": False, "rngs": Rngs(0), **kwargs})


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_dropout_follows_train_mode():
    class Model(Module):
        def __init__(self):
            self.layers = [attention(dropout_rate=0.5, deterministic=None)]

        def __call__(self, x, **kwargs):
            return self.layers[0](x, **kwargs)

    model, plain = Model(), attention()(X)
    with pytest.raises(MissingModeError, match=r"MultiHeadAttention .* deterministic=None itself"):
        model(X)
    model.eval()
    np.testing.assert_array_equal(model(X), plain)
    assert not jnp.allclose(model(X, deterministic=False), plain)
    model.train()
    assert not jnp.allclose(model(X), model(X))
    np.testing.assert_array_equal(model(X, deterministic=True), plain)
    given = [model(X, rngs=rngs) for rngs in (Rngs(3), Rngs(dropout=3), Rngs(3).default)]
    np.testing.assert_array_equal(given[0], given[1])
    np.testing.assert_array_equal(given[0], given[2])
    key = jax.random.fold_in(jax.random.key(3), 0)
    np.testing.assert_array_equal(given[0], model(X, rngs=key))


@pytest.mark.parametrize("kwargs", [{}, {"num_kv_heads": 1, "normalize_qk": True}])
def test_decoding_equals_causal_attention(kwargs):
    layer = attention(**kwargs)
    layer.init_cache(X.shape)
    assert layer.cached_key.shape == (2, 5, layer.num_kv_heads, 4)
    whole = layer(X, is_causal=True)
    graphdef, state = split(layer)

    @jax.jit
    def step(state, x):
        inner = merge(graphdef, state)
        y = inner(x, decode=True)
        return y, split(inner)[1]

    for i in range(5):
        y, state = step(state, X[:, i : i + 1])
        close(y, whole[:, i : i + 1])
    decoded = merge(graphdef, state)
    assert decoded.cache_index[...] == 5
    close(decoded(X, is_causal=True), whole)


def test_decoding_with_a_mask_of_the_cache():
    layer = attention(decode=True)
    layer.init_cache(X.shape)
    first_only = jnp.arange(5)[None, None, None] == 0
    for i in range(2):
        y = layer(X[:, i : i + 1], mask=first_only)
    close(y, layer(X[:, 1:2], X[:, :1], decode=False))


def test_a_full_cache_is_refused():
    layer = attention(decode=True)
    layer.init_cache(X[:, :2].shape)
    for i in range(2):
        layer(X[:, i : i + 1])
    with pytest.raises(ArgumentValueError, match=r"decodes position 2, .* room for 2 positions;"):
        layer(X[:, 2:3])
    assert layer.cache_index.get_value() == 2
    compiled = nnx.jit(lambda layer, x: layer(x))
    for _ in range(2):
        assert jnp.isnan(compiled(layer, X[:, 2:3])).all()
        assert layer.cache_index.get_value() == 2


def test_views_have_separate_caches():
    model = attention(dtype=jnp.float16)
    decoder = view(model, decode=True, batch_size=2, max_length=9)
    assert decoder.query.kernel is model.query.kernel and model.cached_key is None
    assert decoder.cached_key.shape == (2, 9, 2, 4) and decoder.cached_key.dtype == jnp.float16
    assert decoder(X[:, :1]).shape == (2, 1, 8)
    several = view(model, batch_size=(3, 2), max_length=9, deterministic=True)
    assert several.cached_key.shape == (3, 2, 9, 2, 4) and several.decode is False
    caches = [path for path, v in to_flat_state(split(decoder)[1]) if isinstance(v, Cache)]
    assert caches == [("cache_index",), ("cached_key",), ("cached_value",)]
    with pytest.raises(
        ArgumentValueError, match="batch_size=2 and max_length=None for a cache; give"
    ):
        view(model, batch_size=2)


def test_errors_of_decoding():
    layer = attention(decode=None)
    with pytest.raises(MissingModeError, match="MultiHeadAttention was called with decode=None"):
        layer(X)
    with pytest.raises(
        MissingCacheError, match=r"in_features=8 was called .*\(\(batch, length, 8\)"
    ):
        layer(X[:, :1], decode=True)
    with pytest.raises(
        ArgumentShapeError, match=r"input of shape \(8,\); expected \(\*batch, leng"
    ):
        layer.init_cache((8,))
    layer.init_cache(X.shape)
    with pytest.raises(ArgumentShapeError, match=r"expects \(2, 1, 2, 4\): give one position at a"):
        layer(X[:, :2], decode=True)
    with pytest.raises(ArgumentShapeError, match="batch that the cache was made with"):
        layer(X[:1, :1], decode=True)
    assert layer.cache_index[...] == 0 and (layer.cached_key[...] == 0).all()


@pytest.mark.parametrize("name, inputs", [
    ("inputs_q", (X[..., :6], OTHER)),
    ("inputs_k", (X, X)),
    ("inputs_v", (X, OTHER, X)),
    ("inputs_q", (X[0, 0], OTHER)),
])  # fmt: skip
def test_mismatched_inputs(name, inputs):
    with pytest.raises(ArgumentShapeError, match=rf"in_kv_features=6 was given {name} of shape \("):
        attention(2, 8, in_kv_features=6)(*inputs)


def test_bad_arguments():
    with pytest.raises(ArgumentValueError, match=r"8 features .* divisible by num_heads=3; give"):
        attention(3, 8)
    with pytest.raises(ArgumentValueError, match="num_heads=4 and num_kv_heads=3; expected"):
        attention(4, 8, num_kv_heads=3)
    with pytest.raises(
        ArgumentValueError, match="was given inputs_v without inputs_k; give inputs_k"
    ):
        attention()(X, None, X)
    with pytest.raises(ArgumentShapeError, match=r"mask has shape \(2, 1, 5, 6\), which does not"):
        attention()(X, mask=jnp.ones((2, 1, 5, 6)))


Q = draw(1, 2, 5, 4, 3)
K = draw(2, 2, 7, 4, 3)
V = draw(3, 2, 7, 4, 6)


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


IDS = jnp.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2]])


def test_structured_masks_equal_arrays():
    for mask in (causal_mask, AttentionMask(causal_mask, query_segments=IDS)):
        array = as_attention_mask(mask).to_array(5, 5)
        close(dot_product_attention(Q, Q, Q, mask=mask), dot_product_attention(Q, Q, Q, mask=array))


def test_blocks_compute_the_same_in_a_layer():
    x, first = draw(5, 3, 2, 5, 8), jnp.arange(5) < 4
    mask = AttentionMask(left_right_window_mask(2, 1), query_segments=IDS, arrays=(first,))

    def loss(x, implementation):
        layer = MultiHeadAttention(
            2, 8, num_kv_heads=1, decode=False, implementation=implementation, rngs=Rngs(0)
        )
        y = layer(x, mask=mask, is_causal=True)
        return (y**2).sum()

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    for a, b in zip(*(step(x, name) for name in ("plain", "blockwise")), strict=True):
        close(a, b)


def test_a_structured_mask_in_decoding():
    x = draw(6, 2, 5, 8)
    layer = MultiHeadAttention(2, 8, decode=False, rngs=Rngs(0))
    whole = layer(x, mask=left_right_window_mask(2, 0))
    layer.init_cache(x.shape)
    for i in range(5):
        step = layer(x[:, i : i + 1], mask=left_right_window_mask(2, 0), decode=True)
        close(step[:, 0], whole[:, i])


def test_a_long_layer_has_no_array_of_all_pairs():
    length = 4096
    x, ids = jax.ShapeDtypeStruct((1, length, 8), jnp.float32), jnp.zeros((1, length), jnp.int32)
    layer = MultiHeadAttention(1, 8, decode=False, rngs=Rngs(0))
    graphdef, params = split(layer)

    def loss(params, x):
        return merge(graphdef, params)(
            x, mask=AttentionMask(query_segments=ids), is_causal=True
        ).sum()

    assert largest_array(jax.grad(loss, (0, 1)), params, x) < length**2 / 16


def test_what_blocks_cannot_compute():
    def attend(query, key, value, mask=None):
        return value

    x, options = draw(7, 2, 5, 8), {"implementation": "blockwise", "decode": False}
    layer = MultiHeadAttention(2, 8, rngs=Rngs(0), **options)
    with pytest.raises(ArgumentValueError, match=r"'blockwise' cannot .* sow_weights keeps"):
        layer(x, sow_weights=True)
    with pytest.raises(ArgumentShapeError, match=r"mask has shape \(5, 8\)"):
        layer(x, mask=jnp.ones((5, 8)))
    layer = MultiHeadAttention(2, 8, attention_fn=attend, rngs=Rngs(0), **options)
    with pytest.raises(ArgumentValueError, match="attention_fn accepts no `implementation`"):
        layer(x)


def test_dropout_in_blocks_is_shared_as_asked():
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "implementation": "blockwise"}
    identity = jnp.broadcast_to(jnp.eye(7)[:, None], (2, 7, 4, 7))
    shared, own = (
        dot_product_attention(Q, K, identity, broadcast_dropout=b, **options) != 0
        for b in (True, False)
    )
    assert (shared == shared[:1, :, :1]).all() and (own != own[:1, :, :1]).any()
