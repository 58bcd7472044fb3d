"""Decoding: attention to positions of earlier calls.

The cache of an attention is a `CacheEntry`, the variable `entry` of the collection `cache`. The
first call creates an empty cache with the length of its inputs, and attends without it. Each later
call has one position, which is written at the entry's index, in the order of the flattened axes,
and attends to all written positions. Past the end, it replaces the oldest position.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Num

from weft import struct
from weft.core.scope import Scope
from weft.errors import ArgumentShapeError, ArgumentValueError


class CacheEntry(struct.PyTreeNode):
    """Keys and values of previous positions.

    Calling an entry returns an empty one of another size. For a tree of caches:
    `jax.tree.map(lambda entry: entry((batch, length)), cache, is_leaf=callable)`.

    Attributes:
        key: shape `(batch, *lengths, heads, dim)`.
        value: same shape as `key`.
        i: number of positions.

    Example:
        >>> entry = CacheEntry(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)), jnp.uint32(3))
        >>> longer = entry((8, 100))
        >>> longer.key.shape, int(longer.i)
        ((8, 100, 2, 4), 0)
    """

    key: Any
    value: Any
    i: Any

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> CacheEntry:
        """Returns an empty entry of shape `(batch, *lengths)`, by default with the same dtype.

        Raises:
            ArgumentShapeError: if the number of lengths differs.
        """
        if len(shape) != self.key.ndim - 2:
            raise ArgumentShapeError(
                f"a cache of shape {tuple(shape)} was requested; expected the size of the batch "
                f"and {self.key.ndim - 3} length(s)."
            )
        key, value = (
            jnp.zeros((*shape, *x.shape[-2:]), dtype or x.dtype) for x in (self.key, self.value)
        )
        return CacheEntry(key, value, jnp.zeros((), jnp.uint32))


def decode(
    scope: Scope,
    query: Num[Array, "batch *targets_heads dim"],
    key: Num[Array, "batch *sources_heads dim"],
    value: Num[Array, "batch *sources_heads dim"],
) -> tuple[Array, Array, Bool[Array, "*mask"] | None]:
    """Adds a position's keys and values to the cache, and returns the cached ones.

    Returns:
        Keys, values, and a mask of written positions; None if this call created the cache.

    Raises:
        ArgumentShapeError: if a call has more than one position, or another batch size than the
            cache.
        ArgumentValueError: if the variable `entry` is not a `CacheEntry`.
    """
    begun = scope.has_variable("cache", "entry")
    entry = scope.variable("cache", "entry", lambda: CacheEntry(key, value, None)(key.shape[:-2]))
    if not begun:
        return key, value, None
    cached: CacheEntry = entry.value
    if not isinstance(cached, CacheEntry):
        raise ArgumentValueError(
            f"the cache of {scope.path_text!r} has a {type(cached).__name__} as its entry; "
            "expected the CacheEntry that a first call with cache=True makes."
        )
    batch, *lengths = cached.key.shape[:-2]
    ones = [1] * len(lengths)
    for x, of_cache in ((query, cached.key), (key, cached.key), (value, cached.value)):
        expected = (batch, *ones, *of_cache.shape[-2:])
        if x.shape != expected:
            raise ArgumentShapeError(
                f"a step of decoding in {scope.path_text!r} has heads of shape {x.shape}, and the "
                f"cache expects {expected}: give one position at a time, and its batch."
            )
    n = math.prod(lengths)
    at = jnp.unravel_index(cached.i % n, lengths)
    start = tuple(jnp.int32(a) for a in (0, *at, 0, 0))
    keys, values = (
        lax.dynamic_update_slice(into, x.astype(into.dtype), start)
        for into, x in ((cached.key, key), (cached.value, value))
    )
    entry.value = CacheEntry(keys, values, cached.i + 1)
    seen = jnp.arange(n, dtype=jnp.uint32) <= cached.i
    return keys, values, seen.reshape(1, 1, *ones, *lengths)
