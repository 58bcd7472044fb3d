"""Masks for attention over several axes.

A mask has the shape `(batch, *other axes, 1, *axes of the queries, *axes of the keys)`, or one that
broadcasts to it; the 1 is for the heads. Positions along several attended axes are in the order of
their flattened axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from weft.errors import ArgumentShapeError, ArgumentValueError

Axes = tuple[int, ...]


def attended_axes(ndim: int, axis: int | Sequence[int] | None) -> Axes:
    """Returns the axes to attend over, of arrays `(batch, *axes, heads, dim)`; None means all.

    Raises:
        ArgumentValueError: if an axis is the batch, the heads or the last one, or does not exist.

    >>> attended_axes(5, None)
    (1, 2)
    """
    if axis is None:
        return tuple(range(1, ndim - 2))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(1 <= a < ndim - 2 for a in axes) or len(set(axes)) != len(axes):
        raise ArgumentValueError(
            f"axis={axis}: attention goes over different axes between the batch and the heads, "
            f"which are 1 to {ndim - 3} here."
        )
    return axes


def causal(
    query: Num[Array, "batch *targets_heads dim"],
    key: Num[Array, "batch *sources_heads dim"],
    axes: Axes,
) -> Bool[Array, "*mask"]:
    """Returns True where a key is not later than the query, along the attended axes.

    >>> x = jnp.zeros((1, 3, 1, 1))
    >>> causal(x, x, (1,)).astype(int).tolist()
    [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
    """
    targets, sources = (tuple(x.shape[a] for a in axes) for x in (query, key))
    order = jnp.arange(math.prod(targets))[:, None] >= jnp.arange(math.prod(sources))[None]
    return order.reshape(*[1] * (query.ndim - len(axes) - 1), *targets, *sources)


def pairwise(
    combine: Callable[[Array, Array], Array],
    named: dict[str, Array | None],
    query: Num[Array, "batch *targets_heads dim"],
    key: Num[Array, "batch *sources_heads dim"],
    axes: Axes,
) -> Array | None:
    """Combines values of each query and each key; None if there are no values.

    Args:
        combine: function of two arrays that broadcast.
        named: values of the queries and of the keys, in this order, by the names of the user's
            arguments; shapes `(batch, *axes)` with or without a last axis of size 1. If None for
            the keys, the queries' values are used.

    >>> x, ids = jnp.zeros((1, 3, 1, 1)), jnp.array([[1, 1, 2]])
    >>> known = {"segmentation": ids, "key_segmentation": None}
    >>> pairwise(jnp.equal, known, x, x, (1,)).astype(int).tolist()
    [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    (name, of_query), (key_name, of_key) = named.items()
    if of_query is None and of_key is None:
        return None
    if of_query is None:
        raise ArgumentValueError(f"{key_name} was given without {name}: give both.")
    if of_key is None:
        of_key, key_name = of_query, f"{name}, also for the keys as there is no {key_name},"
    lay_out = functools.partial(_laid_out, axes=axes)
    return combine(lay_out(name, of_query, query, 0), lay_out(key_name, of_key, key, 1))


def _laid_out(name: str, known: Array, of: Array, place: int, *, axes: Axes) -> Array:
    """Reshapes to `(batch, *other axes, 1, *axes)`, with the attended axes in their place."""
    known, expected = jnp.asarray(known), of.shape[:-2]
    x = known[..., 0] if known.shape[len(expected) :] == (1,) else known
    fits = x.ndim == len(expected) and all(
        n in (1, m) for n, m in zip(x.shape, expected, strict=True)
    )
    if not fits:
        raise ArgumentShapeError(
            f"{name} has shape {known.shape}; expected {expected}, or with an axis of size 1 after "
            "them."
        )
    other = tuple(a for a in range(x.ndim) if a not in axes)
    x = jnp.transpose(x, (*other, *axes))
    n, ones = len(other), (1,) * len(axes)
    around = (*ones, *x.shape[n:]) if place else (*x.shape[n:], *ones)
    return x.reshape(*x.shape[:n], 1, *around)
