"""Embeddings and PReLU of NNX, and functions of arrays: the same programs on Flax and on Weft."""

import inspect

import flax.nnx
import flax.nnx.traversals
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.nnx
from tests.keys import quick_key
from tests.parity.objects import X, named, normal, same_compiled, same_error, same_signature

IDS = jnp.array([[3, 0], [-1, 9]])


def in_half(args, /, *, dtype=None, inexact=True):
    assert dtype is not None
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in args)


@named(
    [
        {},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
        {"embedding_init": normal},
        {"promote_dtype": in_half},
        {"embedding_metadata": {"out_sharding": ("ids", None), "eager_sharding": False}},
    ]
)
def test_embed(kwargs):
    def program(nnx):
        rngs = nnx.Rngs(quick_key(0))
        layer = nnx.Embed(6, 5, rngs=rngs, **kwargs)
        half = layer.attend(X.astype(jnp.bfloat16))
        return (layer(IDS), layer(jnp.uint8(2)), layer.attend(X), half), [layer, rngs]

    same_compiled(program, 2e-2)


def test_embed_of_integers():
    def program(nnx):
        options = {"dtype": jnp.int32, "param_dtype": jnp.int32}
        ones = jax.nn.initializers.ones
        layer = nnx.Embed(6, 5, embedding_init=ones, rngs=nnx.Rngs(quick_key(0)), **options)
        return layer(IDS[0]), [layer]

    same_compiled(program)


@named(
    [
        {},
        {"negative_slope_init": 0.3},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.float32, "promote_dtype": in_half},
        {"negative_slope_metadata": {"tag": "slope"}},
    ]
)
def test_prelu(kwargs):
    def program(nnx):
        layer = nnx.PReLU(**kwargs)
        return (layer(X), layer(X.astype(jnp.float16)), layer(jnp.arange(-3, 3))), [layer]

    same_compiled(program, 2e-2)


FAILURES = {
    "ids that are not integers": lambda nnx: nnx.Embed(6, 5, rngs=nnx.Rngs(0))(X),
    "no streams": lambda nnx: nnx.Embed(6, 5),
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    same_error(program)


@pytest.mark.parametrize(
    ("name", "method"),
    [("Embed", "__init__"), ("Embed", "__call__"), ("Embed", "attend"), ("PReLU", "__init__")],
)
def test_signatures(name, method):
    same_signature(name, method)


FUNCTIONS = (
    "celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh",
    "identity", "leaky_relu", "log_sigmoid", "log_softmax", "logsumexp", "relu", "relu6", "selu",
    "sigmoid", "silu", "soft_sign", "softmax", "softplus", "standardize", "swish", "tanh",
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_arrays(name):
    x = X[..., :4]
    theirs, ours = getattr(flax.nnx, name), getattr(weft.nnx, name)
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6)


def test_one_hot():
    same_compiled(lambda nnx: (nnx.one_hot(IDS, 4, dtype=jnp.int8, axis=0), []))


@pytest.mark.parametrize("name", ["avg_pool", "max_pool", "min_pool"])
@named(
    [
        {},
        {"strides": (2, 1)},
        {"padding": "SAME"},
        {"padding": ((1, 0), (0, 1)), "strides": (1, 2)},
    ]
)
def test_pooling(name, kwargs):
    same_compiled(lambda nnx: (getattr(nnx, name)(X, (2, 2), **kwargs), []))


def test_other_pooling():
    def program(nnx):
        averages = nnx.avg_pool(X[0], (2, 2), None, "SAME", count_include_pad=False)
        return (averages, nnx.pool(X, 0.0, jax.lax.add, (2,), (1,), "SAME")), []

    same_compiled(program)


def test_initializers():
    theirs, ours = flax.nnx.initializers, weft.nnx.initializers
    names = [n for n in dir(theirs) if n[0] != "_" and hasattr(jax.nn.initializers, n)]
    assert {*names, "zeros_init", "ones_init"} <= set(dir(ours))
    for name in ("zeros_init", "ones_init", "lecun_normal", "orthogonal"):
        make = [getattr(x, name)()(jax.random.key(0), (3, 2)) for x in (theirs, ours)]
        np.testing.assert_array_equal(*make)


NESTED = {"b": {"x": 1, "y": {}, 2: [{"z": 3}]}, "a": 4}
TRAVERSALS = {
    "flat": lambda t: t.flatten_mapping(NESTED),
    "flat with empty nodes": lambda t: list(t.flatten_mapping(NESTED, keep_empty_nodes=True)),
    "flat in one string": lambda t: t.flatten_mapping({"a": {"b": 1}}, sep="/"),
    "flat to a leaf": lambda t: t.flatten_mapping(NESTED, is_leaf=lambda path, x: path == ("b",)),
    "the whole a leaf": lambda t: t.flatten_mapping(NESTED, is_leaf=lambda path, x: True),
    "of nothing": lambda t: (t.flatten_mapping({}), t.flatten_to_sequence({})),
    "pairs": lambda t: t.flatten_to_sequence(NESTED),
    "pairs to a leaf": lambda t: t.flatten_to_sequence(NESTED, is_leaf=lambda path, x: bool(path)),
    "there and back": lambda t: t.unflatten_mapping(
        t.flatten_mapping(NESTED, keep_empty_nodes=True)
    ),
    "pairs and back": lambda t: t.unflatten_mapping(t.flatten_to_sequence(NESTED)),
    "one string and back": lambda t: t.unflatten_mapping({"a/b": 1, "c": 2}, sep="/"),
    "nothing and back": lambda t: t.unflatten_mapping({}),
}


@pytest.mark.parametrize("program", TRAVERSALS.values(), ids=TRAVERSALS)
def test_traversals(program):
    theirs, ours = program(flax.nnx.traversals), program(weft.nnx.traversals)
    assert theirs == ours
    assert str(theirs) == str(ours)
