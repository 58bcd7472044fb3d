"""Sampling of tokens from logits, and logit modifiers.

A modifier maps logits `(*batch, vocab)` to logits of the same shape; excluded tokens get
`EXCLUDED_LOGIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from weft.errors import ArgumentValueError
from weft.functional.arrays import positions, to_ndim

EXCLUDED_LOGIT = -1e7
"""Logit of a token that cannot be chosen: finite, so that sums of such logits are not NaN."""

LogitsToLogitsFn = Callable[[Array], Array]
"""A change of logits before sampling."""


def scale_by(
    temperature: float | Float[Array, "*#batch"], *, min_temperature: float = 1e-4
) -> LogitsToLogitsFn:
    """Divides logits by a temperature: values below 1 sharpen the distribution.

    Args:
        temperature: a scalar, or one per example of the batch.
        min_temperature: lower bound, at which sampling is almost greedy.

    >>> scale_by(0.5)(jnp.array([1.0, 2.0])).tolist()
    [2.0, 4.0]
    """

    def modify(logits: Array) -> Array:
        divisor = jnp.maximum(jnp.asarray(temperature, logits.dtype), min_temperature)
        if divisor.ndim:
            divisor = divisor[..., None]
        return logits / divisor

    return modify


def top_k_logits(
    k: int, *, break_ties: Literal["all", "smallest_index"] = "all"
) -> LogitsToLogitsFn:
    """Excludes all but the `k` largest logits.

    Args:
        k: number of logits to keep, at least 1.
        break_ties: whether to keep all logits equal to the k-th, or those of the smallest index.

    Raises ArgumentValueError if `k` is less than 1, or `break_ties` is unknown.

    >>> (top_k_logits(2)(jnp.array([1.0, 3.0, 2.0])) > EXCLUDED_LOGIT).tolist()
    [False, True, True]
    """
    if k < 1:
        raise ArgumentValueError(f"k={k} must be at least 1.")
    if break_ties not in ("all", "smallest_index"):
        raise ArgumentValueError(f"break_ties={break_ties!r} must be 'all' or 'smallest_index'.")

    def modify(logits: Array) -> Array:
        vocab_size = logits.shape[-1]
        top_values, top_tokens = jax.lax.top_k(logits, min(k, vocab_size))  # (*batch, k)
        if break_ties == "all":
            stays = logits >= top_values[..., -1:]
        else:
            tokens = positions(vocab_size, top_tokens.ndim + 1)
            stays = jnp.any(top_tokens[..., None] == tokens, axis=-2)
        return jnp.where(stays, logits, EXCLUDED_LOGIT)

    return modify


def top_p_logits(p: float | Float[Array, "*#batch"]) -> LogitsToLogitsFn:
    """Excludes all but the fewest tokens whose probabilities reach `p` (Holtzman et al., 2020).

    Ties with the last of them stay too. `p` is a scalar or one per example of the batch; 0 keeps
    the likeliest token, 1 keeps all.

    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> (top_p_logits(0.7)(logits) > EXCLUDED_LOGIT).tolist()
    [True, True, False]
    """

    def modify(logits: Array) -> Array:
        threshold = jnp.asarray(p, jnp.float32)
        if threshold.ndim:
            threshold = threshold[..., None]
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ordered.astype(jnp.float32), axis=-1)
        likelier_probs = jnp.cumsum(probs, axis=-1) - probs
        # The likeliest token always stays. At 1 all stay, although a rounded sum may reach 1 early.
        is_likeliest = positions(logits.shape[-1], logits.ndim) == 0
        keeps_all = to_ndim(threshold >= 1, logits.ndim)
        stays = (likelier_probs < threshold) | keeps_all | is_likeliest
        last = jnp.sum(stays, axis=-1, keepdims=True) - 1
        smallest_logit = jnp.take_along_axis(ordered, last, axis=-1)
        return jnp.where(logits >= smallest_logit, logits, EXCLUDED_LOGIT)

    return modify


def chain(*fns: LogitsToLogitsFn) -> LogitsToLogitsFn:
    """Returns the modifier that applies the given ones from left to right.

    >>> chain(scale_by(0.5), lambda logits: logits + 1)(jnp.array([1.0])).tolist()
    [3.0]
    """

    def modify(logits: Array) -> Array:
        for fn in fns:
            logits = fn(logits)
        return logits

    return modify


def sample_token(
    logits: Float[Array, "*batch vocab"], *, prng_key: Key[Array, ""] | None
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns a token drawn from the softmax of the logits, and its log probability.

    Without a key, the likeliest token is taken.

    >>> token, log_prob = sample_token(jnp.log(jnp.array([0.25, 0.75])), prng_key=None)
    >>> token.item(), round(jnp.exp(log_prob).item(), 2)
    (1, 0.75)
    """
    if prng_key is None:
        token = jnp.argmax(logits, axis=-1)
    else:
        token = jax.random.categorical(prng_key, logits, axis=-1)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    token_log_prob = jnp.take_along_axis(log_probs, token[..., None], axis=-1)
    return token, token_log_prob[..., 0]
