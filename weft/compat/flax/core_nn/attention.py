"""Attention as a function of a scope, over one or several axes, with a cache for decoding.

A mask has the shape `(batch, *other axes, 1, *axes of the queries, *axes of the keys)`, or one that
broadcasts to it; the 1 is for the heads. Positions along several attended axes are in the order of
their flattened axes.

The cache is a `CacheEntry`, the variable `entry` of the collection `cache`. The first call creates
an empty cache with the length of its inputs, and attends without it. Each later call has one
position, which is written at the entry's index, and attends to all written positions. A step with a
full cache is refused; inside of a compiled program its result is NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from weft import errors, functional, struct
from weft.compat.flax.core_nn.linear import (
    Initializer,
    default_kernel_init,
    dense_general,
)
from weft.core.scope import Scope
from weft.functional import AttentionImplementation, AttentionMask, attention
from weft.functional.arrays import as_tuple
from weft.functional.dropout import keep_mask

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
    axes = as_tuple(axis)
    is_between = all(1 <= a < ndim - 2 for a in axes)
    if not is_between or len(set(axes)) != len(axes):
        raise errors.ArgumentValueError(
            f"axis={axis}: attention goes over different axes between the batch and the heads, "
            f"which are 1 to {ndim - 3} here."
        )
    return axes


def _sizes(x: Array, axes: Axes) -> tuple[int, ...]:
    return tuple(x.shape[axis] for axis in axes)


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
    targets, sources = _sizes(query, axes), _sizes(key, axes)
    query_positions = jnp.arange(math.prod(targets))[:, None]
    key_positions = jnp.arange(math.prod(sources))[None]
    ones = [1] * (
        query.ndim - len(axes) - 1
    )  # of the batch, the other axes and the heads
    return (query_positions >= key_positions).reshape(*ones, *targets, *sources)


class PositionValues(NamedTuple):
    """Values of the queries and of the keys, such as ids of segments, by the user's arguments.

    Attributes:
        queries: shape `(batch, *axes)`, with or without a last axis of size 1; so are `keys`.
        keys: None for the values of the queries.
    """

    name: str
    queries: Array | None
    key_name: str
    keys: Array | None

    def aligned(
        self, query: Array, key: Array, axes: Axes
    ) -> tuple[Array, Array] | None:
        """Returns both in the shape `(batch, *other axes, *axes)`; None if there are no values."""
        key_name, keys = self.key_name, self.keys
        if self.queries is None and keys is None:
            return None
        if self.queries is None:
            raise errors.ArgumentValueError(
                f"{key_name} was given without {self.name}: give both."
            )
        if keys is None:
            keys = self.queries
            key_name = (
                f"{self.name}, also for the keys as there is no {key_name},"
            )
        aligned_queries = _aligned(
            self.name, self.queries, query.shape[:-2], axes
        )
        return aligned_queries, _aligned(key_name, keys, key.shape[:-2], axes)


def _aligned(
    name: str, values: Array, expected: tuple[int, ...], axes: Axes
) -> Array:
    """Transposes values of the shape `expected`, or one that broadcasts to it."""
    x = jnp.asarray(values)
    if x.shape[len(expected) :] == (1,):
        x = x[..., 0]
    is_broadcastable = x.ndim == len(expected)
    for size, expected_size in zip(x.shape, expected, strict=False):
        is_broadcastable = is_broadcastable and size in (1, expected_size)
    if not is_broadcastable:
        raise errors.ArgumentShapeError(
            f"{name} has shape {jnp.shape(values)}; expected {expected}, or with an axis of size 1 "
            "after them."
        )
    other_axes = [axis for axis in range(x.ndim) if axis not in axes]
    return jnp.transpose(x, (*other_axes, *axes))


def pairwise(
    combine: Callable[[Array, Array], Array],
    values: PositionValues,
    query: Num[Array, "batch *targets_heads dim"],
    key: Num[Array, "batch *sources_heads dim"],
    axes: Axes,
) -> Array | None:
    """Combines values of each query and each key; None if there are no values.

    >>> x, ids = jnp.zeros((1, 3, 1, 1)), jnp.array([[1, 1, 2]])
    >>> segments = PositionValues("segmentation", ids, "key_segmentation", None)
    >>> pairwise(jnp.equal, segments, x, x, (1,)).astype(int).tolist()
    [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    aligned = values.aligned(query, key, axes)
    if aligned is None:
        return None
    # (batch, *other axes, heads, *targets, *sources)
    query_values, key_values = aligned
    num_other = query_values.ndim - len(axes)
    other, targets = (
        query_values.shape[:num_other],
        query_values.shape[num_other:],
    )
    key_other, sources = (
        key_values.shape[:num_other],
        key_values.shape[num_other:],
    )
    ones = (1,) * len(axes)
    return combine(
        query_values.reshape(*other, 1, *targets, *ones),
        key_values.reshape(*key_other, 1, *ones, *sources),
    )


class CacheEntry(struct.PyTreeNode):
    """Keys and values of previous positions.

    Calling an entry returns an empty one of another size. For a tree of caches:
    `jax.tree.map(lambda entry: entry((batch, length)), cache, is_leaf=callable)`.

    Attributes:
        key: shape `(batch, *lengths, heads, dim)`.
        value: same shape as `key`.
        i: number of positions.

    >>> entry = CacheEntry(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)), jnp.uint32(3))
    >>> longer = entry((8, 100))
    >>> longer.key.shape, int(longer.i)
    ((8, 100, 2, 4), 0)
    """

    key: Any
    value: Any
    i: Any

    def __call__(
        self, shape: tuple[int, ...], dtype: DTypeLike | None = None
    ) -> CacheEntry:
        """Returns an empty entry of shape `(batch, *lengths)`, by default with the same dtype.

        Raises:
            ArgumentShapeError: if the number of lengths differs.
        """
        if len(shape) != self.key.ndim - 2:
            raise errors.ArgumentShapeError(
                f"a cache of shape {tuple(shape)} was requested; expected the size of the batch "
                f"and {self.key.ndim - 3} length(s)."
            )
        key = jnp.zeros((*shape, *self.key.shape[-2:]), dtype or self.key.dtype)
        value = jnp.zeros(
            (*shape, *self.value.shape[-2:]), dtype or self.value.dtype
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
        ArgumentValueError: if the variable `entry` is not a `CacheEntry`, or is known to be full.
    """
    is_first_call = not scope.has_variable("cache", "entry")
    entry = scope.variable(
        "cache", "entry", lambda: CacheEntry(key, value, None)(key.shape[:-2])
    )
    if is_first_call:
        return key, value, None
    cached: CacheEntry = entry.value
    if not isinstance(cached, CacheEntry):
        raise errors.ArgumentValueError(
            f"the cache of {scope.path_text!r} has a {type(cached).__name__} as its entry; "
            "expected the CacheEntry that a first call with cache=True makes."
        )
    batch, *lengths = cached.key.shape[:-2]
    ones = [1] * len(lengths)
    for x, cached_x in (
        (query, cached.key),
        (key, cached.key),
        (value, cached.value),
    ):
        expected = (batch, *ones, *cached_x.shape[-2:])
        if x.shape != expected:
            raise errors.ArgumentShapeError(
                f"a step of decoding in {scope.path_text!r} has heads of shape {x.shape}, and the "
                f"cache expects {expected}: give one position at a time, and its batch."
            )
    num_positions = math.prod(lengths)

    def flat(x: Array) -> Array:
        return x.reshape(batch, -1, *x.shape[-2:])

    keys, values, _ = attention.attention_cache_step(
        flat(cached.key),
        flat(cached.value),
        cached.i,
        flat(query),
        flat(key),
        flat(value),
        layer=repr(scope.path_text),
    )
    keys = keys.reshape(cached.key.shape)
    values = values.reshape(cached.value.shape)
    entry.value = CacheEntry(
        keys, values, jnp.minimum(cached.i + 1, num_positions)
    )
    is_written = jnp.arange(num_positions, dtype=jnp.uint32) <= cached.i
    return keys, values, is_written.reshape(1, 1, *ones, *lengths)


def dot_product_attention(
    scope: Scope,
    query: Float[Array, "batch *target heads dim"],
    key: Float[Array, "batch *source heads dim"],
    value: Float[Array, "batch *source heads value_dim"],
    dtype: DTypeLike = jnp.float32,
    bias: Float[Array, "..."] | None = None,
    axis: int | Sequence[int] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    precision: jax.lax.PrecisionLike = None,
    mask: AttentionMask | None = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "batch *target heads value_dim"]:
    """Returns `softmax(query · key / sqrt(dim) + bias) · value` over axes (Vaswani et al., 2017).

    Args:
        scope: provides a key of the stream `dropout`.
        dtype: dtype of the probabilities, and of the result unless that of the values is wider.
        bias: added to the logits, broadcastable to `(batch, *other axes, heads, *axes of query,
            *axes of key)`.
        axis: axes to attend over; by default all between batch and heads.
        broadcast_dropout: whether all examples and heads share a dropout mask.
        dropout_rng: key to use instead of the scope's.
        mask: of the flattened attended axes; not written out for all pairs.
        implementation: how to compute it (see `weft.functional.fused_attention`); None chooses by
            device, lengths and arguments.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if the axes cannot be attended over, or not by `implementation`.
    """
    if key.shape[:-1] != value.shape[:-1] or query.shape[-2:] != key.shape[-2:]:
        raise errors.ArgumentShapeError(
            f"query {query.shape}, key {key.shape} and value {value.shape}: key and value must "
            "agree but in the last axis, query and key in the last two."
        )
    axes = attended_axes(query.ndim, axis)
    batch_axes = tuple(
        axis for axis in range(query.ndim - 2) if axis not in axes
    )
    order = (*batch_axes, *axes, query.ndim - 2, query.ndim - 1)
    num_heads = query.shape[-2]
    batch, targets, sources = (
        _sizes(query, batch_axes),
        _sizes(query, axes),
        _sizes(key, axes),
    )

    def flat(x: Array) -> Array:  # (batch × other axes, positions, heads, dim)
        x = jnp.transpose(x, order)
        return x.reshape(math.prod(batch), -1, *x.shape[-2:])

    logits_shape = (*batch, num_heads, *targets, *sources)
    flat_logits_shape = (
        math.prod(batch),
        num_heads,
        math.prod(targets),
        math.prod(sources),
    )
    if bias is not None:
        attention.check_broadcastable("bias", bias, logits_shape)
        bias = jnp.broadcast_to(bias, logits_shape).reshape(flat_logits_shape)
    if mask is None:
        mask = AttentionMask()
    if deterministic:
        dropout_rate = 0.0
    if dropout_rate > 0.0 and dropout_rng is None:
        dropout_rng = scope.make_rng("dropout")
    query, key = flat(query), flat(key)
    value = flat(value).astype(jnp.promote_types(dtype, value.dtype))
    context = attention.attention_without_weights(
        implementation, query, key, value, bias=bias, mask=mask, dropout_rate=dropout_rate,
        dropout_rng=dropout_rng, broadcast_dropout=broadcast_dropout, precision=precision,
        only_plain={},
    )  # fmt: skip
    if context is None:
        logits = functional.attention_logits(query, key, precision=precision)
        logits *= query.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + bias
        if mask.restricts:
            logits = logits + functional.bool_to_bias(
                mask.to_array(*logits.shape[-2:])
            )
        probs = jax.nn.softmax(logits)
        if dropout_rate > 0.0:
            assert dropout_rng is not None
            keep_shape = logits_shape
            if broadcast_dropout:
                keep_shape = (*[1] * (len(batch) + 1), *targets, *sources)
            keep = keep_mask(dropout_rng, dropout_rate, keep_shape)
            keep = jnp.broadcast_to(keep, logits_shape).reshape(probs.shape)
            probs = functional.dropout(probs, rate=dropout_rate, mask=keep)
        context = functional.attention_context(
            probs.astype(dtype), value, precision=precision
        )
    context = context.reshape(*batch, *targets, *context.shape[-2:])
    inverse_order = [order.index(axis) for axis in range(len(order))]
    return jnp.transpose(context, inverse_order)


def multi_head_dot_product_attention(
    scope: Scope,
    inputs_q: Float[Array, "batch *target features"],
    inputs_kv: Float[Array, "batch *source features"] | None,
    num_heads: int,
    dtype: DTypeLike = jnp.float32,
    qkv_features: int | None = None,
    out_features: int | None = None,
    attention_axis: int | Sequence[int] | None = None,
    causal_mask: bool = False,
    padding_mask: Bool[Array, " batch *target"] | None = None,
    key_padding_mask: Bool[Array, " batch *source"] | None = None,
    segmentation: Int[Array, " batch *target"] | None = None,
    key_segmentation: Int[Array, " batch *source"] | None = None,
    cache: bool = False,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    precision: jax.lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
    bias: bool = True,
    attention_fn: Callable[..., Array] = dot_product_attention,
) -> Float[Array, "batch *target out_features"]:
    """Applies multi-head attention; see `dot_product_attention` for the other arguments.

    Args:
        scope: has the scopes `query`, `key`, `value` and `out`, each with `kernel` and `bias`.
        inputs_kv: input of keys and values; None for `inputs_q`.
        qkv_features: total size of all heads; by default the size of `inputs_q`.
        out_features: output size; by default the size of `inputs_q`.
        attention_axis: axes to attend over; by default all between batch and features.
        padding_mask: False for padding; may have a last axis of size 1.
        key_padding_mask: as `padding_mask`, for `inputs_kv` or for all positions of the cache; by
            default that of the queries.
        segmentation: segment ids; only positions of the same segment attend to each other.
        key_segmentation: see `key_padding_mask`.
        cache: whether to decode, with one position per call (`weft.core.nn.attention`).
        attention_fn: replaces `dot_product_attention`, with the same arguments.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if the features are not divisible by the number of heads, or a cache is
            used without a causal mask, or is known to be full.

    >>> from weft.core import init
    >>> attend = init(multi_head_dot_product_attention)
    >>> y, variables = attend(jax.random.key(0), jnp.ones((1, 5, 8)), None, 2)
    >>> y.shape, variables["params"]["query"]["kernel"].shape
    ((1, 5, 8), (8, 2, 4))
    """
    project = functools.partial(
        dense_general, dtype=dtype, bias=bias, precision=precision, kernel_init=kernel_init,
        bias_init=bias_init,
    )  # fmt: skip
    if inputs_kv is None:
        inputs_kv = inputs_q
    features = qkv_features or inputs_q.shape[-1]
    heads = num_heads, attention.head_features(features, num_heads, "attention")
    query = project(scope.push("query"), inputs_q, heads)
    key = project(scope.push("key"), inputs_kv, heads)
    value = project(scope.push("value"), inputs_kv, heads)
    axes = attended_axes(query.ndim, attention_axis)
    is_written = None
    if cache:
        _check_decoding(causal_mask, axes, query.ndim)
        key, value, is_written = decode(scope, query, key, value)
    if padding_mask is None and key_padding_mask is not None:
        padding_mask = jnp.ones(query.shape[:-2], bool)
    segments = PositionValues(
        "segmentation", segmentation, "key_segmentation", key_segmentation
    )
    padding = PositionValues(
        "padding_mask", padding_mask, "key_padding_mask", key_padding_mask
    )
    is_over_all_axes = len(axes) == query.ndim - 3
    restriction: dict[str, Any] = {}
    if attention_fn is dot_product_attention and not cache and is_over_all_axes:
        # A description, so that no array of all pairs is needed.
        restriction["mask"] = _mask(
            query, key, axes, causal_mask, padding, segments
        )
    else:
        restriction["bias"] = _bias(
            query, key, axes, is_written, causal_mask, padding, segments
        )
    context = scope.child(attention_fn)(
        query, key, value, dtype=dtype, axis=axes, precision=precision, dropout_rng=dropout_rng,
        **restriction,
        dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout, deterministic=deterministic,
    )  # fmt: skip
    return project(
        scope.push("out"),
        context,
        out_features or inputs_q.shape[-1],
        axis=(-2, -1),
    )


def _check_decoding(causal_mask: bool, axes: Axes, ndim: int) -> None:
    if not causal_mask:
        raise errors.ArgumentValueError(
            "cache=True without causal_mask=True: a position that is decoded cannot see later "
            "ones, so give both."
        )
    if axes != tuple(range(1, ndim - 2)):
        raise errors.ArgumentValueError(
            f"cache=True decodes over all axes between batch and features, which are 1 to "
            f"{ndim - 3} here, and attention_axis is {axes}: leave it out."
        )


def _mask(
    query: Array,
    key: Array,
    axes: Axes,
    causal_mask: bool,
    padding: PositionValues,
    segments: PositionValues,
) -> AttentionMask:
    """Returns the mask of attention over all axes, in the order of their flattened positions."""

    def flat(aligned_values: Array, heads: Array) -> Array:
        """Returns values of the shape `(batch, *axes)` as `(batch, positions)`."""
        batch = len(aligned_values)
        return jnp.broadcast_to(
            aligned_values, (batch, *_sizes(heads, axes))
        ).reshape(batch, -1)

    mask = AttentionMask(functional.causal_mask if causal_mask else None)
    aligned_segments = segments.aligned(query, key, axes)
    if aligned_segments is not None:
        mask = mask.replace(
            query_segments=flat(aligned_segments[0], query),
            key_segments=flat(aligned_segments[1], key),
        )
    aligned_padding = padding.aligned(query, key, axes)
    if aligned_padding is not None:
        is_valid = flat(aligned_padding[0], query) != 0
        is_valid_key = flat(aligned_padding[1], key) != 0
        mask = mask.replace(
            arrays=(is_valid[:, None, :, None], is_valid_key[:, None, None, :])
        )
    return mask


def _bias(
    query: Array,
    key: Array,
    axes: Axes,
    is_written: Array | None,
    causal_mask: bool,
    padding: PositionValues,
    segments: PositionValues,
) -> Array | None:
    """Returns a large negative number for each pair that must not attend; None without such.

    `is_written` says which positions of a cache the queries may attend to, in place of an order.
    """
    if (
        is_written is not None
        and segments.queries is not None
        and segments.keys is None
    ):
        raise errors.ArgumentValueError(
            "segmentation was given to a step of decoding without key_segmentation: give that of "
            "all positions of the cache."
        )
    masks = [
        pairwise(jnp.logical_and, padding, query, key, axes),
        pairwise(jnp.equal, segments, query, key, axes),
    ]
    if is_written is not None:
        masks.append(is_written)
    elif causal_mask:
        masks.append(causal(query, key, axes))
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    return functional.bool_to_bias(functools.reduce(jnp.logical_and, present))
