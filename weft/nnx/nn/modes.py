"""Modes of layers: behavior that differs between training, evaluation and decoding.

A mode is an attribute, set by `model.train()` and `model.eval()`, and an argument of the call,
which overrides the attribute unless it is None.
"""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import InvalidRngError, MissingModeError, RngArgumentError
from weft.nnx.rngs import Rngs, RngStream


def mode_of(layer: Any, name: str, given: bool | None) -> bool:
    """Returns the mode in which a layer is called.

    Args:
        name: attribute that holds the mode.
        given: the call's argument.

    Raises:
        MissingModeError: if it is neither passed nor set.

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
    """Returns a key from PRNG streams, from one stream, or the given key.

    Args:
        name: name of the stream.
        layer: name of the layer, for errors.

    Raises:
        InvalidRngError: if `rngs` is None.
        RngArgumentError: if `rngs` has another type.
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
            f"{layer} applies dropout but has no PRNG stream; give it rngs=nnx.Rngs({name}=0) "
            "when it is made or called, or call it with deterministic=True."
        )
    raise not_streams(rngs, layer)


def kept_stream(rngs: Any, name: str, layer: str) -> RngStream | None:
    """Returns a stream for a layer, forked from the given stream; None stays None.

    Args:
        rngs: PRNG streams, or one stream.
        name: name of the stream.
        layer: name of the layer, for errors.

    Raises:
        RngArgumentError: if `rngs` has another type.
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
    """Returns the error about `rngs` of a wrong type."""
    return RngArgumentError(
        f"{layer} was given rngs={rngs!r}; expected PRNG streams such as nnx.Rngs(0), one stream, "
        "or, in a call, a key."
    )
