"""Attention masks as functions of positions, and biases computed from masks.

A mask function takes query and key positions, which broadcast against each other, and returns True
where the query may attend to the key. It serves a single decoding step as well as a whole sequence,
without a table of all pairs. A bias is added to the logits: 0 where the mask is True, else
`NEG_INF`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from weft.functional.ranks import same_ndim

# Finite, so that a fully masked row has a softmax and a gradient; large enough that adding a
# float32 logit does not change it.
NEG_INF = -1e15

MaskFn = Callable[[Array, Array], Array]


def causal_mask(
    query_position: Int[Array, "*#shape"], key_position: Int[Array, "*#shape"]
) -> Bool[Array, "*shape"]:
    """Lets each position attend to itself and to earlier positions.

    >>> causal_mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    query_position, key_position = same_ndim(query_position, key_position)
    return query_position >= key_position


def sliding_window_causal_mask(sliding_window_size: int) -> MaskFn:
    """Lets each position attend to itself and to the `sliding_window_size` positions before it.

    >>> mask = sliding_window_causal_mask(1)
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return left_right_window_mask(sliding_window_size, 0)


def left_right_window_mask(left_context: int | None, right_context: int | None) -> MaskFn:
    """Lets each position attend to itself and to a number of positions on its left and right.

    A context of None is unlimited.

    >>> mask = left_right_window_mask(0, 1)
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    """

    def mask(query_position, key_position):
        query_position, key_position = same_ndim(query_position, key_position)
        distance = query_position - key_position
        inside = jnp.ones(jnp.shape(distance), bool)
        if left_context is not None:
            inside &= distance <= left_context
        if right_context is not None:
            inside &= distance >= -right_context
        return inside

    return mask


def truncated_key_mask(valid_k_len: Int[Array, "*#shape"] | int) -> MaskFn:
    """Lets every position attend to the first `valid_k_len` keys.

    >>> truncated_key_mask(2)(jnp.arange(1)[:, None], jnp.arange(4)[None, :]).astype(int).tolist()
    [[1, 1, 0, 0]]
    """

    def mask(query_position, key_position):
        shape = jnp.broadcast_shapes(jnp.shape(query_position), jnp.shape(key_position))
        keys, valid = same_ndim(key_position, jnp.asarray(valid_k_len))
        return jnp.broadcast_to(keys < valid, shape)

    return mask


def and_masks(*mask_fns: MaskFn) -> MaskFn:
    """Returns the mask that is True where all of the given masks are.

    >>> mask = and_masks(causal_mask, left_right_window_mask(1, None))
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    def mask(query_position, key_position):
        masks = same_ndim(*(fn(query_position, key_position) for fn in mask_fns))
        return functools.reduce(operator.and_, masks)

    return mask


def or_masks(*mask_fns: MaskFn) -> MaskFn:
    """Returns the mask that is True where any of the given masks is.

    >>> prefix = lambda query, key: (key < 2) & (query >= 0)
    >>> mask = or_masks(causal_mask, prefix)
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    def mask(query_position, key_position):
        masks = same_ndim(*(fn(query_position, key_position) for fn in mask_fns))
        return functools.reduce(operator.or_, masks)

    return mask


def evaluate_mask(
    mask_fn: MaskFn,
    query_positions: Int[Array, "#batch target"],
    key_positions: Int[Array, "#batch source"],
) -> Bool[Array, "batch 1 target source"]:
    """Returns the mask of all pairs of positions, with an axis for the heads.

    >>> evaluate_mask(causal_mask, jnp.array([[2], [0]]), jnp.arange(3)[None]).astype(int).tolist()
    [[[[1, 1, 1]]], [[[1, 0, 0]]]]
    """
    return mask_fn(query_positions[:, None, :, None], key_positions[:, None, None, :])


def segment_mask(
    query_segments: Int[Array, "batch target"], key_segments: Int[Array, "batch source"]
) -> Bool[Array, "batch 1 target source"]:
    """Lets each position attend to the positions of its own segment.

    >>> ids = jnp.array([[1, 1, 2]])
    >>> segment_mask(ids, ids).astype(int).tolist()
    [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    return query_segments[:, None, :, None] == key_segments[:, None, None, :]


def bool_to_bias(mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns 0 where the mask is True and `NEG_INF` elsewhere.

    >>> (bool_to_bias(jnp.array([True, False])) < -1e14).tolist()
    [False, True]
    """
    return jnp.where(mask, 0.0, NEG_INF).astype(jnp.float32)
