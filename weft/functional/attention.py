"""Dot-product attention, as a whole and in parts: logits, probabilities, context, a decoding cache.

Queries are `(batch, target, heads, dim)`, keys and values `(batch, source, kv_heads, dim)`. With
`kv_heads < heads`, `heads / kv_heads` consecutive query heads share a key head (Ainslie et al.,
2023), without repeating keys and values. Logits and probabilities are computed in float32, except
in `attention_weights`: that doubles the memory of what is usually a model's largest array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import attention_mask, embedding
from weft.functional.arrays import INLINE, gathered, to_ndim, without_none
from weft.functional.attention_mask import AttentionMask, MaskFn
from weft.functional.dropout import dropout, keep_mask
from weft.functional.fused_attention import (
    AttentionImplementation,
    fused_attention,
    is_plain,
)
from weft.functional.linear import products_are_replaced


def dot_product_attention(
    query: Float[Array, "batch target heads dim"],
    key: Float[Array, "batch source kv_heads dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    *,
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    mask: Bool[Array, "#batch #heads #target #source"]
    | MaskFn
    | AttentionMask
    | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "batch target heads value_dim"]:
    """Returns `softmax(scale * query · key + bias) · value` (Vaswani et al., 2017).

    Args:
        bias: added to the logits, broadcastable to `(batch, heads, target, source)`.
        alibi_slopes: per head, by how much logits fall with the distance of positions, which are
            those of `mask` (`alibi_bias`).
        mask: True where a query may attend: an array of the same shape as `bias`, a function of
            positions such as `causal_mask`, or an `AttentionMask`; the last two are not written
            out for all pairs. A query with no True entry gets the average of all values.
        scale: the factor of the logits; by default `1 / sqrt(dim)`.
        logit_cap: squashes the logits to ±`logit_cap`, before bias and mask.
        logit_sink: per head, a logit without a value.
        precision: as in `jax.lax.dot_general`.
        implementation: how to compute it (see `weft.functional.fused_attention`); None chooses by
            device, lengths and arguments.

    Raises:
        ArgumentShapeError: if the number of query heads is not a multiple of that of key heads.
        ArgumentValueError: if `implementation` cannot compute it.

    >>> x = jnp.ones((1, 3, 4, 2))
    >>> dot_product_attention(x, x[:, :, :2], x[:, :, :2]).shape
    (1, 3, 4, 2)
    """
    check_shared_heads(query, key)
    key = gathered(key, -3)
    value = gathered(value, -3)
    options: dict[str, Any] = {
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "mask": attention_mask.as_attention_mask(mask),
        "scale": scale,
        "logit_cap": logit_cap,
        "logit_sink": logit_sink,
        "precision": precision,
    }
    context = fused_attention(
        implementation,
        query,
        key,
        value,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        **options,
    )
    if context is not None:
        return context
    drop = None
    if dropout_rate:
        drop = functools.partial(
            dropout, rate=dropout_rate, prng_key=dropout_key
        )
    return plain_attention(query, key, value, drop=drop, **options)


def plain_attention(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source kv_heads dim"],
    value: Float[Array, "*batch source kv_heads value_dim"],
    *,
    bias: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    mask: AttentionMask = AttentionMask(),  # noqa: B008 - immutable
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    drop: Callable[[Array], Array] | None = None,
    masked_gradient: bool = True,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch target heads value_dim"]:
    """Returns attention as `dot_product_attention` does, from the logits of all pairs.

    In float32, the values are averaged with `exp(logit - largest)`, and the result is divided by
    the sum of these weights. Neither pass divides an array of all pairs, and the gradient needs no
    sum over one: only products with the values, and a number per query.

    Args:
        drop: sets weights to 0 and scales up the others.
        masked_gradient: as in `blockwise_attention`.

    >>> x = jnp.ones((1, 3, 4, 2))
    >>> plain_attention(x, x, x).shape
    (1, 3, 4, 2)
    """
    target, source = query.shape[-3], key.shape[-3]
    logits = attention_logits(query, key, precision=precision)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    is_one = isinstance(factor, float) and factor == 1.0  # it may be traced
    if not is_one:
        logits = logits * factor
    if logit_cap:
        logits = cap_logits(logits, logit_cap)
    if alibi_slopes is not None:
        positions = mask.positions(target, source)
        logits = _add_bias(
            logits, embedding.alibi_bias(alibi_slopes, *positions)
        )
    logits = _add_bias(logits, bias)
    if mask.restricts:
        allowed = mask.to_array(target, source)
        # It has four axes at least, logits without axes of a batch three.
        ndim = min(allowed.ndim, logits.ndim)
        allowed = allowed.reshape(allowed.shape[-ndim:])
        if masked_gradient:
            logits = _add_bias(logits, attention_mask.bool_to_bias(allowed))
        else:
            logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
    weights, total = _weights_and_total(logits, logit_sink)
    # In few bits, as weights are rounded to the dtype of the values, so would their gradients be.
    divides_last = value.dtype == jnp.float32 and source > 0
    if not divides_last:
        weights = weights / total
    if drop is not None:
        weights = drop(weights)
    context = attention_context(weights, value, precision=precision)
    if divides_last:
        return _divided(context, total)
    return context


def attention_logits(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*#batch source kv_heads dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = jnp.float32,
    dot_general: Callable[..., Array] | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns the inner products of all queries and keys.

    Args:
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: the dtype of the products; None for that of query and key.
        dot_general: replaces `jax.lax.dot_general` in the einsum of queries and keys.

    Raises:
        ArgumentShapeError: if the number of query heads is not a multiple of that of key heads.

    >>> attention_logits(jnp.ones((7, 3, 4, 2)), jnp.ones((7, 5, 2, 2))).shape
    (7, 4, 3, 5)
    """
    *batch, target, heads, dim = query.shape
    source, kv_heads = key.shape[-3:-1]
    key = gathered(key, -3)
    options = without_none(
        precision=precision,
        preferred_element_type=preferred_element_type,
        _dot_general=dot_general,
    )
    if heads == kv_heads:
        return jnp.einsum("...qhd,...khd->...hqk", query, key, **options)
    check_shared_heads(query, key)
    query = query.reshape(*batch, target, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("...tkgd,...skd->...kgts", query, key, **options)
    return logits.reshape(*batch, heads, target, source)


def check_shared_heads(query: Array, key: Array) -> None:
    """Raises ArgumentShapeError unless the key heads divide the query heads."""
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if heads % kv_heads:
        raise ArgumentShapeError(
            f"{heads} heads of queries (shape {query.shape}) cannot share {kv_heads} heads of keys "
            f"(shape {key.shape}): the first must be a multiple of the second."
        )


def cap_logits(
    logits: Float[Array, "*shape"], cap: float
) -> Float[Array, "*shape"]:
    """Returns `cap * tanh(logits / cap)`, which stays within ±`cap` (Gemma Team, 2024).

    >>> cap_logits(jnp.array([0.0, 1e6]), 50.0).tolist()
    [0.0, 50.0]
    """
    # In float32: where bfloat16 rounds the tangent to 1, its derivative would be 0.
    return (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(
        logits.dtype
    )


def attention_probs(
    logits: Float[Array, "batch heads target source"],
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    *,
    logit_sink: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads target source"]:
    """Returns the softmax of `logits + bias` over the source, in float32.

    `logit_sink` is one logit per head that takes part in the sum but has no probability of its own,
    so that a head may attend to nothing (Xiao et al., 2024).

    >>> attention_probs(jnp.zeros((1, 1, 1, 3)), logit_sink=jnp.zeros(1)).ravel().tolist()
    [0.25, 0.25, 0.25]
    """
    logits = _add_bias(logits, bias)
    if logit_sink is None:
        return jax.nn.softmax(logits, axis=-1)
    weights, total = _weights_and_total(logits, logit_sink)
    return weights / total


# Traced once, as `jax.nn.softmax` is.
@functools.partial(jax.jit, inline=INLINE)
def _weights_and_total(
    logits: Float[Array, "*batch heads target source"],
    logit_sink: Float[Array, " heads"] | None,
) -> tuple[
    Float[Array, "*batch heads target source"],
    Float[Array, "*batch heads target 1"],
]:
    """Returns `exp(logit - largest)`, and its sum over the source and the sink."""
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    sink = None
    if logit_sink is not None:
        sink = to_ndim(
            logit_sink.astype(jnp.float32)[:, None, None], logits.ndim
        )
        largest = jnp.maximum(largest, sink)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    return weights, total


@functools.partial(jax.jit, inline=INLINE)
def _divided(
    context: Float[Array, "*batch target heads dim"],
    total: Float[Array, "*batch heads target 1"],
) -> Float[Array, "*batch target heads dim"]:
    return context / jnp.moveaxis(total, -3, -2)


def attention_context(
    probs: Float[Array, "*batch heads target source"],
    value: Float[Array, "*#batch source kv_heads dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    dot_general: Callable[..., Array] | None = None,
) -> Float[Array, "*batch target heads dim"]:
    """Returns the values averaged by the probabilities, by default in the dtype of the values.

    `precision`, `preferred_element_type` and `dot_general` are those of `attention_logits`.

    >>> attention_context(jnp.ones((7, 4, 3, 5)), jnp.ones((7, 5, 2, 6))).shape
    (7, 3, 4, 6)
    """
    *batch, heads, target, source = probs.shape
    kv_heads, dim = value.shape[-2:]
    value = gathered(value, -3)
    if probs.dtype != value.dtype:
        probs = probs.astype(value.dtype)
    options = without_none(
        precision=precision,
        preferred_element_type=preferred_element_type,
        _dot_general=dot_general,
    )
    if heads == kv_heads:
        return jnp.einsum("...hqk,...khd->...qhd", probs, value, **options)
    probs = probs.reshape(*batch, kv_heads, heads // kv_heads, target, source)
    context = jnp.einsum("...kgts,...skd->...tkgd", probs, value, **options)
    return context.reshape(*batch, target, heads, dim)


def sigmoid_attention_probs(
    logits: Float[Array, "batch heads target source"],
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
) -> Float[Array, "batch heads target source"]:
    """Returns the sigmoid of `logits + bias`, in float32 (Ramapuram et al., 2024).

    The probabilities of the keys are independent; they do not add up to 1.

    >>> sigmoid_attention_probs(jnp.zeros((1, 1, 1, 2))).ravel().tolist()
    [0.5, 0.5]
    """
    return jax.nn.sigmoid(_add_bias(logits, bias))


def _add_bias(logits: Array, bias: Array | None) -> Array:
    """Returns the sum in float32."""
    logits = logits.astype(jnp.float32)
    if bias is None:
        return logits
    return logits + to_ndim(bias.astype(jnp.float32), logits.ndim)


def per_dim_scale(
    x: Float[Array, "*batch dim"], param: Float[Array, " dim"]
) -> Float[Array, "*batch dim"]:
    """Scales each dimension by `softplus(param) / softplus(0)`: positive, and 1 where `param` is 0.

    >>> per_dim_scale(jnp.ones(2), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    scale = (jax.nn.softplus(param) / jax.nn.softplus(0.0)).astype(x.dtype)
    return x * to_ndim(scale, x.ndim)


def relative_to_absolute(
    x: Float[Array, "*batch length 2*length-1"],
) -> Float[Array, "*batch length length"]:
    """Converts an axis of relative positions into one of absolute positions.

    Entry `(i, k)` of `x` belongs to query `i` and the key at `i + k - (length - 1)`; entry `(i, j)`
    of the result to query `i` and key `j`.

    >>> relative_to_absolute(jnp.array([[-1, 0, 1], [-1, 0, 1]])).tolist()
    [[0, 1], [-1, 0]]
    """
    length, distances = x.shape[-2:]
    # Each row starts one entry further left than the row above: with one more entry per row, all
    # are evenly spaced in memory.
    batch_shape = x.shape[:-2]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    flat = padded.reshape(*batch_shape, length * (distances + 1))
    skewed = flat[..., : length * distances]
    skewed = skewed.reshape(*batch_shape, length, distances)
    return skewed[..., length - 1 :]


def xl_attention_logits(
    query: Float[Array, "batch length heads dim"],
    key: Float[Array, "batch length heads dim"],
    relative_positions: Float[Array, "2*length-1 heads dim"],
    u: Float[Array, "heads dim"],
    v: Float[Array, "heads dim"],
) -> Float[Array, "batch heads length length"]:
    """Returns logits of content and relative position (Dai et al., 2019, section 3.3).

    Args:
        relative_positions: projected embeddings of `query position - key position`, from
            `length - 1` down to `-(length - 1)`.
        u: added to the query for the product with keys.
        v: added to the query for the product with `relative_positions`.
    """
    u = to_ndim(u, query.ndim)
    v = to_ndim(v, query.ndim)
    content_logits = attention_logits(query + u, key)
    position_logits = attention_logits(query + v, relative_positions[None])
    return content_logits + relative_to_absolute(position_logits)


def attention_weights(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    float32_softmax: bool = False,
    precision: jax.lax.PrecisionLike = None,
    dot_general: Callable[..., Array] | None = None,
    einsum: Callable[..., Array] | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns `softmax(query · key / sqrt(dim) + bias)` over the source.

    Args:
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: where it is False or 0, a logit becomes the dtype's lowest number; same shape as
            `bias`. A fully masked query attends to all keys equally.
        float32_softmax: whether to compute and return the softmax in float32.
        precision: as in `jax.lax.dot_general`.
        dot_general: replaces `jax.lax.dot_general`.
        einsum: replaces both; called with subscripts, queries and keys.

    Raises ArgumentShapeError if bias or mask does not broadcast to the logits.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> attention_weights(x, x, mask=jnp.array([True, False, True]))[0, 0, 0].tolist()
    [0.5, 0.0, 0.5]
    """
    query = query / math.sqrt(query.shape[-1])
    if einsum is not None:
        logits = einsum("...qhd,...khd->...hqk", query, key)
    else:
        logits = attention_logits(
            query,
            key,
            precision=precision,
            preferred_element_type=None,
            dot_general=dot_general,
        )
    if bias is not None:
        check_broadcastable("bias", bias, logits.shape)
        logits = logits + to_ndim(bias, logits.ndim)
    if mask is not None:
        check_broadcastable("mask", mask, logits.shape)
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    if float32_softmax and logits.dtype != jnp.float32:
        logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1)


def drop_attention_weights(
    weights: Float[Array, "*batch heads target source"],
    *,
    rate: float,
    prng_key: Key[Array, ""] | None,
    broadcast: bool = True,
) -> Float[Array, "*batch heads target source"]:
    """Zeros weights with probability `rate`, and scales up the others.

    Args:
        rate: in `[0, 1]`.
        broadcast: whether all examples and heads share one mask.

    Raises ArgumentValueError if `prng_key` is missing, or `rate` is not in `[0, 1]`.

    >>> drop_attention_weights(jnp.ones((1, 1)), rate=1.0, prng_key=jax.random.key(0)).tolist()
    [[0.0]]
    """
    if prng_key is None:
        raise ArgumentValueError(
            f"dropout_rate={rate} without dropout_rng: give a key, or deterministic=True."
        )
    if rate == 1.0:
        return jnp.zeros_like(weights)
    broadcast_axes = range(weights.ndim - 2) if broadcast else ()
    mask = keep_mask(prng_key, rate, weights.shape, broadcast_axes)
    return dropout(weights, rate=rate, mask=mask)


def check_attention_shapes(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    shared_heads: bool = False,
) -> None:
    """Checks that the shapes of queries, keys and values match.

    Args:
        query: shape `(*batch, target, heads, dim)`.
        key: shape `(*batch, source, heads, dim)`.
        value: shape `(*batch, source, heads, value_dim)`, or None.
        shared_heads: whether keys and values may have fewer heads than queries.

    Raises ArgumentShapeError if the shapes do not match.
    """
    shapes = {"query": query.shape, "key": key.shape}
    if value is not None:
        shapes["value"] = value.shape
        fits = key.shape[:-1] == value.shape[:-1]
        _check_heads(
            shapes, fits, "agree between key and value in all axes but the last"
        )
    fits = query.shape[:-3] == key.shape[:-3]
    _check_heads(shapes, fits, "agree in the axes before the last three")
    if shared_heads:
        _check_heads(
            shapes,
            query.shape[-1] == key.shape[-1],
            "agree in features, the last axis",
        )
    else:
        fits = query.shape[-2:] == key.shape[-2:]
        _check_heads(shapes, fits, "agree in heads and features, the last two")


def _check_heads(
    shapes: dict[str, tuple[int, ...]], fits: bool, expected: str
) -> None:
    if not fits or any(len(shape) < 3 for shape in shapes.values()):
        raise ArgumentShapeError(
            f"the shapes are {shapes}; expected (*batch, length, heads, features), and that they "
            f"{expected}."
        )


def check_broadcastable(
    name: str, x: Array, logits_shape: tuple[int, ...]
) -> None:
    """Raises ArgumentShapeError unless a bias or mask broadcasts to the logits."""
    shape = jnp.shape(x)
    if shape == logits_shape:
        return
    broadcasts = len(shape) <= len(logits_shape)
    for size, logits_size in zip(
        reversed(shape), reversed(logits_shape), strict=False
    ):
        broadcasts = broadcasts and size in (1, logits_size)
    if not broadcasts:
        raise ArgumentShapeError(
            f"{name} has shape {shape}, which does not broadcast to that of the logits, "
            f"{logits_shape}."
        )


def attention_without_weights(
    implementation: AttentionImplementation | None,
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source kv_heads dim"],
    value: Float[Array, "*batch source kv_heads value_dim"],
    *,
    bias: Float[Array, "..."] | None,
    mask: AttentionMask,
    dropout_rate: float,
    dropout_rng: Key[Array, ""] | None,
    broadcast_dropout: bool,
    precision: jax.lax.PrecisionLike,
    only_plain: Mapping[str, bool],
) -> Float[Array, "*batch target heads value_dim"] | None:
    """Returns attention, or None if its weights must be computed.

    For the plain implementation they must be in dtypes other than float32, to which they are
    rounded, and where a library replaces the products, to which they would be other operands.

    Args:
        only_plain: by its description, whether something is asked for that only weights allow.

    Raises:
        ArgumentShapeError: if bias or mask does not broadcast to the logits.
        ArgumentValueError: if dropout has no key, or the implementation cannot compute it.
    """
    key = gathered(key, -3)
    value = gathered(value, -3)
    reasons = [
        description for description, is_so in only_plain.items() if is_so
    ]
    if dropout_rate == 1.0:
        reasons.append(f"dropout_rate={dropout_rate} drops all")
    reason = reasons[0] if reasons else None
    *batch, target, heads, _ = query.shape
    source = key.shape[-3]
    plain = is_plain(implementation, target * source, reason)
    needs_weights = (
        reason is not None
        or query.dtype != jnp.float32
        or products_are_replaced()
    )
    if plain and needs_weights:
        return None
    logits_shape = (*batch, heads, target, source)
    if bias is not None:
        check_broadcastable("bias", bias, logits_shape)
    for mask_array in mask.arrays:
        check_broadcastable("mask", mask_array, logits_shape)
    options: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "masked_gradient": False,  # as in `attention_weights`
        "precision": precision,
    }
    if not plain:
        return fused_attention(
            implementation,
            query,
            key,
            value,
            dropout_rate=dropout_rate,
            dropout_key=dropout_rng,
            broadcast_dropout=broadcast_dropout,
            **options,
        )
    drop = None
    if dropout_rate:
        drop = functools.partial(
            drop_attention_weights,
            rate=dropout_rate,
            prng_key=dropout_rng,
            broadcast=broadcast_dropout,
        )
    query = query / math.sqrt(query.shape[-1])
    return plain_attention(query, key, value, scale=1.0, drop=drop, **options)


def head_features(features: int, num_heads: int, layer: str) -> int:
    """Returns the features of each head; raises ArgumentValueError if heads do not divide them."""
    if features % num_heads:
        raise ArgumentValueError(
            f"{layer} has {features} features for queries, keys and values, not divisible by "
            f"num_heads={num_heads}; give qkv_features, a multiple of it."
        )
    return features // num_heads


def key_and_value_inputs(
    query: Array, key: Array | None, value: Array | None, layer: str
) -> tuple[Array, Array]:
    """Returns the inputs of keys and values; raises ArgumentValueError for values without keys."""
    if key is None:
        if value is not None:
            raise ArgumentValueError(
                f"{layer} was given inputs_v without inputs_k; give inputs_k, which serves as both "
                "if inputs_v is left out."
            )
        key = query
    if value is None:
        value = key
    return key, value


def check_accepts_implementation(
    implementation: str | None, accepted: Collection[str], layer: str
) -> None:
    """Raises ArgumentValueError if a layer's `attention_fn` lacks an option that is set."""
    if implementation is not None and "implementation" not in accepted:
        raise ArgumentValueError(
            f"{layer} has implementation={implementation!r}, and its attention_fn accepts no "
            "`implementation`; leave out one of them."
        )


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

    Args:
        index: number of positions so far, fewer than the cache has. If it is known only when a
            compiled program runs and the cache is full, the last value becomes NaN, and so does
            attention to it.

    Raises:
        ArgumentShapeError: if there is not exactly one new position, or the cache has another
            shape.
        ArgumentValueError: if the cache is known to be full.

    >>> empty, x = jnp.zeros((1, 3, 1, 1)), jnp.ones((1, 1, 1, 1))
    >>> keys, values, seen = attention_cache_step(empty, empty, 1, x, x, x)
    >>> keys.ravel().tolist(), seen.ravel().tolist()
    ([0.0, 1.0, 0.0], [True, True, False])
    """
    *batch, length, heads, features = cached_key.shape
    expected = (*batch, 1, heads, features)
    if (
        key.shape != expected
        or query.shape[:-2] != expected[:-2]
        or value.shape != expected
    ):
        raise ArgumentShapeError(
            f"{layer} decodes with queries of shape {query.shape}, keys of shape {key.shape} and "
            f"values of shape {value.shape}, and its cache expects {expected}: give one position "
            "at a time, and the batch that the cache was made with."
        )
    if isinstance(index, jax.core.Tracer):
        value = jnp.where(index < length, value, jnp.nan)
    elif int(index) >= length:
        raise ArgumentValueError(
            f"{layer} decodes position {int(index)}, counted from 0, and its cache has room for "
            f"{length} positions; make a longer cache, or begin again with an empty one."
        )
    axis = len(batch)
    key = key.astype(cached_key.dtype)
    keys = jax.lax.dynamic_update_slice_in_dim(cached_key, key, index, axis)
    value = value.astype(cached_value.dtype)
    values = jax.lax.dynamic_update_slice_in_dim(
        cached_value, value, index, axis
    )
    is_filled = jnp.arange(length) <= index
    return keys, values, jnp.broadcast_to(is_filled, (*batch, 1, 1, length))
