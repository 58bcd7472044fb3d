"""What is dropped at random."""

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
    """Zeros elements with probability `rate`, and scales the others up (Srivastava et al., 2014).

    It draws from a PRNG stream, so `apply` needs `rngs={"dropout": key}`.

    Attributes:
        rate: the probability of zero, in `[0, 1]`.
        broadcast_dims: axes along which all elements are dropped together, or none is.
        deterministic: whether the input is returned as it is; given here or when called.
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
            inputs: the input.
            deterministic: see the attribute; exactly one of them must be given.
            rng: a key to use instead of the stream's.

        Raises:
            ParameterGivenTwiceError: if `deterministic` is given twice, or never.
            ArgumentValueError: if the rate is not in `[0, 1]`, or there are no such axes.
            InvalidRngError: if there is no stream to draw from.
        """
        deterministic = merge_param("deterministic", self.deterministic, deterministic)
        if self.rate == 0 or deterministic:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        mask = keep_mask(key, self.rate, inputs.shape, self.broadcast_dims)
        return functional.dropout(inputs, rate=self.rate, mask=mask)
