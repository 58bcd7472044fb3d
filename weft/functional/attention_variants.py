"""Variants of attention's parts: sigmoid probabilities, learned scales, relative positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft.functional.attention import attention_logits
from weft.functional.ranks import to_ndim


def sigmoid_attention_probs(
    logits: Float[Array, "batch heads target source"],
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
) -> Float[Array, "batch heads target source"]:
    """Returns the sigmoid of `logits + bias`, in float32 (Ramapuram et al., 2024).

    The probabilities of the keys are independent; they do not add up to 1.

    >>> sigmoid_attention_probs(jnp.zeros((1, 1, 1, 2))).ravel().tolist()
    [0.5, 0.5]
    """
    logits = logits.astype(jnp.float32)
    if bias is not None:
        logits = logits + to_ndim(bias.astype(jnp.float32), logits.ndim)
    return jax.nn.sigmoid(logits)


def per_dim_scale(
    x: Float[Array, "*batch dim"], param: Float[Array, " dim"]
) -> Float[Array, "*batch dim"]:
    """Scales each dimension by `softplus(param) / softplus(0)`: positive, and 1 where `param` is 0.

    >>> per_dim_scale(jnp.ones(2), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    scale = (jax.nn.softplus(param) / jax.nn.softplus(0.0)).astype(x.dtype)
    return x * to_ndim(scale, x.ndim)


def relative_to_absolute(
    x: Float[Array, "*batch length 2*length-1"],
) -> Float[Array, "*batch length length"]:
    """Converts an axis of relative positions into one of absolute positions.

    Entry `(i, k)` of `x` belongs to query `i` and the key at `i + k - (length - 1)`; entry `(i, j)`
    of the result to query `i` and key `j`.

    >>> relative_to_absolute(jnp.array([[-1, 0, 1], [-1, 0, 1]])).tolist()
    [[0, 1], [-1, 0]]
    """
    length, distances = x.shape[-2:]
    # Each row starts one entry further left than the row above: with one more entry per row, all
    # are evenly spaced in memory.
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    flat = padded.reshape(*x.shape[:-2], length * (distances + 1))
    skewed = flat[..., : length * distances].reshape(*x.shape[:-2], length, distances)
    return skewed[..., length - 1 :]


def xl_attention_logits(
    query: Float[Array, "batch length heads dim"],
    key: Float[Array, "batch length heads dim"],
    relative_positions: Float[Array, "2*length-1 heads dim"],
    u: Float[Array, "heads dim"],
    v: Float[Array, "heads dim"],
) -> Float[Array, "batch heads length length"]:
    """Returns logits of content and relative position (Dai et al., 2019, section 3.3).

    Args:
        query: query vectors.
        key: key vectors.
        relative_positions: projected embeddings of `query position - key position`, from
            `length - 1` down to `-(length - 1)`.
        u: added to the query for the product with keys.
        v: added to the query for the product with `relative_positions`.
    """
    u, v = to_ndim(u, query.ndim), to_ndim(v, query.ndim)
    return attention_logits(query + u, key) + relative_to_absolute(
        attention_logits(query + v, relative_positions[None])
    )
