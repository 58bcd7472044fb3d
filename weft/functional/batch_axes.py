"""Adapter for any number of batch axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Num


def over_batch_axes(
    fn: Callable[[Array], Array], x: Num[Array, "*batch_and_item"], item_ndim: int
) -> Num[Array, "*batch_and_result"]:
    """Calls `fn` with the batch axes of `x` merged into one, and restores them in the result.

    `item_ndim` is the number of axes after the (zero or more) batch axes.

    >>> import jax.numpy as jnp
    >>> over_batch_axes(lambda x: x.sum(axis=1), jnp.ones((2, 3, 4, 5)), 2).shape
    (2, 3, 5)
    """
    free = x.ndim - item_ndim
    if free == 1:
        return fn(x)
    batch: tuple[Any, ...] = x.shape[:free]
    y = fn(x.reshape(math.prod(batch), *x.shape[free:]))
    return y.reshape(*batch, *y.shape[1:])
