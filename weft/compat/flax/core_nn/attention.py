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
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from weft import errors, functional, struct
from weft.compat.flax.core_nn.linear import Initializer, default_kernel_init, dense_general
from weft.core.scope import Scope
from weft.functional import AttentionImplementation, AttentionMask, attention
from weft.functional.arrays import as_tuple
from weft.functional.dropout import keep_mask

Axes = tuple[int, ...]
Named = dict[str, Array | None]
"""Values of the queries and of the keys, in this order, by the names of the user's arguments."""


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
    if not all(1 <= a < ndim - 2 for a in axes) or len(set(axes)) != len(axes):
        raise errors.ArgumentValueError(
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
    named: Named,
    query: Num[Array, "batch *targets_heads dim"],
    key: Num[Array, "batch *sources_heads dim"],
    axes: Axes,
) -> Array | None:
    """Combines values of each query and each key; None if there are no values.

    Args:
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
        raise errors.ArgumentValueError(f"{key_name} was given without {name}: give both.")
    if of_key is None:
        of_key, key_name = of_query, f"{name}, also for the keys as there is no {key_name},"
    lay_out = functools.partial(_broadcast_mask, axes=axes)
    return combine(lay_out(name, of_query, query, 0), lay_out(key_name, of_key, key, 1))


def _broadcast_mask(name: str, known: Array, of: Array, place: int, *, axes: Axes) -> Array:
    """Reshapes to `(batch, *other axes, 1, *axes)`, with the attended axes in their place."""
    known, expected = jnp.asarray(known), of.shape[:-2]
    x = known[..., 0] if known.shape[len(expected) :] == (1,) else known
    fits = x.ndim == len(expected) and all(
        n in (1, m) for n, m in zip(x.shape, expected, strict=True)
    )
    if not fits:
        raise errors.ArgumentShapeError(
            f"{name} has shape {known.shape}; expected {expected}, or with an axis of size 1 after "
            "them."
        )
    other = tuple(a for a in range(x.ndim) if a not in axes)
    x = jnp.transpose(x, (*other, *axes))
    n, ones = len(other), (1,) * len(axes)
    around = (*ones, *x.shape[n:]) if place else (*x.shape[n:], *ones)
    return x.reshape(*x.shape[:n], 1, *around)


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
            raise errors.ArgumentShapeError(
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
        ArgumentValueError: if the variable `entry` is not a `CacheEntry`, or is known to be full.
    """
    begun = scope.has_variable("cache", "entry")
    entry = scope.variable("cache", "entry", lambda: CacheEntry(key, value, None)(key.shape[:-2]))
    if not begun:
        return key, value, None
    cached: CacheEntry = entry.value
    if not isinstance(cached, CacheEntry):
        raise errors.ArgumentValueError(
            f"the cache of {scope.path_text!r} has a {type(cached).__name__} as its entry; "
            "expected the CacheEntry that a first call with cache=True makes."
        )
    batch, *lengths = cached.key.shape[:-2]
    ones = [1] * len(lengths)
    for x, of_cache in ((query, cached.key), (key, cached.key), (value, cached.value)):
        expected = (batch, *ones, *of_cache.shape[-2:])
        if x.shape != expected:
            raise errors.ArgumentShapeError(
                f"a step of decoding in {scope.path_text!r} has heads of shape {x.shape}, and the "
                f"cache expects {expected}: give one position at a time, and its batch."
            )
    n = math.prod(lengths)

    def flat(x: Array) -> Array:
        return x.reshape(batch, -1, *x.shape[-2:])

    keys, values, _ = attention.attention_cache_step(
        *(flat(cached.key), flat(cached.value), cached.i),
        *(flat(query), flat(key), flat(value)),
        layer=repr(scope.path_text),
    )
    keys, values = keys.reshape(cached.key.shape), values.reshape(cached.value.shape)
    entry.value = CacheEntry(keys, values, jnp.minimum(cached.i + 1, n))
    seen = jnp.arange(n, dtype=jnp.uint32) <= cached.i
    return keys, values, seen.reshape(1, 1, *ones, *lengths)


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
    other = tuple(a for a in range(query.ndim - 2) if a not in axes)
    order = (*other, *axes, query.ndim - 2, query.ndim - 1)
    batch = tuple(query.shape[a] for a in other)

    def flat(x: Array) -> Array:
        x = jnp.transpose(x, order)
        return x.reshape(math.prod(batch), -1, *x.shape[-2:])

    targets, sources = (tuple(x.shape[a] for a in axes) for x in (query, key))
    full = (*batch, query.shape[-2], *targets, *sources)
    of_heads = (math.prod(batch), query.shape[-2], math.prod(targets), math.prod(sources))
    if bias is not None:
        attention.check_broadcastable("bias", bias, full)
        bias = jnp.broadcast_to(bias, full).reshape(of_heads)
    dropout_rate, rng = 0.0 if deterministic else dropout_rate, dropout_rng
    if dropout_rate > 0.0:
        rng = scope.make_rng("dropout") if dropout_rng is None else dropout_rng
    value = flat(value).astype(jnp.promote_types(dtype, value.dtype))
    context = attention.attention_without_weights(
        implementation, flat(query), flat(key), value, bias=bias,
        mask=AttentionMask() if mask is None else mask, dropout_rate=dropout_rate, dropout_rng=rng,
        broadcast_dropout=broadcast_dropout, precision=precision, only_plain={},
    )  # fmt: skip
    if context is None:
        logits = functional.attention_logits(flat(query), flat(key), precision=precision)
        logits *= query.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + bias
        if mask is not None:
            logits = logits + functional.bool_to_bias(mask.to_array(*logits.shape[-2:]))
        probs = jax.nn.softmax(logits)
        if dropout_rate > 0.0:
            shape = (*([1] * (len(batch) + 1)), *targets, *sources) if broadcast_dropout else full
            assert rng is not None
            keep = keep_mask(rng, dropout_rate, shape)
            keep = jnp.broadcast_to(keep, full).reshape(probs.shape)
            probs = functional.dropout(probs, rate=dropout_rate, mask=keep)
        context = functional.attention_context(probs.astype(dtype), value, precision=precision)
    context = context.reshape(*batch, *targets, *context.shape[-2:])
    return jnp.transpose(context, tuple(order.index(a) for a in range(query.ndim)))


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

    Example:
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
    features = qkv_features or inputs_q.shape[-1]
    heads = num_heads, attention.head_features(features, num_heads, "attention")
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
    inputs = {"query": inputs_q, "key": inputs_kv, "value": inputs_kv}
    query, key, value = (project(scope.push(name), x, heads) for name, x in inputs.items())
    axes, seen = attended_axes(query.ndim, attention_axis), None
    if cache:
        _check_decoding(causal_mask, axes, query.ndim)
        key, value, seen = decode(scope, query, key, value)
    if padding_mask is None and key_padding_mask is not None:
        padding_mask = jnp.ones(query.shape[:-2], bool)
    segments = {"segmentation": segmentation, "key_segmentation": key_segmentation}
    padding = {"padding_mask": padding_mask, "key_padding_mask": key_padding_mask}
    if attention_fn is dot_product_attention and not cache and len(axes) == query.ndim - 3:
        options: dict[str, Any] = {"mask": _mask(query, key, axes, causal_mask, padding, segments)}
    else:
        options = {"bias": _bias(query, key, axes, seen, causal_mask, padding, segments)}
    context = scope.child(attention_fn)(
        query, key, value, dtype=dtype, axis=axes, precision=precision, dropout_rng=dropout_rng,
        **options,
        dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout, deterministic=deterministic,
    )  # fmt: skip
    return project(scope.push("out"), context, out_features or inputs_q.shape[-1], axis=(-2, -1))


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
    query: Array, key: Array, axes: Axes, causal_mask: bool, padding: Named, segments: Named
) -> AttentionMask:
    """Returns the mask of attention over all axes, in the order of their flattened positions."""

    def flattened(named: Named) -> Any:
        both: Any = lambda of_queries, of_keys: (of_queries, of_keys)  # noqa: E731
        pair: Any = pairwise(both, named, query, key, axes)
        if pair is None:
            return None, None
        return [
            jnp.broadcast_to(x.reshape(len(x), *sizes), (len(x), *of.shape[1:-2])).reshape(
                len(x), -1
            )
            for x, of, sizes in (
                (pair[0], query, pair[0].shape[2 : 2 + len(axes)]),
                (pair[1], key, pair[1].shape[2 + len(axes) :]),
            )
        ]

    valid, valid_keys = flattened(padding)
    ids, key_ids = flattened(segments)
    arrays = ()
    if valid is not None:
        arrays = (valid[:, None, :, None] != 0, valid_keys[:, None, None, :] != 0)
    fn = functional.causal_mask if causal_mask else None
    return AttentionMask(fn, query_segments=ids, key_segments=key_ids, arrays=arrays)


def _bias(
    query: Array,
    key: Array,
    axes: Axes,
    seen: Array | None,
    causal_mask: bool,
    padding: Named,
    segments: Named,
) -> Array | None:
    if seen is not None and [x is None for x in segments.values()] == [False, True]:
        raise errors.ArgumentValueError(
            "segmentation was given to a step of decoding without key_segmentation: give that of "
            "all positions of the cache."
        )
    if causal_mask and seen is None:
        seen = causal(query, key, axes)
    padding_mask = pairwise(jnp.logical_and, padding, query, key, axes)
    same_segment = pairwise(jnp.equal, segments, query, key, axes)
    masks = [mask for mask in (seen, padding_mask, same_segment) if mask is not None]
    return functional.bool_to_bias(functools.reduce(jnp.logical_and, masks)) if masks else None
