"""Attention of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.keys import draw, quick_key
from tests.parity.linen import KEY, named, same, same_compiled, same_error

# Flax warns of layers, and of an argument, that it means to drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X, OTHER, THIRD = draw(1, 2, 5, 8), draw(2, 2, 7, 6), draw(3, 2, 7, 4)
MASK = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.6
normal = jax.nn.initializers.normal(1.0)
RNGS = {"params": KEY, "dropout": quick_key(7)}


def dot_general(*args, **kwargs):
    return 2 * lax.dot_general(*args, **kwargs)


def values_only(query, key, value, mask=None, dropout_rate=0.0, deterministic=False):
    return value * (1 + dropout_rate) * (2 if deterministic else 3)


def initialized(name, *inputs, call=None, **kwargs):
    def program(nn):
        return getattr(nn, name)(**kwargs).init_with_output(RNGS, *inputs, **(call or {}))

    return program


def tolerance(kwargs):
    return 4e-2 if {"dtype", "param_dtype"} & kwargs.keys() else 1e-5


OPTIONS = [
    {"num_heads": 1},
    {"num_heads": 4, "qkv_features": 12, "out_features": 3},
    {"num_heads": 2, "dtype": jnp.bfloat16},
    {"num_heads": 2, "param_dtype": jnp.bfloat16},
    {"num_heads": 2, "dtype": jnp.float16, "force_fp32_for_softmax": True},
    {"num_heads": 2, "use_bias": False, "precision": "highest", "normalize_qk": True},
    {
        "num_heads": 2,
        "kernel_init": normal,
        "bias_init": jax.nn.initializers.normal(0.5),
        "out_kernel_init": jax.nn.initializers.normal(2.0),
        "out_bias_init": jax.nn.initializers.ones,
    },
    {"num_heads": 2, "normalize_qk": True, "dtype": jnp.bfloat16},
    {"num_heads": 2, "dropout_rate": 0.5, "deterministic": True},
    {"num_heads": 2, "dropout_rate": 0.5, "deterministic": False},
    {"num_heads": 2, "dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
    {"num_heads": 2, "qkv_dot_general": dot_general},
    {"num_heads": 2, "out_dot_general": dot_general},
    {
        "num_heads": 2,
        "qkv_dot_general_cls": lambda: dot_general,
        "qkv_dot_general": len,
        "out_dot_general_cls": lambda: dot_general,
    },
    {"num_heads": 2, "attention_fn": values_only, "dropout_rate": 0.5, "deterministic": False},
    {"num_heads": 2, "decode": True},
]


@named(OPTIONS)
def test_options(kwargs):
    same_compiled(initialized("MultiHeadDotProductAttention", X, **kwargs), tolerance(kwargs))


@named([OPTIONS[1], OPTIONS[5], {"num_heads": 2, "dropout_rate": 0.5, "deterministic": False}])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "SelfAttention"])
def test_other_layers(name, kwargs):
    same_compiled(initialized(name, X, **kwargs))


def test_positional_arguments():
    def program(nn):
        layer = nn.MultiHeadAttention(2, None, jnp.float32, 6, 3, False, 0.5, False)
        y, variables = layer.init_with_output(RNGS, X, OTHER, THIRD)
        return (y, nn.SelfAttention(2).init_with_output(KEY, X, MASK, True, None, True)), variables

    same_compiled(program)


@pytest.mark.parametrize(
    "inputs", [(X,), (X, OTHER), (X, OTHER, THIRD), (X[0],), (X[None], OTHER[None])], ids=len
)
def test_inputs(inputs):
    same_compiled(initialized("MultiHeadAttention", *inputs, num_heads=2))


def test_argument_variants():
    call = {"inputs_kv": OTHER}
    same_compiled(initialized("MultiHeadAttention", X, call=call, num_heads=2))
    call = {"mask": MASK, "deterministic": False}
    same_compiled(initialized("MultiHeadAttention", X, call=call, num_heads=2, dropout_rate=0.5))
    call = {"deterministic": False, "dropout_rng": quick_key(3)}
    same_compiled(initialized("SelfAttention", X, call=call, num_heads=2, dropout_rate=0.5))


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_sown_weights(dropout_rate):
    def program(nn):
        layer = nn.SelfAttention(2, dropout_rate=dropout_rate, deterministic=False)
        variables = layer.init(RNGS, X)
        apply = lambda **kwargs: layer.apply(variables, X, MASK, rngs=RNGS, **kwargs)  # noqa: E731
        return apply(sow_weights=True, mutable="intermediates"), variables

    same_compiled(program)


def test_dot_general_modules():
    def program(nn):
        class Scaled(nn.Module):
            @nn.compact
            def __call__(self, *args):
                return self.param("scale", normal, ()) * jnp.einsum(*args)

        layer = nn.SelfAttention(
            2, qk_attn_weights_einsum_cls=Scaled, attn_weights_value_einsum_cls=Scaled
        )
        return layer.init_with_output(KEY, X, MASK)

    same(program)


@named([{}, {"dtype": jnp.bfloat16}, {"normalize_qk": True}])
def test_decoding(kwargs):
    def program(nn):
        layer = nn.SelfAttention(2, decode=True, **kwargs)
        variables = layer.init(KEY, X[:, :3])
        states, mask = [], jnp.array([1, 0, 1])[None, None, None]
        for i in range(3):
            y, changed = layer.apply(
                variables, X[:, i : i + 1], mask if i == 2 else None, mutable="cache"
            )
            variables = {"params": variables["params"], **changed}
            states.append((y, changed))
        return states, variables["params"]

    same_compiled(program, tolerance(kwargs))


def test_axes_have_names():
    def program(nn):
        inputs = nn.with_partitioning(normal, ("embed", "heads", "kv"))
        out = nn.with_partitioning(normal, ("heads", "kv", "embed"))
        bias = nn.with_partitioning(normal, ("heads", "kv"))
        layer = nn.SelfAttention(
            2, kernel_init=inputs, out_kernel_init=out, bias_init=bias, out_bias_init=normal
        )
        return layer.init_with_output(KEY, X)

    same_compiled(program)


def test_under_jit_and_gradients():
    def program(nn):
        layer = nn.MultiHeadAttention(2)
        variables = layer.init(KEY, X)
        loss = lambda v: (layer.apply(v, X, mask=MASK) ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss)(variables), variables

    same_compiled(program, 1e-4)


@pytest.mark.parametrize(
    "program",
    [
        initialized("SelfAttention", X, num_heads=2, dropout_rate=0.5),
        initialized(
            "SelfAttention",
            X,
            num_heads=2,
            dropout_rate=0.5,
            deterministic=True,
            call={"deterministic": True},
        ),
        initialized("MultiHeadAttention", X, None, OTHER, num_heads=2),
        initialized("MultiHeadAttention", X, OTHER, call={"inputs_kv": X}, num_heads=2),
        initialized("MultiHeadAttention", X, call={"mask": jnp.ones((5, 9))}, num_heads=2),
        initialized("SelfAttention", X, num_heads=2, qk_attn_weights_einsum_cls=lambda: len),
    ],
)
def test_errors(program):
    same_error(program)


def test_named_errors():
    def without_key(nn):
        layer = nn.SelfAttention(2, dropout_rate=0.5, deterministic=False)
        return layer.apply(layer.init(KEY, X), X)

    def frozen_cache(nn):
        layer = nn.SelfAttention(2, decode=True)
        return layer.apply(layer.init(KEY, X), X[:, :1])

    same_error(without_key)
    same_error(frozen_cache)
