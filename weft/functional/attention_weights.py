"""Attention probabilities in the dtype of queries and keys.

`weft.functional.attention` computes logits and probabilities in float32, which in half precision
doubles the memory of what is usually a model's largest array. These functions keep the input dtype,
or compute only the softmax in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.attention import attention_logits
from weft.functional.dropout import dropout, keep_mask
from weft.functional.ranks import to_ndim

_LOGITS = "...qhd,...khd->...hqk"


def attention_weights(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    float32_softmax: bool = False,
    precision: lax.PrecisionLike = None,
    dot_general: Callable[..., Array] | None = None,
    einsum: Callable[..., Array] | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns `softmax(query · key / sqrt(dim) + bias)` over the source.

    Args:
        query: query vectors.
        key: key vectors, of the same dtype.
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: where it is False or 0, a logit becomes the dtype's lowest number; same shape as
            `bias`. A fully masked query attends to all keys equally.
        float32_softmax: whether to compute and return the softmax in float32.
        precision: as in `jax.lax.dot_general`.
        dot_general: replaces `jax.lax.dot_general`.
        einsum: replaces both; called with subscripts, queries and keys.

    Raises:
        ArgumentShapeError: if bias or mask does not broadcast to the logits.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> attention_weights(x, x, mask=jnp.array([True, False, True]))[0, 0, 0].tolist()
    [0.5, 0.0, 0.5]
    """
    query = query / math.sqrt(query.shape[-1])
    if einsum is not None:
        logits = einsum(_LOGITS, query, key)
    else:
        logits = attention_logits(
            query, key, precision=precision, preferred_element_type=None, dot_general=dot_general
        )
    if bias is not None:
        _check("bias", bias, logits)
        logits = logits + to_ndim(bias, logits.ndim)
    if mask is not None:
        _check("mask", mask, logits)
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    if float32_softmax and logits.dtype != jnp.float32:
        logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1)


def drop_attention_weights(
    weights: Float[Array, "*batch heads target source"],
    *,
    rate: float,
    prng_key: Key[Array, ""] | None,
    broadcast: bool = True,
) -> Float[Array, "*batch heads target source"]:
    """Zeros weights with probability `rate`, and scales up the others.

    Args:
        weights: attention probabilities.
        rate: in `[0, 1]`.
        prng_key: key of the dropout mask.
        broadcast: whether all examples and heads share one mask.

    Raises:
        ArgumentValueError: if `prng_key` is missing, or `rate` is not in `[0, 1]`.

    >>> import jax
    >>> drop_attention_weights(jnp.ones((1, 1)), rate=1.0, prng_key=jax.random.key(0)).tolist()
    [[0.0]]
    """
    if prng_key is None:
        raise ArgumentValueError(
            f"dropout_rate={rate} without dropout_rng: give a key, or deterministic=True."
        )
    if rate == 1.0:
        return jnp.zeros_like(weights)
    shared = range(weights.ndim - 2) if broadcast else ()
    return dropout(weights, rate=rate, mask=keep_mask(prng_key, rate, weights.shape, shared))


def check_attention_shapes(
    query: Array, key: Array, value: Array | None = None, *, shared_heads: bool = False
) -> None:
    """Checks that the shapes of queries, keys and values match.

    Args:
        query: shape `(*batch, target, heads, dim)`.
        key: shape `(*batch, source, heads, dim)`.
        value: shape `(*batch, source, heads, value_dim)`, or None.
        shared_heads: whether keys and values may have fewer heads than queries.

    Raises:
        ArgumentShapeError: if the shapes do not match.
    """
    shapes = {"query": query.shape, "key": key.shape}
    if value is not None:
        shapes["value"] = value.shape
        fits = key.shape[:-1] == value.shape[:-1]
        _check_fit(shapes, fits, "agree between key and value in all axes but the last")
    fits = query.shape[:-3] == key.shape[:-3]
    _check_fit(shapes, fits, "agree in the axes before the last three")
    if shared_heads:
        _check_fit(shapes, query.shape[-1] == key.shape[-1], "agree in features, the last axis")
    else:
        fits = query.shape[-2:] == key.shape[-2:]
        _check_fit(shapes, fits, "agree in heads and features, the last two")


def _check_fit(shapes: dict[str, tuple[int, ...]], fits: bool, expected: str) -> None:
    if not fits or any(len(shape) < 3 for shape in shapes.values()):
        raise ArgumentShapeError(
            f"the shapes are {shapes}; expected (*batch, length, heads, features), and that they "
            f"{expected}."
        )


def _check(name: str, given: Array, logits: Array) -> None:
    shape, full = jnp.shape(given), logits.shape
    if shape == full:
        return
    sizes = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > len(full) or any(n not in (1, m) for n, m in sizes):
        raise ArgumentShapeError(
            f"{name} has shape {shape}, which does not broadcast to that of the logits, {full}: "
            "(*batch, heads, queries, keys)."
        )
