"""Elementwise layers: dropout, and PReLU, an activation with a learned slope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.dropout import keep_mask
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.parameters import NO_METADATA, Metadata, PromoteDtype
from weft.nnx.rngs import Rngs, RngStream
from weft.nnx.variables import Param
from weft.typing import DType


@dataclass(repr=False, eq=False)
class Dropout(Module):
    """Dropout: zeros elements at probability `rate`, scales up others (Srivastava et al., 2014).

    Args:
        rate: probability of zero, in `[0, 1]`.
        broadcast_dims: axes that share one dropout mask.
        deterministic: whether to return the input unchanged, set by `model.train()` and
            `model.eval()`; if None, calls must pass it.
        rngs: PRNG streams from which the layer forks its own; without, calls must pass one.

    Raises:
        RngArgumentError: if `rngs` has another type.
        RngStreamNotFoundError: if there is no such stream.

    >>> layer = Dropout(0.5, broadcast_dims=(1,), rngs=nnx.Rngs(dropout=0))
    >>> layer(jnp.ones((2, 3))).tolist()
    [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    """

    rate: float
    _: KW_ONLY
    broadcast_dims: Sequence[int] = ()
    deterministic: bool | None = False
    rng_collection: str = "dropout"
    rngs: Rngs | RngStream | None = None

    def __post_init__(self) -> None:
        self.rngs = parameters.fork_stream(
            self.rngs, self.rng_collection, _title(self.rate)
        )

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | Array | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements.

        Args:
            rngs: PRNG streams, one stream or a key to use instead of the layer's own stream.

        Raises ArgumentValueError for a rate not in `[0, 1]`, or `broadcast_dims` out of range.
        """
        is_off = parameters.resolve_mode(self, "deterministic", deterministic)
        if is_off or self.rate == 0:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        if rngs is None:
            rngs = self.rngs
        key = parameters.draw_key(rngs, self.rng_collection, _title(self.rate))
        mask = keep_mask(key, self.rate, inputs.shape, self.broadcast_dims)
        return functional.dropout(inputs, rate=self.rate, mask=mask)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode, see `nnx.view`; None leaves it unchanged."""
        if deterministic is not None:
            self.deterministic = deterministic


@dataclass(repr=False, eq=False)
class PReLU(Module):
    """Parametric ReLU: `x` where positive, a learned slope times `x` elsewhere (He et al., 2015).

    The parameter is `negative_slope`, a scalar.

    Args:
        dtype: computation dtype; by default that of the input.

    >>> PReLU()(jnp.array([-1.0, 2.0])).tolist()
    [-0.009999999776482582, 2.0]
    """

    negative_slope_init: InitVar[float] = 0.01
    _: KW_ONLY
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    promote_dtype: PromoteDtype = parameters.promote_dtype
    negative_slope_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self, negative_slope_init: float, negative_slope_metadata: Metadata
    ) -> None:
        slope = jnp.asarray(negative_slope_init, self.param_dtype)
        self.negative_slope = Param(slope, **negative_slope_metadata)

    def __call__(
        self, inputs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        x = jnp.asarray(inputs)
        slope = self.negative_slope[...]
        if self.dtype is not None:
            x, slope = self.promote_dtype((x, slope), dtype=self.dtype)
        return jax.nn.leaky_relu(x, slope.astype(x.dtype))


def _title(rate: float) -> str:
    return f"Dropout with rate={rate}"
