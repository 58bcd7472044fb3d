"""Attention masks as functions of positions, and biases computed from masks.

A mask function takes query and key positions, which broadcast against each other, and returns True
where the query may attend to the key. `evaluate_mask` passes positions of the shapes `(batch,
queries, 1)` and `(batch, 1, keys)`. It serves a single decoding step as well as a whole sequence,
without a table of all pairs. Functions made here are equal if their arguments are, so that a jitted
function that takes one as a static argument is not traced again. An `AttentionMask` adds positions
and segment ids to a function. A bias is added to the logits: 0 where the mask is True, else
`NEG_INF`.

`make_attention_mask`, `make_causal_mask` and `combine_masks` are Flax's, for the `mask` of layers:
tables of all pairs of shape `(*batch, 1, queries, keys)`, with 1 for all heads, which are nonzero
where a query may attend to a key.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from weft import errors, struct
from weft.functional.arrays import gathered, same_ndim, to_ndim
from weft.typing import DType

# Finite, so that a fully masked row has a softmax and a gradient; large enough that adding a
# float32 logit does not change it.
NEG_INF = -1e15
"""The bias of a position that is not attended to."""

MaskFn = Callable[[Array, Array], Array]
"""Maps positions of queries and keys, which broadcast, to whether they attend to each other."""


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


@dataclasses.dataclass(frozen=True)
class Window:
    """Numbers of positions on the left and right that a position may attend to; None for all."""

    left_context: int | None = None
    right_context: int | None = None

    def __call__(self, query_position: Array, key_position: Array) -> Array:
        """Returns the mask, as `left_right_window_mask` does."""
        query_position, key_position = same_ndim(query_position, key_position)
        distance = query_position - key_position
        inside = jnp.ones(jnp.shape(distance), bool)
        if self.left_context is not None:
            inside &= distance <= self.left_context
        if self.right_context is not None:
            inside &= distance >= -self.right_context
        return inside


def left_right_window_mask(
    left_context: int | None, right_context: int | None
) -> MaskFn:
    """Lets each position attend to itself and to a number of positions on its left and right.

    A context of None is unlimited.

    >>> mask = left_right_window_mask(0, 1)
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    """
    return Window(left_context, right_context)


def truncated_key_mask(valid_k_len: Int[Array, "*#shape"] | int) -> MaskFn:
    """Lets every position attend to the first `valid_k_len` keys.

    >>> truncated_key_mask(2)(jnp.arange(1)[:, None], jnp.arange(4)[None, :]).astype(int).tolist()
    [[1, 1, 0, 0]]
    """

    def mask(query_position: Array, key_position: Array) -> Array:
        pair_shape = jnp.broadcast_shapes(
            jnp.shape(query_position), jnp.shape(key_position)
        )
        key_position, valid_length = same_ndim(
            key_position, jnp.asarray(valid_k_len)
        )
        inside = key_position < valid_length
        return jnp.broadcast_to(
            inside, jnp.broadcast_shapes(inside.shape, pair_shape)
        )

    return mask


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Mask function that is True where all, or any, of some others are."""

    kind: Literal["and", "or"]
    mask_fns: tuple[MaskFn, ...]

    def __call__(self, query_position: Array, key_position: Array) -> Array:
        masks = same_ndim(
            *[fn(query_position, key_position) for fn in self.mask_fns]
        )
        join = operator.and_ if self.kind == "and" else operator.or_
        return functools.reduce(join, masks)


def and_masks(*mask_fns: MaskFn) -> MaskFn:
    """Returns the mask that is True where all of the given masks are.

    >>> mask = and_masks(causal_mask, left_right_window_mask(1, None))
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return _Joined("and", mask_fns)


def or_masks(*mask_fns: MaskFn) -> MaskFn:
    """Returns the mask that is True where any of the given masks is.

    >>> prefix = lambda query, key: (key < 2) & (query >= 0)
    >>> mask = or_masks(causal_mask, prefix)
    >>> mask(jnp.arange(3)[:, None], jnp.arange(3)[None, :]).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return _Joined("or", mask_fns)


def window_of(mask_fn: MaskFn | None) -> tuple[Window, bool]:
    """Returns a window around all pairs of a mask, and whether the mask has all pairs within it.

    >>> window_of(and_masks(causal_mask, left_right_window_mask(1, None)))
    (Window(left_context=1, right_context=0), True)
    >>> window_of(and_masks(causal_mask, truncated_key_mask(2)))
    (Window(left_context=None, right_context=0), False)
    """
    if mask_fn is None:
        return Window(), True
    if mask_fn is causal_mask:
        return Window(None, 0), True
    if isinstance(mask_fn, Window):
        return mask_fn, True
    if not isinstance(mask_fn, _Joined):
        return Window(), False
    windows: list[Window] = []
    all_exact = True
    for inner_fn in mask_fn.mask_fns:
        window, is_exact = window_of(inner_fn)
        windows.append(window)
        all_exact = all_exact and is_exact
    left_contexts = [window.left_context for window in windows]
    right_contexts = [window.right_context for window in windows]
    if mask_fn.kind == "and":
        return Window(
            _narrowest(left_contexts), _narrowest(right_contexts)
        ), all_exact
    # A window around two windows also has pairs of neither, unless they are the same.
    return Window(
        _widest(left_contexts), _widest(right_contexts)
    ), all_exact and len(set(windows)) == 1


