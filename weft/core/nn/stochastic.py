"""Dropout as a function of a scope."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.core.scope import Scope
from weft.functional.dropout import keep_mask


def dropout(
    scope: Scope,
    inputs: Float[Array, "*shape"],
    rate: float,
    deterministic: bool = False,
    rng: Any = None,
) -> Float[Array, "*shape"]:
    """Applies dropout with probability `rate`, scaling the other elements up.

    The key is `rng` or one of the scope's stream `dropout`; `deterministic` returns the input.

    Raises:
        ArgumentValueError: if the rate is not in `[0, 1]`.
        InvalidRngError: if there is no key.

    Example:
        >>> import jax
        >>> from weft.core import apply
        >>> y = apply(dropout)({}, jnp.ones(100), 0.5, rngs={"dropout": jax.random.key(0)})
        >>> sorted(set(y.tolist()))
        [0.0, 2.0]
    """
    if rate == 0.0 or deterministic:
        return inputs
    if rate == 1.0:
        return jnp.zeros_like(inputs)
    key = scope.make_rng("dropout") if rng is None else rng
    return functional.dropout(inputs, rate=rate, mask=keep_mask(key, rate, inputs.shape))
