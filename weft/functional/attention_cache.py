"""Key and value cache that grows by one position per decoding step."""

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
    """Returns keys and values extended by one position, and a mask of the filled positions.

    Past the end, the last position is overwritten.

    Args:
        cached_key: keys of all positions so far.
        cached_value: values of all positions so far.
        index: number of positions so far.
        query: query of the new position.
        key: key of the new position.
        value: value of the new position.
        layer: name of the decoding layer, for errors.

    Raises:
        ArgumentShapeError: if there is not exactly one new position, or the cache has another
            shape.

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