def _narrowest(contexts: list[int | None]) -> int | None:
    return min((size for size in contexts if size is not None), default=None)


def _widest(contexts: list[int | None]) -> int | None:
    sizes = [size for size in contexts if size is not None]
    if len(sizes) < len(contexts):
        return None
    return max(sizes)


class AttentionMask(struct.PyTreeNode):
    """Mask of attention that is described instead of written out, a table of all pairs.

    A query may attend to a key if `mask_fn` of their positions is True, both have the same segment
    id, and all `arrays` are True. What is None does not restrict.

    Attributes:
        mask_fn: function of positions of queries and keys, which broadcast against each other, such
            as `causal_mask`; True where the query may attend to the key.
        query_positions: `Int[Array, "*#batch target"]`; None counts from 0.
        key_positions: `Int[Array, "*#batch source"]`; None counts from 0.
        query_segments: `Int[Array, "*#batch target"]`, ids of the segments of queries.
        key_segments: `Int[Array, "*#batch source"]`; None for those of the queries.
        arrays: each `Bool[Array, "#batch #heads #target #source"]`, for what has no description.

    >>> mask = AttentionMask(causal_mask, query_segments=jnp.array([[1, 1, 2]]))
    >>> mask.to_array(3, 3).astype(int).tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """

    mask_fn: MaskFn | None = struct.field(pytree_node=False, default=None)
    query_positions: Any = None
    key_positions: Any = None
    query_segments: Any = None
    key_segments: Any = None
    arrays: tuple[Any, ...] = ()

    def to_array(
        self, target: int, source: int
    ) -> Bool[Array, "#batch #heads #target #source"]:
        """Returns the mask of all pairs of `target` queries and `source` keys.

        Without any restriction its shape is `(1, 1, 1, 1)`.
        """
        masks: list[Array] = []
        if self.mask_fn is not None:
            masks.append(
                evaluate_mask(self.mask_fn, *self.positions(target, source))
            )
        if self.query_segments is not None:
            key_segments = self.key_segments
            if key_segments is None:
                key_segments = self.query_segments
            masks.append(segment_mask(self.query_segments, key_segments))
        masks += [jnp.asarray(x, bool) for x in self.arrays]
        if not masks:
            return jnp.ones((1, 1, 1, 1), bool)
        ndim = max(4, *[mask.ndim for mask in masks])
        return functools.reduce(
            jnp.logical_and, [to_ndim(mask, ndim) for mask in masks]
        )

    @property
    def restricts(self) -> bool:
        """True if some pair may be False."""
        return bool(
            self.mask_fn or self.query_segments is not None or self.arrays
        )

    def positions(
        self, target: int, source: int
    ) -> list[Int[Array, "#batch length"]]:
        """Returns the positions of `target` queries and of `source` keys."""
        query_positions, key_positions = (
            self.query_positions,
            self.key_positions,
        )
        if query_positions is None:
            query_positions = jnp.arange(target)
        if key_positions is None:
            key_positions = jnp.arange(source)
        return [jnp.atleast_2d(query_positions), jnp.atleast_2d(key_positions)]

    def restricted(self, mask_fn: MaskFn) -> AttentionMask:
        """Returns the mask that is True where also a function of the same positions is."""
        if self.mask_fn is not None:
            mask_fn = and_masks(self.mask_fn, mask_fn)
        return self.replace(mask_fn=mask_fn)


def mask_of_step(
    mask: Array | MaskFn | AttentionMask | None,
    index: Int[Array, ""],
    length: int,
) -> Array | None:
    """Returns the mask of a decoding step, whose query is at `index`, as an array or None.

    >>> mask_of_step(causal_mask, jnp.array(1), 3).tolist()
    [[[[True, True, False]]]]
    """
    if mask is None or isinstance(mask, Array):
        return mask
    position = jnp.reshape(index, (1, 1))
    return (
        as_attention_mask(mask)
        .replace(query_positions=position)
        .to_array(1, length)
    )


def as_attention_mask(
    mask: Array | MaskFn | AttentionMask | None,
) -> AttentionMask:
    """Returns a mask, given as an array, as a function of positions, or as None, as an object.

    >>> as_attention_mask(causal_mask).to_array(1, 2).tolist()
    [[[[True, False]]]]
    """
    if isinstance(mask, AttentionMask):
        return mask
    if mask is None or callable(mask):
        return AttentionMask(mask)
    return AttentionMask(arrays=(jnp.asarray(mask, bool),))


