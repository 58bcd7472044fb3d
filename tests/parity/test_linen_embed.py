"""Embeddings of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same_compiled, same_error

IDS, X = jnp.array([[0, 3], [2, 1]]), draw(1, 2, 3, 4)


def in_half(*args, dtype, inexact=True):
    assert dtype is None
    assert inexact == (len(args) == 2)
    return [jnp.asarray(x, jnp.bfloat16) for x in args]


@named(
    [
        {},
        {"dtype": jnp.bfloat16},
        {"dtype": "float16"},
        {"param_dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
        {"embedding_init": jax.nn.initializers.ones},
        {"promote_dtype": in_half},
    ]
)
def test_embed(kwargs):
    def program(nn):
        layer = nn.Embed(5, 4, **kwargs)
        y, variables = layer.init_with_output(KEY, IDS)
        logits, same_variables = layer.init_with_output(KEY, X, method="attend")
        half = layer.apply(variables, X.astype(jnp.bfloat16), method="attend")
        return (y, logits, half), [variables, same_variables]

    same_compiled(program, 2e-2 if len(kwargs.keys() - {"embedding_init"}) else 1e-5)


@pytest.mark.parametrize(
    "ids",
    [jnp.array([4, 5, -1, -5, -6]), np.array([1]), jnp.array(2), jnp.array([3], "uint8"), IDS[:0]],
    ids=["outside", "numpy", "one", "uint8", "none"],
)
def test_ids(ids):
    same_compiled(lambda nn: nn.Embed(5, 4).init_with_output(KEY, ids))


def test_one_id():
    same_compiled(lambda nn: nn.Embed(1, 4).init_with_output(KEY, jnp.array([0, 0])))


def test_integer_table():
    same_compiled(lambda nn: nn.Embed(5, 4, dtype=jnp.int32).init_with_output(KEY, IDS))


def test_axis_metadata():
    def program(nn):
        init = nn.with_partitioning(jax.nn.initializers.normal(), ("ids", "features"))
        return nn.Embed(5, 4, embedding_init=init).init_with_output(KEY, IDS)

    same_compiled(program)


def test_tied_embeddings():
    def program(nn):
        class Model(nn.Module):
            def setup(self):
                self.embed = nn.Embed(5, 4)
                self.dense = nn.Dense(4)

            def __call__(self, ids):
                return self.embed.attend(self.dense(self.embed(ids))), self.embed.embedding

        variables = Model().init(KEY, IDS)
        gradient = jax.grad(lambda v: (Model().apply(v, IDS)[0] ** 2).sum())(variables)
        return (Model().apply(variables, IDS), gradient), variables

    same_compiled(program)


@pytest.mark.parametrize("ids", [jnp.array([1.0]), jnp.array([True])], ids=["floats", "booleans"])
def test_non_integer_ids(ids):
    same_error(lambda nn: nn.Embed(5, 4).init(KEY, ids))


def test_wrong_table_shape():
    variables = {"params": {"embedding": jnp.ones((4, 4))}}
    same_error(lambda nn: nn.Embed(5, 4).apply(variables, IDS))
