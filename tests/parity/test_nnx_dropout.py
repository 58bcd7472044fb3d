"""Dropout of NNX: the same programs on Flax and on Weft."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.objects import named, same, same_error, same_signature

X = draw(3, 4, 5)


@named(
    [
        {},
        {"broadcast_dims": (0,)},
        {"broadcast_dims": (-1,)},
        {"broadcast_dims": (0, 1)},
        {"deterministic": True},
        {"rng_collection": "noise"},
        {"rng_collection": "default"},
    ]
)
@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_options(rate, kwargs):
    def program(nnx):
        rngs = nnx.Rngs(0, dropout=1)
        layer = nnx.Dropout(rate, rngs=rngs, **kwargs)
        return [layer(X), layer(X)], [layer, rngs]

    same(program)


def test_key_sources():
    def program(nnx):
        rngs = nnx.Rngs(0, dropout=1)
        of_one, of_none = nnx.Dropout(0.5, rngs=rngs.dropout), nnx.Dropout(0.5)
        given = [rngs, rngs.dropout, rngs.default, nnx.Rngs(5), jax.random.key(3)]
        given.append(jax.random.PRNGKey(3))
        out = [of_one(X), *(of_none(X, rngs=r) for r in given), of_one(X, rngs=rngs)]
        return out, [of_one, of_none, rngs]

    same(program)


def test_modes():
    def program(nnx):
        layer = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))
        out = [layer(X), layer(X, deterministic=False)]
        layer.train()
        out += [layer(X), layer(X, deterministic=True)]
        layer.eval()
        out += [layer(X), nnx.view(layer, deterministic=False)(X)]
        layer.set_attributes(deterministic=None)
        return [*out, layer(X, deterministic=False)], [layer]

    same(program)


def test_split_streams():
    def program(nnx):
        layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        nnx.split_rngs(layer, splits=3)
        graphdef, state = nnx.split(layer)
        return [jax.vmap(lambda state: nnx.merge(graphdef, state)(X))(state)], [layer]

    same(program)


FAILURES = {
    "no mode": (
        lambda nnx: nnx.Dropout(0.5, deterministic=None, rngs=nnx.Rngs(0))(X),
        "Dropout was called with deterministic=None.*nnx.view",
    ),
    "no mode at rate 0": (
        lambda nnx: nnx.Dropout(0.0, deterministic=None)(X),
        "deterministic=None",
    ),
    "no stream": (lambda nnx: nnx.Dropout(0.5)(X), r"0.5 applies .* give it rngs=nnx.Rngs\(dro"),
    "a key to make it": (
        lambda nnx: nnx.Dropout(0.5, rngs=jax.random.key(0)),
        "Dropout with rate=0.5 was given rngs=Array",
    ),
    "a number to make it": (
        lambda nnx: nnx.Dropout(0.5, rngs=0),
        "was given rngs=0; expected PRNG",
    ),
    "a number to call it": (lambda nnx: nnx.Dropout(0.5)(X, rngs=0), "was given rngs=0; expected"),
    "another stream": (
        lambda nnx: nnx.Dropout(0.5, rngs=nnx.Rngs(params=0)),
        "unknown PRNG stream 'dropout'.*streams: 'params'",
    ),
    "another stream to call it": (
        lambda nnx: nnx.Dropout(0.5)(X, rngs=nnx.Rngs(params=0)),
        "unknown PRNG stream 'dropout'",
    ),
}


@pytest.mark.parametrize("program, message", FAILURES.values(), ids=FAILURES)
def test_errors(program, message):
    assert re.search(message, same_error(program))


@pytest.mark.parametrize("method", ["__init__", "__call__", "set_view"])
def test_signatures(method):
    same_signature("Dropout", method)


def test_dtypes_stay():
    def program(nnx):
        layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        return [layer(X.astype(dtype)) for dtype in (jnp.bfloat16, jnp.float16)], [layer]

    same(program)
