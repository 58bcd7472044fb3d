"""A cache of keys and values with one position for each step of decoding."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from weft.errors import ArgumentShapeError


def attention_cache_step(
    cached_key: Float[Array, "*batch length heads dim"],
    cached_value: Float[Array, "*batch length heads dim"],
    index: Int[Array, ""],
    query: Float[Array, "*batch 1 query_heads dim"],
    key: Float[Array, "*batch 1 heads dim"],
    value: Float[Array, "*batch 1 heads dim"],
    *,
    layer: str = "attention",
) -> tuple[Array, Array, Bool[Array, "*batch 1 1 length"]]:
    """Returns keys and values with those of one more position, and a mask of what is there.

    Past the end the last position is overwritten.

    Args:
        cached_key: of the positions so far.
        cached_value: likewise.
        index: how many positions there are.
        query: of the new position.
        key: likewise.
        value: likewise.
        layer: who decodes, for errors.

    Raises:
        ArgumentShapeError: if there is another number of positions than one, or the cache was made
            for something else.

    >>> empty, x = jnp.zeros((1, 3, 1, 1)), jnp.ones((1, 1, 1, 1))
    >>> keys, values, seen = attention_cache_step(empty, empty, 1, x, x, x)
    >>> keys.ravel().tolist(), seen.ravel().tolist()
    ([0.0, 1.0, 0.0], [True, True, False])
    """
    *batch, length, heads, features = cached_key.shape
    expected = (*batch, 1, heads, features)
    if key.shape != expected or query.shape[:-2] != expected[:-2] or value.shape != expected:
        raise ArgumentShapeError(
            f"{layer} decodes with queries of shape {query.shape}, keys of shape {key.shape} and "
            f"values of shape {value.shape}, and its cache expects {expected}: give one position "
            "at a time, and the batch that the cache was made with."
        )
    keys, values = (
        lax.dynamic_update_slice_in_dim(cached, new.astype(cached.dtype), index, len(batch))
        for cached, new in ((cached_key, key), (cached_value, value))
    )
    seen = jnp.broadcast_to(jnp.arange(length) <= index, (*batch, 1, 1, length))
    return keys, values, seen
