"""Modes: what a layer does differently in training, evaluation or decoding.

A mode is an attribute of the layer, so that `model.train()` and `model.eval()` reach it, and an
argument of the call, which goes before the attribute. None says nothing.
"""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import InvalidRngError, MissingModeError, RngArgumentError
from weft.nnx.rngs import Rngs, RngStream


def mode_of(layer: Any, name: str, given: bool | None) -> bool:
    """The mode in which a layer is called.

    Args:
        layer: has the mode as an attribute.
        name: of the attribute.
        given: what was given in the call.

    Raises:
        MissingModeError: if it is neither given nor set.

    Example:
        >>> from weft import nnx
        >>> layer = nnx.Module()
        >>> layer.deterministic = True
        >>> mode_of(layer, "deterministic", None), mode_of(layer, "deterministic", False)
        (True, False)
    """
    mode = getattr(layer, name) if given is None else given
    if mode is None:
        raise MissingModeError(type(layer).__name__, name)
    return mode


def drawn_key(rngs: Any, name: str, layer: str) -> jax.Array:
    """A key to draw with.

    Args:
        rngs: PRNG streams, one stream, or a key.
        name: of the stream.
        layer: who draws, for errors.

    Raises:
        InvalidRngError: if there is nothing to draw with.
        RngArgumentError: if `rngs` is something else.
        RngStreamNotFoundError: if there is no such stream.

    Example:
        >>> rngs = Rngs(dropout=0)
        >>> bool(drawn_key(rngs, "dropout", "") == drawn_key(RngStream(0), "dropout", ""))
        True
    """
    if isinstance(rngs, RngStream):
        return rngs()
    if isinstance(rngs, Rngs):
        return rngs[name]()
    if isinstance(rngs, jax.Array):
        return rngs
    if rngs is None:
        raise InvalidRngError(
            f"{layer} drops at random, and has no PRNG stream; give it rngs=nnx.Rngs({name}=0) "
            "when it is made or called, or call it with deterministic=True."
        )
    raise not_streams(rngs, layer)


def kept_stream(rngs: Any, name: str, layer: str) -> RngStream | None:
    """A stream of a layer's own, from one key of the stream that it is given; None for none.

    Args:
        rngs: PRNG streams, or one stream.
        name: of the stream.
        layer: whose it will be, for errors.

    Raises:
        RngArgumentError: if `rngs` is something else.
        RngStreamNotFoundError: if there is no such stream.

    Example:
        >>> kept_stream(Rngs(dropout=0), "dropout", "").tag
        'dropout'
    """
    if rngs is None:
        return None
    if isinstance(rngs, Rngs):
        rngs = rngs[name]
    if not isinstance(rngs, RngStream):
        raise not_streams(rngs, layer)
    return rngs.fork()


def not_streams(rngs: Any, layer: str) -> RngArgumentError:
    """The error about something else in the place of PRNG streams."""
    return RngArgumentError(
        f"{layer} was given rngs={rngs!r}; expected PRNG streams such as nnx.Rngs(0), one of them, "
        "or in a call also a key."
    )
