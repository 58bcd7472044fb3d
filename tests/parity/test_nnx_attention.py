"""Attention of NNX: the same programs on Flax and on Weft."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.objects import in_half, named, normal, same, same_error, same_signature, twice

# Flax says that weights are kept in another way from now on.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

Q = draw(1, 2, 5, 8)
KV = draw(2, 2, 7, 8)
MASK = np.random.default_rng(3).random((2, 1, 5, 5)) < 0.7
MASK[..., 0] = True
MASK = jax.device_put(MASK)


def attention(nnx, *args, rngs=None, **kwargs):
    options = {"decode": False, **kwargs}
    return nnx.MultiHeadAttention(
        *(args or (2, 8)), rngs=rngs or nnx.Rngs(0, params=7, dropout=3), **options
    )


OPTIONS = [
    {},
    {"qkv_features": 6, "out_features": 3},
    {"num_kv_heads": 1, "use_bias": False, "precision": "highest"},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16},
    {"param_dtype": jnp.float16, "dtype": jnp.float32, "normalize_qk": True},
    {
        "kernel_init": normal,
        "bias_init": normal,
        "out_kernel_init": jax.nn.initializers.uniform(),
        "out_bias_init": jax.nn.initializers.ones,
    },
    {"normalize_qk": True, "dtype": jnp.bfloat16},
    {"dropout_rate": 0.5, "deterministic": False},
    {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
    {"dropout_rate": 0.5, "deterministic": True, "keep_rngs": False},
    {"qkv_promote_dtype": in_half},
    {"out_promote_dtype": in_half, "qkv_dot_general": twice(jax.lax.dot_general)},
    {"ln_promote_dtype": in_half, "normalize_qk": True},
    {"out_dot_general": twice(jax.lax.dot_general)},
    {
        "qkv_dot_general_cls": lambda: twice(jax.lax.dot_general),
        "out_dot_general_cls": lambda: twice(jax.lax.dot_general),
    },
    {"attention_fn": lambda query, key, value, **kwargs: value},
    {
        "kernel_metadata": {"tag": "k"},
        "out_kernel_metadata": {"tag": "ok"},
        "bias_metadata": {"tag": "b"},
        "out_bias_metadata": {"tag": "ob"},
        "query_ln_scale_metadata": {"tag": "q"},
        "key_ln_scale_metadata": {"tag": "k"},
        "normalize_qk": True,
    },
]


def tolerance(kwargs):
    rough = {"dtype", "param_dtype", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"}
    return 4e-2 if rough & kwargs.keys() else 1e-5


@named(OPTIONS)
def test_options(kwargs):
    def program(nnx):
        layer = attention(nnx, **kwargs)
        return [layer(Q), layer(Q, mask=MASK, is_causal=True)], [layer]

    same(program, tolerance(kwargs))


@named([{}, {"normalize_qk": True}, {"dropout_rate": 0.5}, {"num_kv_heads": 1, "use_bias": False}])
def test_keys_of_one_stream(kwargs):
    def program(nnx):
        rngs = nnx.Rngs(0)
        return [], [attention(nnx, rngs=rngs, **kwargs), rngs]

    same(program)


def test_inputs():
    def program(nnx):
        layer, other = attention(nnx), attention(nnx, 2, 8, in_kv_features=6)
        kv = KV[:, :5, :6]
        out = [layer(Q, KV), layer(Q[0])]
        return [*out, other(Q, kv), other(Q, kv, 2 * kv)], [layer, other]

    same(program)


def test_dropout():
    def program(nnx):
        layer = attention(nnx, dropout_rate=0.5)
        rngs = nnx.Rngs(5, dropout=6)
        out = [
            layer(Q, deterministic=True),
            layer(Q, deterministic=False),
            layer(Q, deterministic=False, rngs=rngs),
            layer(Q, deterministic=False, rngs=rngs.default),
        ]
        layer.train()
        out.append(layer(Q))
        layer.eval()
        return [*out, layer(Q), nnx.view(layer, deterministic=False)(Q)], [layer, rngs]

    same(program)


@named([{}, {"dropout_rate": 0.5, "deterministic": False}, {"num_kv_heads": 1}])
def test_weights_are_kept(kwargs):
    def program(nnx):
        layer = attention(nnx, **kwargs)
        out = [layer(Q, sow_weights=True), layer(Q, mask=MASK, sow_weights=True)]
        kept = layer.attention_weights
        return [out, kept.get_value()], [
            type(kept),
            nnx.pop(layer, nnx.Intermediate) and None,
            layer,
        ]

    same(program)


@named([{}, {"num_kv_heads": 1, "normalize_qk": True, "dtype": jnp.float16}])
def test_decoding(kwargs):
    def program(nnx):
        layer = attention(nnx, **{**kwargs, "decode": True})
        dtype = kwargs.get("dtype", jnp.float32)
        layer.init_cache((2, 4, 8), dtype)
        seen = [type(layer.cached_key), type(layer.cache_index)]
        first = jnp.arange(4)[None, None, None] != 1
        out = [layer(Q[:, i : i + 1], mask=first if i == 2 else None) for i in range(4)]
        cache = nnx.to_pure_dict(nnx.split(layer, nnx.Cache, ...)[1])
        return [out, cache, layer(Q, decode=False)], seen

    same(program, 2e-3 if "dtype" in kwargs else 1e-5)


@named([{"shape": (2, 4, 8)}, {"shape": (3, 2, 4, 8)}, {"shape": (1, 8)}, {"dtype": jnp.bfloat16}])
def test_caches(kwargs):
    def program(nnx):
        layer = attention(nnx, 4, 8, num_kv_heads=2, decode=None)
        layer.init_cache(kwargs.get("shape", (2, 4, 8)), kwargs.get("dtype", jnp.float32))
        return [], [layer]

    same(program)


def test_decoding_in_jit():
    def program(nnx):
        layer = attention(nnx, decode=True)
        layer.init_cache((2, 3, 8))
        graphdef, state = nnx.split(layer)

        @jax.jit
        def step(state, x):
            inner = nnx.merge(graphdef, state)
            y = inner(x)
            return y, nnx.state(inner)

        out = []
        for i in range(3):
            y, state = step(state, Q[:, i : i + 1])
            out.append(y)
        return [out, nnx.to_pure_dict(state)], []

    same(program)


FAILURES = {
    "heads": (lambda nnx: attention(nnx, 3, 8), "8 features .* divisible by num_heads=3; give"),
    "heads of keys": (
        lambda nnx: attention(nnx, 4, 8, num_kv_heads=3),
        "num_heads=4 and num_kv_heads=3; expected num_heads to be a multiple",
    ),
    "features": (
        lambda nnx: attention(nnx)(Q[..., :6]),
        r"in_features=8, in_kv_features=8 was given inputs_q of shape \(2, 5, 6\); .* length, 8\)",
    ),
    "values alone": (lambda nnx: attention(nnx)(Q, None, KV), "given inputs_v without inputs_k"),
    "no mode": (lambda nnx: attention(nnx, decode=None)(Q), "was called with decode=None"),
    "no mode of dropout": (
        lambda nnx: attention(nnx, dropout_rate=0.5)(Q),
        "was called with deterministic=None",
    ),
    "no streams": (
        lambda nnx: attention(nnx, dropout_rate=0.5, keep_rngs=False)(Q, deterministic=False),
        r"applies dropout but has no PRNG stream; give it rngs=nnx.Rngs\(dropout=0\)",
    ),
    "no stream": (
        lambda nnx: attention(nnx, rngs=nnx.Rngs(params=0), dropout_rate=0.5),
        "unknown PRNG stream 'dropout'",
    ),
    "no cache": (
        lambda nnx: attention(nnx, decode=True)(Q[:, :1]),
        r"has no cache; create one .*layer.init_cache\(\(batch, length, 8\)\)",
    ),
    "several positions": (
        lambda nnx: cached(nnx)(Q),
        r"decodes with queries of shape \(2, 5, 2, 4\).*expects \(2, 1, 2, 4\): give one position",
    ),
    "another batch": (lambda nnx: cached(nnx)(Q[:1, :1]), "the batch that the cache was made with"),
}


def cached(nnx):
    layer = attention(nnx, decode=True)
    layer.init_cache((2, 4, 8))
    return layer


@pytest.mark.parametrize("program, message", FAILURES.values(), ids=FAILURES)
def test_errors(program, message):
    assert re.search(message, same_error(program))


@pytest.mark.parametrize("method", ["__init__", "__call__", "init_cache", "set_view"])
def test_signatures(method):
    same_signature("MultiHeadAttention", method)
