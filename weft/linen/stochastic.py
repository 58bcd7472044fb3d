"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.dropout import keep_mask
from weft.linen.calls import merge_param
from weft.linen.methods import compact
from weft.linen.module import Module

__all__ = ["Dropout"]


class Dropout(Module):
    """Dropout with probability `rate`, scaling the other elements up (Srivastava et al., 2014).

    `apply` needs a key for the PRNG stream: `rngs={"dropout": key}`.

    Attributes:
        rate: probability of zero, in `[0, 1]`.
        broadcast_dims: axes whose elements are dropped together.
        deterministic: whether to return the input unchanged; set here or in the call.
        rng_collection: the PRNG stream.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 3))
        >>> layer = Dropout(0.5, broadcast_dims=(1,))
        >>> layer.apply({}, x, deterministic=False, rngs={"dropout": jax.random.key(2)}).tolist()
        [[2.0, 2.0, 2.0]]
        >>> layer.apply({}, x, deterministic=True).tolist()
        [[1.0, 1.0, 1.0]]
    """

    rate: float
    broadcast_dims: Sequence[int] = ()
    deterministic: bool | None = None
    rng_collection: str = "dropout"

    @compact
    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        deterministic: bool | None = None,
        rng: Any = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements.

        Args:
            deterministic: overrides the attribute; exactly one of the two must be set.
            rng: key to use instead of the stream.

        Raises:
            ParameterGivenTwiceError: if `deterministic` is given twice or not at all.
            ArgumentValueError: if the rate is not in `[0, 1]`, or an axis does not exist.
            InvalidRngError: if there is no stream.
        """
        deterministic = merge_param("deterministic", self.deterministic, deterministic)
        if self.rate == 0 or deterministic:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        mask = keep_mask(key, self.rate, inputs.shape, self.broadcast_dims)
        return functional.dropout(inputs, rate=self.rate, mask=mask)
