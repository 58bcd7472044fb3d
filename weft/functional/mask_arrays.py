"""Attention masks as arrays, for the `mask` of layers.

These are Flax-style tables of all pairs, unlike the functions of `attention_mask`. A mask has the
shape `(*batch, 1, queries, keys)`, with 1 for all heads, and is nonzero where a query may attend to
a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError
from weft.functional.attention_mask import causal_mask
from weft.functional.ranks import same_ndim
from weft.typing import DType

__all__ = ["combine_masks", "make_attention_mask", "make_causal_mask"]


def make_attention_mask(
    query_input: Num[Array, "*batch queries"],
    key_input: Num[Array, "*batch keys"],
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: DType = jnp.float32,
) -> Num[Array, "*batch 1 queries keys"]:
    """Returns the values of a function of each query and each key.

    Args:
        query_input: data of the queries, such as whether they are valid.
        key_input: data of the keys.
        pairwise_fn: of two arrays that broadcast, `(*batch, queries, 1)` and `(*batch, 1, keys)`;
            by default, both must be nonzero.
        extra_batch_dims: number of axes of size 1 to prepend.
        dtype: of the mask.

    Raises:
        ArgumentShapeError: if an input has no axes.

    >>> valid = jnp.array([1, 1, 0])
    >>> make_attention_mask(valid, valid, dtype=int).tolist()
    [[[1, 1, 0], [1, 1, 0], [0, 0, 0]]]
    """
    if not jnp.ndim(query_input) or not jnp.ndim(key_input):
        raise ArgumentShapeError(
            f"query_input and key_input have the shapes {jnp.shape(query_input)} and "
            f"{jnp.shape(key_input)}; expected (*batch, length)."
        )
    query, key = jnp.asarray(query_input)[..., :, None], jnp.asarray(key_input)[..., None, :]
    mask = jnp.asarray(pairwise_fn(*same_ndim(query, key)), dtype)
    front = (*range(extra_batch_dims), extra_batch_dims + mask.ndim - 2)
    return jnp.expand_dims(mask, front)


def make_causal_mask(
    x: Num[Array, "*batch length"], extra_batch_dims: int = 0, dtype: DType = jnp.float32
) -> Num[Array, "*batch 1 length length"]:
    """Returns a mask that lets each position attend to itself and to earlier positions.

    Only the shape of `x`, `(*batch, length)`, is used; `extra_batch_dims` axes of size 1 are
    prepended.

    >>> make_causal_mask(jnp.ones(3), dtype=int).tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    return make_attention_mask(positions, positions, causal_mask, extra_batch_dims, dtype)


def combine_masks(
    *masks: Num[Array, "*mask"] | None, dtype: DType = jnp.float32
) -> Num[Array, "*mask"] | None:
    """Returns True where all masks are; None if all masks are None.

    Raises:
        ArgumentShapeError: if the masks have different numbers of axes.

    >>> combine_masks(jnp.array([1, 1, 0]), None, jnp.array([0, 1, 1]), dtype=int).tolist()
    [0, 1, 0]
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    if len({np.ndim(mask) for mask in given}) > 1:
        raise ArgumentShapeError(
            f"the masks have the shapes {[np.shape(mask) for mask in given]}; expected the same "
            "number of axes, with size 1 where a mask is the same for all."
        )
    return functools.reduce(jnp.logical_and, given).astype(dtype)
