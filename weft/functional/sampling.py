"""Sampling of tokens from logits, and logit modifiers.

A modifier maps logits `(*batch, vocab)` to logits of the same shape; excluded tokens get
`EXCLUDED_LOGIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from weft.errors import ArgumentValueError
from weft.functional.arrays import positions, to_ndim

EXCLUDED_LOGIT = -1e7
"""Logit of a token that cannot be chosen: finite, so that sums of such logits are not NaN."""

LogitsToLogitsFn = Callable[[Array], Array]
"""A change of logits before sampling."""


def scale_by(
    temperature: float | Float[Array, "*#batch"],
    *,
    min_temperature: float = 1e-4,
) -> LogitsToLogitsFn:
    """Divides logits by a temperature: values below 1 sharpen the distribution.

    Args:
        temperature: a scalar, or one per example of the batch.
        min_temperature: lower bound, at which sampling is almost greedy.

    >>> scale_by(0.5)(jnp.array([1.0, 2.0])).tolist()
    [2.0, 4.0]
    """

    def modify(logits: Array) -> Array:
        divisor = jnp.maximum(
            jnp.asarray(temperature, logits.dtype), min_temperature
        )
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
        raise ArgumentValueError(
            f"break_ties={break_ties!r} must be 'all' or 'smallest_index'."
        )

    def modify(logits: Array) -> Array:
        vocab_size = logits.shape[-1]
        # Without the barrier, XLA sees that one of the values is enough, and sorts the whole
        # vocabulary for it: 41 instead of 0.8 ms of CPU time for logits of shape (8, 32000).
        top_values, top_tokens = jax.lax.optimization_barrier(
            jax.lax.top_k(logits, min(k, vocab_size))
        )  # each of shape (*batch, k)
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


def min_p_logits(p: float | Float[Array, "*#batch"]) -> LogitsToLogitsFn:
    """Excludes tokens less likely than `p` times the likeliest one (Nguyen et al., 2024).

    `p` is a scalar or one per example of the batch; 0 keeps all tokens, 1 the likeliest.

    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> (min_p_logits(0.5)(logits) > EXCLUDED_LOGIT).tolist()
    [True, True, False]
    """

    def modify(logits: Array) -> Array:
        log_p = jnp.log(jnp.asarray(p, jnp.float32))
        if log_p.ndim:
            log_p = log_p[..., None]
        largest = jnp.max(logits, axis=-1, keepdims=True)
        stays = logits.astype(jnp.float32) - largest >= log_p
        return jnp.where(stays, logits, EXCLUDED_LOGIT)

    return modify


def penalize_repetition(
    logits: Float[Array, "*batch vocab"],
    seen: Bool[Array, "*batch vocab"],
    penalty: float | Float[Array, ""],
) -> Float[Array, "*batch vocab"]:
    """Makes the logits of tokens that a sequence has smaller, if `penalty` is more than 1.

    Positive ones are divided by the penalty, and negative ones multiplied (Keskar et al., 2019).

    >>> logits, seen = jnp.array([2.0, 2.0, -2.0]), jnp.array([False, True, True])
    >>> penalize_repetition(logits, seen, 2.0).tolist()
    [2.0, 1.0, -4.0]
    """
    penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen, penalized, logits)


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


# Of so many likeliest tokens, most models' probabilities reach a `top_p` in use.
_NUM_CANDIDATES = 256


def draw_tokens(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    *,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    min_p: float | Float[Array, ""] | None = None,
) -> Int[Array, " batch"]:
    """Draws a token for each row from the softmax of its logits, each with a key of its own.

    This is `top_k_logits`, `top_p_logits` and `min_p_logits`, one after the other, and a draw of
    what they keep. With `top_k`, exactly so many tokens are left, of equal ones the first, and
    only they are looked at again. With `top_p` alone, these are the 256 likeliest, and the whole
    vocabulary is sorted only if their probabilities do not reach `top_p` in some row.

    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]))
    >>> draw_tokens(logits, jax.random.split(jax.random.key(0)), top_p=0.5).tolist()
    [0, 2]
    """
    vocab_size = logits.shape[-1]
    if top_k is None and top_p is None:
        if min_p is not None:
            logits = min_p_logits(min_p)(logits)
        draw = jax.vmap(jax.random.categorical)
        return draw(keys, logits).astype(jnp.int32)

    # A number of [0, 1) for each row, whatever the number of candidates is: a row gets the same
    # token whether the other rows need the whole vocabulary or not.
    uniform = jax.vmap(jax.random.uniform)(keys)
    total = None  # of all candidates
    if top_k is None:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def draw_of_likeliest(num_candidates: int) -> Array:
        ordered, tokens = jax.lax.optimization_barrier(
            jax.lax.top_k(logits, num_candidates)
        )
        return _draw_ordered(
            ordered, tokens, uniform, total=total, top_p=top_p, min_p=min_p
        )

    if top_k is not None:
        return draw_of_likeliest(min(top_k, vocab_size))
    assert total is not None
    assert top_p is not None
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    candidates, _ = jax.lax.top_k(logits, num_candidates)
    probs = jnp.sum(jnp.exp(candidates - total), axis=-1)
    return jax.lax.cond(
        jnp.all(probs >= top_p),
        lambda: draw_of_likeliest(num_candidates),
        lambda: draw_of_likeliest(vocab_size),
    )


def _draw_ordered(
    logits: Float[Array, "batch candidates"],
    tokens: Int[Array, "batch candidates"],
    uniform: Float[Array, " batch"],
    *,
    total: Float[Array, "batch 1"] | None,
    top_p: float | Float[Array, ""] | None,
    min_p: float | Float[Array, ""] | None,
) -> Int[Array, " batch"]:
    """Draws of tokens in the order of falling logits.

    Args:
        total: logarithm of the sum of the exponentials of all logits; None if there are no others.
    """
    if total is None:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    probs = jnp.exp(logits - total)
    if top_p is not None:
        likelier_probs = jnp.cumsum(probs, axis=-1) - probs
        is_likeliest = positions(probs.shape[-1], probs.ndim) == 0
        stays = (likelier_probs < top_p) | is_likeliest
        probs = jnp.where(stays, probs, 0.0)
    if min_p is not None:
        probs = jnp.where(probs >= min_p * probs[:, :1], probs, 0.0)
    # The first candidate at which the sum exceeds the drawn part of the whole.
    sums = jnp.cumsum(probs, axis=-1)
    drawn = uniform[:, None] * sums[:, -1:]
    rank = jnp.sum(sums <= drawn, axis=-1, keepdims=True)
    last = jnp.sum(probs > 0, axis=-1, keepdims=True) - 1
    rank = jnp.minimum(rank, last)
    return jnp.take_along_axis(tokens, rank, axis=-1)[:, 0]


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
