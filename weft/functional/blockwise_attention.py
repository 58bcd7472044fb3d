"""Attention in blocks of queries and keys, without an array of all pairs.

For each block of queries, a loop over blocks of keys keeps the largest logit so far, the sum of
`exp(logit - largest)` and the sum of values with these weights; a larger logit scales both sums
down (Rabe & Staats, 2021, https://arxiv.org/abs/2112.05682):

    m' = max(m, max_j s_j)     a = exp(m - m')     p_j = exp(s_j - m')
    l' = a l + sum_j p_j       o' = a o + sum_j p_j v_j       output: o / l

The backward pass computes each block's weights again from `m` and `l` (Dao et al., 2022,
https://arxiv.org/abs/2205.14135), with `dp = dout · v` and `ds = p (dp - dout · out)`.

The loop skips keys that the mask excludes for the whole block of queries, by the smallest and
largest position and segment id of each block. A query without any key attends to all keys equally,
as in `dot_product_attention`, so that its block skips nothing.

If the block does not divide a length, the last block starts earlier, and the one before leaves out
what they share.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from weft.errors import ArgumentValueError
from weft.functional import attention_mask, embedding
from weft.functional.arrays import to_ndim
from weft.functional.dropout import dropout, keep_mask

# Logits of a block, over batch and heads. More do not fit into the cache of a core; with fewer, the
# loop itself takes a noticeable part of the time.
_BLOCK_LOGITS = 2**19
_LOWEST = float(np.finfo(np.float32).min)


class _Blocks(NamedTuple):
    """Division of a length into blocks of one size; the last two may overlap."""

    length: int
    size: int

    @property
    def number(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: Any) -> Any:
        return jnp.minimum(i * self.size, self.length - self.size)

    def new(self, i: Any) -> Array | None:
        """Returns which positions of a block are not in the next one; None for all."""
        if self.length % self.size == 0:
            return None
        end = jnp.where(i + 1 < self.number, self.start(i + 1), self.length)
        return self.start(i) + jnp.arange(self.size) < end

    def take(self, x: Array, i: Any, axis: int) -> Array:
        """Returns a block of an array, or all of an axis of size 1."""
        if x.shape[axis] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start(i), self.size, axis)

    def add(self, x: Array, i: Any, axis: int, block: Array) -> Array:
        """Adds to a block of an array."""
        return self.put(x, i, axis, self.take(x, i, axis) + block)

    def put(self, x: Array, i: Any, axis: int, block: Array) -> Array:
        """Sets a block of an array, or all of an axis of size 1."""
        if x.shape[axis] == 1:
            return block
        return jax.lax.dynamic_update_slice_in_dim(x, block, self.start(i), axis)

    def bounds(self, x: Array | None) -> tuple[Any, Any]:
        """Returns the smallest and largest value in each block; None means positions."""
        start = np.minimum(np.arange(self.number) * self.size, self.length - self.size)
        if x is None:
            return start, start + self.size - 1
        index = start[:, None] + np.arange(self.size)
        blocks = jnp.take(jnp.atleast_2d(x), index, axis=-1, mode="clip")
        return blocks.min((0, 2)), blocks.max((0, 2))


class _Options(NamedTuple):
    """Options of a call, known when it is traced."""

    mask_fn: attention_mask.MaskFn | None
    scale: float
    logit_cap: float | None
    dropout_rate: float
    broadcast_dropout: bool
    masked_gradient: bool
    precision: Any
    queries: _Blocks
    keys: _Blocks
    never_empty: bool  # whether it is known that each query has a key


class _Arrays(NamedTuple):
    """Arrays with gradients, whose heads have the axes `(kv_heads, group)`."""

    query: Array  # (batch, kv_heads, group, target, dim)
    key: Array  # (batch, kv_heads, source, dim)
    value: Array  # (batch, kv_heads, source, value_dim)
    bias: Array | None  # (#batch, #kv_heads, #group, #target, #source)
    sink: Array | None  # (1, kv_heads, group, 1)
    slopes: Array | None  # (heads,)


class _Given(NamedTuple):
    """Arrays without gradients."""

    mask: attention_mask.AttentionMask
    dropout_key: Array | None


def blockwise_attention(
    query: Float[Array, "batch target heads dim"],
    key: Float[Array, "batch source kv_heads dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    *,
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    mask: attention_mask.AttentionMask = attention_mask.AttentionMask(),  # noqa: B008 - immutable
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    broadcast_dropout: bool = False,
    masked_gradient: bool = True,
    precision: jax.lax.PrecisionLike = None,
    block_size: int | None = None,
) -> Float[Array, "batch target heads value_dim"]:
    """Returns attention as `dot_product_attention` does, in memory linear in the lengths.

    It has a gradient, but no forward-mode derivative.

    Args:
        broadcast_dropout: whether all examples and heads share one dropout mask.
        masked_gradient: whether the logits of masked keys have a gradient. It is not 0 for queries
            without any key.
        block_size: number of queries and of keys in a block; by default 128 to 512, fewer for a
            larger batch and more heads.

    Raises:
        ArgumentValueError: if dropout has no key, or in forward-mode differentiation.

    >>> x = jnp.ones((1, 5, 2, 4))
    >>> blockwise_attention(x, x, x, block_size=2).shape
    (1, 5, 2, 4)
    """
    if dropout_rate and dropout_key is None:
        raise ArgumentValueError(f"dropout_rate={dropout_rate} without dropout_key: give a key.")
    batch, target, heads, dim = query.shape
    source, kv_heads = key.shape[1:3]
    if block_size is None:
        of_one = int(2 ** round(math.log2(_BLOCK_LOGITS / (batch * heads)) / 2))
        block_size = min(max(of_one, 128), 512)
    options = _Options(
        mask.mask_fn,
        dim**-0.5 if scale is None else scale,
        logit_cap,
        dropout_rate,
        broadcast_dropout,
        masked_gradient,
        precision,
        _Blocks(target, min(block_size, target)),
        _Blocks(source, min(block_size, source)),
        bias is None and _attends_to_itself(mask, target == source),
    )
    if mask.query_segments is not None and mask.key_segments is None:
        mask = mask.replace(key_segments=mask.query_segments)
    mask = mask.replace(arrays=tuple(_with_groups(to_ndim(x, 4), kv_heads) for x in mask.arrays))
    arrays = _Arrays(
        _with_groups(jnp.moveaxis(query, 1, 2), kv_heads),
        jnp.moveaxis(key, 1, 2),
        jnp.moveaxis(value, 1, 2),
        None if bias is None else _with_groups(to_ndim(bias, 4), kv_heads),
        None if logit_sink is None else logit_sink.reshape(1, kv_heads, heads // kv_heads, 1),
        alibi_slopes,
    )
    try:
        out: Any = _attend(options, arrays, _Given(mask, dropout_key))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise ArgumentValueError(
            "blockwise attention has no forward-mode derivative (jax.jvp, jax.jacfwd): "
            'use dot_product_attention(..., implementation="plain"), or that field of the layer.'
        ) from error
    return jnp.moveaxis(out.reshape(batch, heads, target, value.shape[-1]), 2, 1)


def _attends_to_itself(mask: attention_mask.AttentionMask, same_length: bool) -> bool:
    """Returns whether the mask lets each query attend to the key at its own place."""
    window, exact = attention_mask.window_of(mask.mask_fn)
    inside = all(n is None or n >= 0 for n in (window.left_context, window.right_context))
    same = mask.query_positions is mask.key_positions and same_length
    one_segment = mask.key_segments is None or mask.key_segments is mask.query_segments
    return exact and inside and same and one_segment and not mask.arrays


def _with_groups(x: Any, kv_heads: int) -> Array:
    """Splits the second axis, of all query heads, by the key heads that they share."""
    batch, heads, *rest = x.shape
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return x.reshape(batch, *groups, *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, arrays: _Arrays, given: _Given) -> Array:
    return _forward(options, arrays, given)[0]


def _forward(options: _Options, arrays: _Arrays, given: _Given) -> tuple[Array, Any]:
    queries, keys, sink = options.queries, options.keys, arrays.sink
    value_dim = arrays.value.shape[-1]
    first, needed = _needed_keys(options, given)

    def of_queries(carry: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], None]:
        query = queries.take(arrays.query, i, 3)

        def unfinished(state: Any) -> Array:
            n, largest, *_ = state
            if options.never_empty or not _skips(options, given):
                return n < needed[i]
            empty = jnp.any(largest <= attention_mask.NEG_INF / 2)
            return (n < needed[i]) | (empty & (n < keys.number))

        def of_keys(state: Any) -> Any:
            n, largest, total, context = state
            j = (first[i] + n) % keys.number
            logits, _, _ = _logits(options, arrays, given, query, i, j)
            new_largest = jnp.maximum(largest, logits.max(-1))
            weights = jnp.exp(logits - new_largest[..., None])
            shrink = jnp.exp(largest - new_largest)
            total = total * shrink + weights.sum(-1)
            weights = _dropped(options, given, weights, i, j)
            value = keys.take(arrays.value, j, 2)
            context = context * shrink[..., None] + _product(
                options, "bkgts,bksd->bkgtd", weights.astype(value.dtype), value
            )
            return n + 1, new_largest, total, context

        zeros = _zeros_like(query[..., 0])
        empty = zeros + _LOWEST, zeros, jnp.repeat(zeros[..., None], value_dim, -1)
        _, largest, total, context = jax.lax.while_loop(unfinished, of_keys, (jnp.int32(0), *empty))
        if sink is not None:
            new_largest = jnp.maximum(largest, sink)
            shrink = jnp.exp(largest - new_largest)
            total = total * shrink + jnp.exp(sink - new_largest)
            largest, context = new_largest, context * shrink[..., None]
        context = (context / total[..., None]).astype(arrays.value.dtype)
        new = (context, largest, 1 / total)
        return tuple(queries.put(x, i, 3, b) for x, b in zip(carry, new, strict=True)), None

    zeros = _zeros_like(arrays.query[..., 0])
    out = jnp.repeat(zeros[..., None], value_dim, -1).astype(arrays.value.dtype)
    carry: tuple[Array, ...] = (out, zeros, zeros)
    (out, largest, share), _ = jax.lax.scan(of_queries, carry, jnp.arange(queries.number))
    return out, (arrays, given, out, largest, share)


def _backward(options: _Options, saved: Any, dout: Array) -> tuple[_Arrays, None]:
    arrays, given, out, largest, share = saved
    queries, keys = options.queries, options.keys
    first, needed = _needed_keys(options, given)
    delta = jnp.sum(dout.astype(jnp.float32) * out, -1)
    if not options.never_empty and _skips(options, given):
        smallest, _ = queries.bounds(largest.min((0, 1, 2)))
        needed = jnp.where(smallest <= attention_mask.NEG_INF / 2, keys.number, needed)

    def of_queries(carry: _Arrays, i: Array):
        query, d, peak, part, of_out = (
            queries.take(x, i, 3) for x in (arrays.query, dout, largest, share, delta)
        )
        new = queries.new(i)
        if new is not None:
            part = jnp.where(to_ndim(new, 4), part, 0)

        def of_keys(n: Array, grads: _Arrays) -> _Arrays:
            j = (first[i] + n) % keys.number
            key, value = (keys.take(x, j, 2) for x in (arrays.key, arrays.value))
            logits, slope, allowed = _logits(options, arrays, given, query, i, j)
            weights = jnp.exp(logits - peak[..., None]) * part[..., None]
            dropped = _dropped(options, given, weights, i, j).astype(d.dtype)
            dvalue = _product(options, "bkgts,bkgtd->bksd", dropped, d)
            dweights = _product(options, "bkgtd,bksd->bkgts", d, value)
            dweights = _dropped(options, given, dweights, i, j)
            dlogits = weights * (dweights - of_out[..., None])
            if not options.masked_gradient and allowed is not None:
                dlogits = jnp.where(allowed, dlogits, 0)
            dbias, dslopes = grads.bias, grads.slopes
            if dbias is not None:
                dbias = _add_block(options, dbias, dlogits, i, j)
            if dslopes is not None:
                distance = _alibi(options, given, jnp.ones(1), i, j)
                dslopes += jnp.sum(dlogits * distance[:, :, None], (0, 3, 4)).ravel()
            dproducts = (dlogits * slope).astype(query.dtype)
            dquery = _product(options, "bkgts,bksd->bkgtd", dproducts, key)
            dkey = _product(options, "bkgts,bkgtd->bksd", dproducts, query)
            return _Arrays(
                grads.query + dquery,
                keys.add(grads.key, j, 2, dkey),
                keys.add(grads.value, j, 2, dvalue),
                dbias,
                None,
                dslopes,
            )

        zeros = carry._replace(query=_zeros_like(query))
        grads = jax.lax.fori_loop(0, needed[i], of_keys, zeros)
        return grads._replace(query=queries.add(carry.query, i, 3, grads.query)), None

    zeros = jax.tree.map(_zeros_like, arrays._replace(sink=None))
    grads, _ = jax.lax.scan(of_queries, zeros, jnp.arange(queries.number))
    if arrays.sink is not None:
        lost = jnp.exp(arrays.sink - largest) * share * delta
        grads = grads._replace(sink=-jnp.sum(lost, (0, 3))[None, ..., None])
    return jax.tree.map(lambda x, grad: grad.astype(x.dtype), arrays, grads), None


_attend.defvjp(_forward, _backward)


def _zeros_like(x: Array) -> Array:
    """Returns the start of a sum, on the devices and with the sharding of its terms."""
    return jnp.zeros_like(x, jnp.float32)


def _skips(options: _Options, given: _Given) -> bool:
    """Returns whether the mask can exclude whole blocks."""
    window, _ = attention_mask.window_of(options.mask_fn)
    return window != attention_mask.Window() or given.mask.query_segments is not None


def _needed_keys(options: _Options, given: _Given) -> tuple[Array, Array]:
    """Returns, for each block of queries, the first block of keys to visit and how many follow."""
    queries, keys, mask = options.queries, options.keys, given.mask
    window, _ = attention_mask.window_of(options.mask_fn)
    needed = np.ones((queries.number, keys.number), bool)

    def compared(of_queries: Array | None, of_keys: Array | None) -> list[Any]:
        low, high = (x[:, None] for x in queries.bounds(of_queries))
        return [low, high, *(x[None] for x in keys.bounds(of_keys))]

    low, high, key_low, key_high = compared(mask.query_positions, mask.key_positions)
    if window.left_context is not None:
        needed &= low - key_high <= window.left_context
    if window.right_context is not None:
        needed &= key_low - high <= window.right_context
    if mask.query_segments is not None:
        low, high, key_low, key_high = compared(mask.query_segments, mask.key_segments)
        needed &= (low <= key_high) & (key_low <= high)
    needed = jnp.asarray(needed)
    first = jnp.argmax(needed, 1)
    past = keys.number - jnp.argmax(needed[:, ::-1], 1)
    return first, jnp.where(needed.any(1), past - first, 0)


def _logits(
    options: _Options, arrays: _Arrays, given: _Given, query: Array, i: Array, j: Array
) -> tuple[Array, Any, Array | None]:
    """Returns the logits of a block, their derivative by the products, and the mask, if any."""
    queries, keys, cap = options.queries, options.keys, options.logit_cap
    key = keys.take(arrays.key, j, 2)
    logits = _product(options, "bkgtd,bksd->bkgts", query, key) * options.scale
    slope: Any = options.scale
    if cap is not None:
        squashed = jnp.tanh(logits / cap)
        logits, slope = cap * squashed, slope * (1 - squashed**2)
    kv_heads = key.shape[1]
    if arrays.bias is not None:
        logits += keys.take(queries.take(arrays.bias, i, 3), j, 4).astype(jnp.float32)
    if arrays.slopes is not None:
        logits += _with_groups(_alibi(options, given, arrays.slopes, i, j), kv_heads)
    masks: list[Array] = []
    if options.mask_fn is not None:
        positions = _positions(options, given, i, j)
        masks.append(
            _with_groups(attention_mask.evaluate_mask(options.mask_fn, *positions), kv_heads)
        )
    if given.mask.query_segments is not None:
        segments = (
            blocks.take(jnp.atleast_2d(x), at, 1)
            for blocks, x, at in (
                (queries, given.mask.query_segments, i),
                (keys, given.mask.key_segments, j),
            )
        )
        masks.append(_with_groups(attention_mask.segment_mask(*segments), kv_heads))
    masks += (keys.take(queries.take(x, i, 3), j, 4) for x in given.mask.arrays)
    allowed = functools.reduce(jnp.logical_and, masks) if masks else None
    if allowed is not None:
        logits = jnp.where(allowed, logits, logits + attention_mask.NEG_INF)
    new = keys.new(j)
    if new is not None:
        logits = jnp.where(to_ndim(new, 5), logits, -jnp.inf)
    return logits, slope, allowed


def _add_block(options: _Options, dbias: Array, dlogits: Array, i: Array, j: Array) -> Array:
    """Adds a block's gradient to that of the bias, summed over the axes that the bias lacks."""
    queries, keys = options.queries, options.keys
    row = queries.take(dbias, i, 3)
    axes = [axis for axis, size in enumerate(dbias.shape) if size == 1]
    row = keys.add(row, j, 4, jnp.sum(dlogits, axes, keepdims=True))
    return queries.put(dbias, i, 3, row)


