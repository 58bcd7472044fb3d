"""Dropout and PReLU of NNX, and the modes and streams of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import (
    ArgumentValueError,
    InvalidRngError,
    MissingModeError,
    RngArgumentError,
    RngStreamNotFoundError,
)
from weft.nnx.module import Module
from weft.nnx.nn.elementwise import Dropout
from weft.nnx.nn.parameters import draw_key, fork_stream, resolve_mode
from weft.nnx.rngs import Rngs, RngStream

X = jnp.ones((50, 40))


def test_no_key_is_needed_if_deterministic():
    assert Dropout(0.0)(X) is X
    assert Dropout(0.5)(X, deterministic=True) is X
    assert (Dropout(1.0)(X) == 0).all()
    with pytest.raises(
        InvalidRngError, match=r"Dropout with rate=0.5 applies .* rngs=nnx.Rngs\(drop"
    ):
        Dropout(0.5)(X)


@pytest.mark.parametrize("rate", [-0.5, 1.5])
def test_rate_is_between_0_and_1(rate):
    with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1"):
        Dropout(rate, rngs=Rngs(0))(X)


class Layer(Module):
    def __init__(self, decode):
        self.decode = decode


def test_missing_mode():
    message = r"Layer was called with decode=None, and has decode=None itself; .*decode=True or Fal"
    with pytest.raises(MissingModeError, match=message):
        resolve_mode(Layer(None), "decode", None)


def test_keys():
    rngs, key = Rngs(0, dropout=1), jax.random.key(5)
    assert draw_key(rngs, "dropout", "") == RngStream(1)()
    assert draw_key(rngs.dropout, "", "") == jax.random.fold_in(jax.random.key(1), 1)
    assert draw_key(key, "", "") is key
    with pytest.raises(
        InvalidRngError, match=r"It applies dropout .* rngs=nnx.Rngs\(noise=0\) when"
    ):
        draw_key(None, "noise", "It")
    with pytest.raises(
        RngArgumentError, match="It was given rngs=3; expected PRNG streams such as"
    ):
        draw_key(3, "noise", "It")
    with pytest.raises(RngStreamNotFoundError, match="'noise'"):
        draw_key(Rngs(params=0), "noise", "It")


def test_streams_of_a_layer():
    rngs = Rngs(0, dropout=1)
    stream = fork_stream(rngs, "dropout", "")
    assert stream is not None and stream is not rngs.dropout and stream.tag == "dropout"
    assert rngs.dropout.count[...] == 1 and stream.count[...] == 0
    stream = fork_stream(rngs.default, "dropout", "")
    assert stream is not None and stream.tag == "default"
    assert fork_stream(None, "dropout", "") is None
    with pytest.raises(RngArgumentError, match="It was given rngs=Array"):
        fork_stream(jax.random.key(0), "dropout", "It")


def test_along_axes():
    y = Dropout(0.5, broadcast_dims=(0,), rngs=Rngs(0))(X)
    assert (y == y[:1]).all() and (y != y[:, :1]).any()
    with pytest.raises(ArgumentValueError, match=r"broadcast_dims=\(2,\) .*\(50, 40\)"):
        Dropout(0.5, broadcast_dims=(2,), rngs=Rngs(0))(X)


def test_call_accepts_streams_stream_or_key():
    layer = Dropout(0.5, rng_collection="noise")
    key = jax.random.key(3)
    a = layer(X, rngs=Rngs(noise=key))
    np.testing.assert_array_equal(a, layer(X, rngs=Rngs(key).default))
    np.testing.assert_array_equal(a, layer(X, rngs=jax.random.fold_in(key, 0)))
    with pytest.raises(RngStreamNotFoundError, match="unknown PRNG stream 'noise'"):
        layer(X, rngs=Rngs(dropout=0))
    with pytest.raises(
        RngArgumentError, match=r"was given rngs='noise'; expected PRNG streams such"
    ):
        layer(X, rngs="noise")  # pyright: ignore[reportArgumentType]