def evaluate_mask(
    mask_fn: MaskFn,
    query_positions: Int[Array, "*#batch target"],
    key_positions: Int[Array, "*#batch source"],
) -> Bool[Array, "*batch heads target source"]:
    """Returns the mask of all pairs of positions, with axes for batch and heads.

    >>> evaluate_mask(causal_mask, jnp.array([[2], [0]]), jnp.arange(3)[None]).astype(int).tolist()
    [[[[1, 1, 1]]], [[[1, 0, 0]]]]
    """
    query_positions, key_positions = jnp.atleast_2d(
        query_positions, key_positions
    )
    query_column = query_positions[..., :, None]  # (#batch, target, 1)
    key_row = gathered(key_positions, -1)[..., None, :]  # (#batch, 1, source)
    mask = mask_fn(query_column, key_row)
    has_heads = mask.ndim > query_column.ndim
    if has_heads:
        return mask
    return mask[..., None, :, :]


def segment_mask(
    query_segments: Int[Array, "*batch target"],
    key_segments: Int[Array, "*batch source"],
) -> Bool[Array, "*batch 1 target source"]:
    """Lets each position attend to the positions of its own segment.

    >>> ids = jnp.array([[1, 1, 2]])
    >>> segment_mask(ids, ids).astype(int).tolist()
    [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    query_column = query_segments[..., :, None]  # (*batch, target, 1)
    key_row = gathered(jnp.asarray(key_segments), -1)[
        ..., None, :
    ]  # (*batch, 1, source)
    mask = (query_column == key_row)[..., None, :, :]
    return to_ndim(mask, max(mask.ndim, 4))


def bool_to_bias(mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns 0 where the mask is True and `NEG_INF` elsewhere.

    >>> (bool_to_bias(jnp.array([True, False])) < -1e14).tolist()
    [False, True]
    """
    return jnp.where(mask, 0.0, NEG_INF).astype(jnp.float32)


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
        pairwise_fn: of two arrays that broadcast, `(*batch, queries, 1)` and `(*batch, 1, keys)`;
            by default, both must be nonzero.
        extra_batch_dims: number of axes of size 1 to prepend.

    Raises:
        ArgumentShapeError: if an input has no axes.

    >>> valid = jnp.array([1, 1, 0])
    >>> make_attention_mask(valid, valid, dtype=int).tolist()
    [[[1, 1, 0], [1, 1, 0], [0, 0, 0]]]
    """
    if not jnp.ndim(query_input) or not jnp.ndim(key_input):
        raise errors.ArgumentShapeError(
            f"query_input and key_input have the shapes {jnp.shape(query_input)} and "
            f"{jnp.shape(key_input)}; expected (*batch, length)."
        )
    query_column = jnp.asarray(query_input)[
        ..., :, None
    ]  # (*batch, queries, 1)
    key_row = jnp.asarray(key_input)[..., None, :]  # (*batch, 1, keys)
    mask = jnp.asarray(pairwise_fn(*same_ndim(query_column, key_row)), dtype)
    head_axis = extra_batch_dims + mask.ndim - 2
    return jnp.expand_dims(mask, (*range(extra_batch_dims), head_axis))


def make_causal_mask(
    x: Num[Array, "*batch length"],
    extra_batch_dims: int = 0,
    dtype: DType = jnp.float32,
) -> Num[Array, "*batch 1 length length"]:
    """Returns a mask that lets each position attend to itself and to earlier positions.

    Only the shape of `x`, `(*batch, length)`, is used; `extra_batch_dims` axes of size 1 are
    prepended.

    >>> make_causal_mask(jnp.ones(3), dtype=int).tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    """
    positions = jnp.broadcast_to(
        jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape
    )
    return make_attention_mask(
        positions, positions, causal_mask, extra_batch_dims, dtype
    )


def combine_masks(
    *masks: Num[Array, "*mask"] | None, dtype: DType = jnp.float32
) -> Num[Array, "*mask"] | None:
    """Returns True where all masks are; None if all masks are None.

    Raises:
        ArgumentShapeError: if the masks have different numbers of axes.

    >>> combine_masks(jnp.array([1, 1, 0]), None, jnp.array([0, 1, 1]), dtype=int).tolist()
    [0, 1, 0]
    """
    restrictions = [mask for mask in masks if mask is not None]
    if not restrictions:
        return None
    shapes = [np.shape(mask) for mask in restrictions]
    if len(set(map(len, shapes))) > 1:
        raise errors.ArgumentShapeError(
            f"the masks have the shapes {shapes}; expected the same "
            "number of axes, with size 1 where a mask is the same for all."
        )
    return functools.reduce(jnp.logical_and, restrictions).astype(dtype)