def _positions(options: _Options, given: _Given, i: Array, j: Array) -> list[Array]:
    """Returns the positions of a block's queries and keys, each with an axis for the batch."""
    mask = given.mask
    return [
        blocks.start(at) + jnp.arange(blocks.size)[None]
        if x is None
        else blocks.take(jnp.atleast_2d(x), at, 1)
        for blocks, x, at in (
            (options.queries, mask.query_positions, i),
            (options.keys, mask.key_positions, j),
        )
    ]


def _alibi(options: _Options, given: _Given, slopes: Array, i: Array, j: Array) -> Array:
    return embedding.alibi_bias(slopes, *_positions(options, given, i, j))


def _dropped(options: _Options, given: _Given, x: Array, i: Array, j: Array) -> Array:
    """Applies the block's dropout mask, the same in the forward and the backward pass."""
    if not options.dropout_rate:
        return x
    assert given.dropout_key is not None
    key = jax.random.fold_in(jax.random.fold_in(given.dropout_key, i), j)
    shared = (0, 1, 2) if options.broadcast_dropout else ()
    keep = keep_mask(key, options.dropout_rate, x.shape, shared)
    return dropout(x, rate=options.dropout_rate, mask=keep)


def _product(options: _Options, subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(
        subscripts, x, y, precision=options.precision, preferred_element_type=jnp.float32
    )
