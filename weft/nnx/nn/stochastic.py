"""Dropout layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.dropout import keep_mask
from weft.nnx.module import Module
from weft.nnx.nn.modes import drawn_key, kept_stream, mode_of
from weft.nnx.rngs import Rngs, RngStream

__all__ = ["Dropout"]


class Dropout(Module):
    """Dropout: zeros elements at probability `rate`, scales up others (Srivastava et al., 2014).

    Args:
        rate: probability of zero, in `[0, 1]`.
        broadcast_dims: axes that share one dropout mask.
        deterministic: whether to return the input unchanged, set by `model.train()` and
            `model.eval()`; if None, calls must pass it.
        rng_collection: name of the PRNG stream.
        rngs: PRNG streams from which the layer forks its own; without, calls must pass one.

    Raises:
        RngArgumentError: if `rngs` has another type.
        RngStreamNotFoundError: if there is no such stream.

    Example:
        >>> from weft import nnx
        >>> layer = Dropout(0.5, broadcast_dims=(1,), rngs=nnx.Rngs(dropout=0))
        >>> layer(jnp.ones((2, 3))).tolist()
        [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
        >>> layer.eval()
        >>> layer(jnp.ones((1, 3))).tolist()
        [[1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
    ):
        self.rate = rate
        self.broadcast_dims = broadcast_dims
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.rngs = kept_stream(rngs, rng_collection, _shown(rate))

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements.

        Args:
            deterministic: overrides the attribute.
            rngs: PRNG streams, one stream or a key to use instead of the layer's own stream.

        Raises:
            ArgumentValueError: if the rate is not in `[0, 1]`, or `broadcast_dims` are out of
                range.
        """
        if mode_of(self, "deterministic", deterministic) or self.rate == 0:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        given = self.rngs if rngs is None else rngs
        key = drawn_key(given, self.rng_collection, _shown(self.rate))
        mask = keep_mask(key, self.rate, inputs.shape, self.broadcast_dims)
        return functional.dropout(inputs, rate=self.rate, mask=mask)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode, see `nnx.view`; None leaves it unchanged."""
        if deterministic is not None:
            self.deterministic = deterministic


def _shown(rate: Any) -> str:
    return f"Dropout with rate={rate}"
