"""Dot-product attention, as a whole and in three parts: logits, probabilities, context.

Queries are `(batch, target, heads, dim)`, keys and values `(batch, source, kv_heads, dim)`. With
`kv_heads < heads`, `heads / kv_heads` consecutive query heads share a key head (Ainslie et al.,
2023), without repeating keys and values. Logits and probabilities are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from weft.errors import ArgumentShapeError
from weft.functional.attention_mask import bool_to_bias
from weft.functional.dropout import dropout
from weft.functional.ranks import to_ndim


def dot_product_attention(
    query: Float[Array, "batch target heads dim"],
    key: Float[Array, "batch source kv_heads dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    *,
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    mask: Bool[Array, "#batch #heads #target #source"] | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch target heads value_dim"]:
    """Returns `softmax(scale * query · key + bias) · value` (Vaswani et al., 2017).

    Args:
        query: query vectors.
        key: key vectors.
        value: value vectors.
        bias: added to the logits, broadcastable to `(batch, heads, target, source)`.
        mask: True where a query may attend, same shape as `bias`. A query with no True entry gets
            the average of all values.
        scale: the factor of the logits; by default `1 / sqrt(dim)`.
        logit_cap: squashes the logits to ±`logit_cap`, before bias and mask.
        logit_sink: per head, a logit without a value.
        dropout_rate: applied to the probabilities.
        dropout_key: key of the dropout mask.
        precision: as in `jax.lax.dot_general`.

    Raises:
        ArgumentShapeError: if the number of query heads is not a multiple of that of key heads.

    >>> x = jnp.ones((1, 3, 4, 2))
    >>> dot_product_attention(x, x[:, :, :2], x[:, :, :2]).shape
    (1, 3, 4, 2)
    """
    logits = attention_logits(query, key, precision=precision)
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if logit_cap is not None:
        logits = cap_logits(logits, logit_cap)
    if mask is not None:
        bias = bool_to_bias(mask) if bias is None else bias + bool_to_bias(mask)
    probs = attention_probs(logits, bias, logit_sink=logit_sink)
    if dropout_rate:
        probs = dropout(probs, rate=dropout_rate, prng_key=dropout_key)
    return attention_context(probs, value, precision=precision)


def attention_logits(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*#batch source kv_heads dim"],
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = jnp.float32,
    dot_general: Callable[..., Array] | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns the inner products of all queries and keys.

    Args:
        query: query vectors.
        key: key vectors.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: the dtype of the products; None for that of query and key.
        dot_general: replaces `jax.lax.dot_general` where queries and keys have the same batch axes
            and heads.

    Raises:
        ArgumentShapeError: if the number of query heads is not a multiple of that of key heads.

    >>> attention_logits(jnp.ones((7, 3, 4, 2)), jnp.ones((7, 5, 2, 2))).shape
    (7, 4, 3, 5)
    """
    *batch, target, heads, dim = query.shape
    source, kv_heads = key.shape[-3:-1]
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if dot_general or (heads == kv_heads and _multiplies(query, key)):
        n, both = len(batch), tuple(range(len(batch)))
        axes = ((n + 2,), (n + 2,)), ((*both, n + 1), (*both, n + 1))
        return (dot_general or lax.dot_general)(query, key, axes, **options)
    if heads % kv_heads:
        raise ArgumentShapeError(
            f"{heads} heads of queries (shape {query.shape}) cannot share {kv_heads} heads of keys "
            f"(shape {key.shape}): the first must be a multiple of the second."
        )
    query = query.reshape(*batch, target, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("...tkgd,...skd->...kgts", query, key, **options)
    return logits.reshape(*batch, heads, target, source)


def _multiplies(x: Array, y: Array) -> bool:
    """Returns whether a single `dot_general`, faster to trace than an einsum, is enough."""
    return x.dtype == y.dtype and x.shape[:-3] == y.shape[:-3]


def cap_logits(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Returns `cap * tanh(logits / cap)`, which stays within ±`cap` (Gemma Team, 2024).

    >>> cap_logits(jnp.array([0.0, 1e6]), 50.0).tolist()
    [0.0, 50.0]
    """
    return cap * jnp.tanh(logits / cap)


def attention_probs(
    logits: Float[Array, "batch heads target source"],
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    *,
    logit_sink: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads target source"]:
    """Returns the softmax of `logits + bias` over the source, in float32.

    `logit_sink` is one logit per head that takes part in the sum but has no probability of its own,
    so that a head may attend to nothing (Xiao et al., 2024).

    >>> attention_probs(jnp.zeros((1, 1, 1, 3)), logit_sink=jnp.zeros(1)).ravel().tolist()
    [0.25, 0.25, 0.25]
    """
    logits = logits.astype(jnp.float32)
    if bias is not None:
        logits = logits + to_ndim(bias.astype(jnp.float32), logits.ndim)
    if logit_sink is None:
        return jax.nn.softmax(logits, axis=-1)
    sink = to_ndim(logit_sink.astype(jnp.float32)[:, None, None], logits.ndim)
    largest = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink))
    weights = jnp.exp(logits - largest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - largest))


def attention_context(
    probs: Float[Array, "*batch heads target source"],
    value: Float[Array, "*#batch source kv_heads dim"],
    *,
    precision: lax.PrecisionLike = None,
    dot_general: Callable[..., Array] | None = None,
) -> Float[Array, "*batch target heads dim"]:
    """Returns the values averaged by the probabilities, in the dtype of the values.

    `precision` and `dot_general` are those of `attention_logits`.

    >>> attention_context(jnp.ones((7, 4, 3, 5)), jnp.ones((7, 5, 2, 6))).shape
    (7, 3, 4, 6)
    """
    *batch, heads, target, source = probs.shape
    kv_heads, dim = value.shape[-2:]
    probs = probs if probs.dtype == value.dtype else probs.astype(value.dtype)
    if dot_general or (heads == kv_heads and _multiplies(probs, value)):
        n, both = len(batch), tuple(range(len(batch)))
        axes = ((n + 2,), (n,)), ((*both, n), (*both, n + 1))
        context = (dot_general or lax.dot_general)(probs, value, axes, precision=precision)
        return lax.transpose(context, (*both, n + 1, n, n + 2))
    probs = probs.reshape(*batch, kv_heads, heads // kv_heads, target, source)
    context = jnp.einsum("...kgts,...skd->...tkgd", probs, value, precision=precision)
    return context.reshape(*batch, target, heads, dim)
