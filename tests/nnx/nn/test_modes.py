import jax
import pytest

from weft.errors import (
    InvalidRngError,
    MissingModeError,
    RngArgumentError,
    RngStreamNotFoundError,
)
from weft.nnx.module import Module
from weft.nnx.nn.modes import drawn_key, kept_stream, mode_of
from weft.nnx.rngs import Rngs, RngStream


class Layer(Module):
    def __init__(self, decode):
        self.decode = decode


@pytest.mark.parametrize(
    "own, given, mode", [(True, None, True), (True, False, False), (None, 0, 0)]
)
def test_what_is_given_goes_before_what_is_set(own, given, mode):
    assert mode_of(Layer(own), "decode", given) is mode


def test_a_mode_that_is_nowhere():
    message = r"Layer was called with decode=None, and has decode=None itself; .*decode=True or Fal"
    with pytest.raises(MissingModeError, match=message):
        mode_of(Layer(None), "decode", None)


def test_keys():
    rngs, key = Rngs(0, dropout=1), jax.random.key(5)
    assert drawn_key(rngs, "dropout", "") == RngStream(1)()
    assert drawn_key(rngs.dropout, "", "") == jax.random.fold_in(jax.random.key(1), 1)
    assert drawn_key(key, "", "") is key
    with pytest.raises(
        InvalidRngError, match=r"It applies dropout .* rngs=nnx.Rngs\(noise=0\) when"
    ):
        drawn_key(None, "noise", "It")
    with pytest.raises(
        RngArgumentError, match="It was given rngs=3; expected PRNG streams such as"
    ):
        drawn_key(3, "noise", "It")
    with pytest.raises(RngStreamNotFoundError, match="'noise'"):
        drawn_key(Rngs(params=0), "noise", "It")


def test_streams_of_a_layer():
    rngs = Rngs(0, dropout=1)
    stream = kept_stream(rngs, "dropout", "")
    assert stream is not None and stream is not rngs.dropout and stream.tag == "dropout"
    assert rngs.dropout.count[...] == 1 and stream.count[...] == 0
    stream = kept_stream(rngs.default, "dropout", "")
    assert stream is not None and stream.tag == "default"
    assert kept_stream(None, "dropout", "") is None
    with pytest.raises(RngArgumentError, match="It was given rngs=Array"):
        kept_stream(jax.random.key(0), "dropout", "It")
