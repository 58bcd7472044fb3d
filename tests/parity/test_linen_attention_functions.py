"""Attention and masks as functions of Linen: the same programs on Flax and on Weft."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.keys import draw
from tests.parity.linen import KEY, named, same_compiled

Q, K, V = draw(4, 2, 5, 4, 8), draw(5, 2, 6, 4, 8), draw(6, 2, 6, 4, 3)


def function(name, *inputs, **kwargs):
    return lambda nn: (getattr(nn, name)(*inputs, **kwargs), {})


# The attention of Flax adds axes silently to a bias and a mask of fewer.
@pytest.mark.rank_promotion("allow")
@named(
    [
        {},
        {"bias": draw(8, 2, 1, 5, 6)},
        {"bias": draw(9, 6), "mask": jnp.arange(6) > 2},
        {"mask": jnp.zeros((5, 6))},
        {"mask": jnp.arange(30).reshape(5, 6) % 3},
        {"dropout_rate": 0.3, "dropout_rng": KEY},
        {"dropout_rate": 0.3, "dropout_rng": KEY, "broadcast_dropout": False},
        {"dropout_rate": 0.3, "deterministic": True},
        {"precision": "highest"},
    ]
)
def test_functions(kwargs):
    same_compiled(function("dot_product_attention", Q, K, V, **kwargs))
    same_compiled(function("dot_product_attention_weights", Q, K, **kwargs))


def test_custom_dot_general_and_einsum():
    einsums = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    same_compiled(function("dot_product_attention", Q, K, V, **einsums))
    same_compiled(function("dot_product_attention_weights", Q, K, einsum=jnp.einsum))
    kwargs = {"einsum_dot_general": lax.dot_general}
    same_compiled(function("dot_product_attention", Q, K, V, **kwargs))
    same_compiled(function("dot_product_attention_weights", Q, K, **kwargs))


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("dtypes", ["fff", "hhh", "hfh", "fhh", "iii"])
def test_dtypes_of_functions(dtype, force, dtypes):
    kinds = {"f": jnp.float32, "h": jnp.bfloat16, "i": jnp.int32}
    q, k, v = (x.astype(kinds[kind]) for x, kind in zip((Q, K, V), dtypes, strict=True))
    kwargs = {"dtype": dtype, "force_fp32_for_softmax": force}
    same_compiled(function("dot_product_attention", q, k, v, **kwargs), 5e-2)
    same_compiled(function("dot_product_attention_weights", q, k, **kwargs), 5e-2)


@pytest.mark.parametrize("ndim", [3, 5])
def test_more_and_fewer_axes(ndim):
    q, k, v = ((x[0] if ndim == 3 else x[None]) for x in (Q, K, V))
    kwargs = {"dropout_rate": 0.5, "dropout_rng": KEY}
    same_compiled(function("dot_product_attention", q, k, v, **kwargs))


IDS = jnp.array([[1, 1, 0], [2, 0, 0]])


@named(
    [
        {},
        {"dtype": bool},
        {"pairwise_fn": jnp.equal},
        {"pairwise_fn": lambda q, k: q + 2 * k, "extra_batch_dims": 2},
        {"dtype": jnp.int32, "extra_batch_dims": 1},
    ]
)
def test_attention_masks(kwargs):
    same_compiled(function("make_attention_mask", IDS, IDS[:, :2], **kwargs))
    same_compiled(function("make_attention_mask", IDS[0], IDS[1], **kwargs))


@named([{}, {"dtype": bool}, {"extra_batch_dims": 2}])
def test_causal_masks(kwargs):
    for x in (IDS, IDS[0], jnp.ones((2, 3, 4))):
        same_compiled(function("make_causal_mask", x, **kwargs))


@named([{}, {"dtype": jnp.int32}])
def test_combined_masks(kwargs):
    for masks in ((), (None, None), (IDS, None), (IDS, IDS[:1], None, 1 - IDS)):
        same_compiled(function("combine_masks", *masks, **kwargs))
