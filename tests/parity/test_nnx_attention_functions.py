"""Attention of NNX as functions: the same programs on Flax and on Weft."""

import inspect

import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import weft.nnx
from tests.keys import draw
from tests.parity.objects import in_half, named, same_compiled, same_error

# Flax says that weights are kept in another way from now on.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

KEYS = jax.random.split(jax.random.key(0), 4)
Q = draw(0, 2, 5, 4, 3)
K = draw(1, 2, 7, 4, 3)
V = draw(2, 2, 7, 4, 3)
MASK = jax.random.bernoulli(KEYS[3], 0.7, (2, 1, 5, 7)).at[..., 0].set(True)
DROP = {"dropout_rng": jax.random.key(4), "dropout_rate": 0.5}


@named(
    [
        {},
        {"bias": jax.random.normal(KEYS[3], (1, 4, 5, 7))},
        {"bias": jnp.arange(7.0)},
        {"mask": MASK},
        {"mask": MASK.astype(jnp.float32)},
        {"mask": MASK, "bias": jnp.arange(7.0)},
        {"mask": jnp.zeros((5, 7), bool)},
        {"is_causal": True},
        {"is_causal": True, "mask": MASK},
        {"dtype": jnp.bfloat16},
        {"precision": "highest"},
        {"promote_dtype": in_half},
        DROP,
        {**DROP, "broadcast_dropout": False},
        {**DROP, "deterministic": True},
        {"dropout_rate": 0.5, "deterministic": True},
    ]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention(kwargs, kv_heads):
    def program(nnx):
        k, v = K[:, :, :kv_heads], V[:, :, :kv_heads]
        return nnx.dot_product_attention(Q, k, v, **kwargs), []

    same_compiled(program, 2e-2 if {"dtype", "promote_dtype"} & kwargs.keys() else 1e-5)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_weights_are_kept(kv_heads):
    def program(nnx):
        module = nnx.Module()
        k, v = K[:, :, :kv_heads], V[:, :, :kv_heads]
        y = nnx.dot_product_attention(Q, k, v, mask=MASK, is_causal=True, module=module, **DROP)
        return [y, module.attention_weights.get_value()], [type(module.attention_weights)]

    same_compiled(program)


def test_axes_and_dtypes():
    def program(nnx):
        f = nnx.dot_product_attention
        half = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
        several = [f(*(x[0] for x in (Q, K, V))), f(*(x[None] for x in (Q, K, V)))]
        return [*several, f(*half), f(half[0], K, half[2]).astype(jnp.bfloat16)], []

    same_compiled(program, 2e-2)


@named(
    [
        {},
        {"extra_batch_dims": 2},
        {"dtype": bool},
        {"pairwise_fn": jnp.greater_equal},
    ]
)
def test_masks(kwargs):
    x = jnp.array([[1, 1, 0], [1, 0, 0]])

    def program(nnx):
        mask = nnx.make_attention_mask(x, x[:, :2], **kwargs)
        causal = {k: v for k, v in kwargs.items() if k != "pairwise_fn"}
        made = [mask, nnx.make_causal_mask(x, **causal)]
        dtype = kwargs.get("dtype", jnp.float32)
        combined = nnx.combine_masks(made[1], None, made[1][..., :1, :], dtype=dtype)
        return [*made, combined, nnx.combine_masks()], []

    same_compiled(program)


FAILURES = {
    "heads": lambda nnx: nnx.dot_product_attention(Q, K[:, :, :3], V[:, :, :3]),
    "lengths": lambda nnx: nnx.dot_product_attention(Q, K, V[:, :5]),
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_errors(program):
    assert "shape" in same_error(program)


@pytest.mark.parametrize(
    "name",
    ["dot_product_attention", "combine_masks", "make_attention_mask", "make_causal_mask"],
)
def test_signatures(name):
    theirs, ours = (inspect.signature(getattr(nnx, name)) for nnx in (flax.nnx, weft.nnx))
    assert [(p.name, p.kind) for p in theirs.parameters.values()] == [
        (p.name, p.kind) for p in ours.parameters.values() if p.name != "implementation"
    ]
