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

import contextlib
import functools
import math
from collections.abc import Iterator
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


class Blocks(NamedTuple):
    """Division of a length into blocks of one size; the last two may overlap."""

    length: int
    size: int

    @property
    def number(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: Array) -> Array:
        return jnp.minimum(i * self.size, self.length - self.size)

    def only_here(self, i: Array) -> Array | None:
        """Returns which positions of a block are not in the next one; None for all."""
        if self.length % self.size == 0:
            return None
        next_start = jnp.where(
            i + 1 < self.number, self.start(i + 1), self.length
        )
        return self.start(i) + jnp.arange(self.size) < next_start

    def take(self, x: Array, i: Array, axis: int) -> Array:
        """Returns a block of an array, or all of an axis of size 1."""
        if x.shape[axis] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start(i), self.size, axis)

    def add(self, x: Array, i: Array, axis: int, block: Array) -> Array:
        """Adds to a block of an array."""
        return self.put(x, i, axis, self.take(x, i, axis) + block)

    def put(self, x: Array, i: Array, axis: int, block: Array) -> Array:
        """Sets a block of an array, or all of an axis of size 1."""
        if x.shape[axis] == 1:
            return block
        return jax.lax.dynamic_update_slice_in_dim(
            x, block, self.start(i), axis
        )

    def positions(self, ids: Array | None, i: Array) -> Array:
        """Returns a block of positions, with an axis for the batch; None means 0, 1, ..."""
        if ids is None:
            return self.start(i) + jnp.arange(self.size)[None]
        return self.take(jnp.atleast_2d(ids), i, 1)

    def bounds(
        self, ids: Array | None
    ) -> tuple[Array | np.ndarray, Array | np.ndarray]:
        """Returns the smallest and largest id in each block; None means positions."""
        start = np.minimum(
            np.arange(self.number) * self.size, self.length - self.size
        )
        if ids is None:
            return start, start + self.size - 1
        index = start[:, None] + np.arange(self.size)
        blocks = jnp.take(
            jnp.atleast_2d(ids), index, axis=-1, mode="clip"
        )  # (batch, block, size)
        return blocks.min((0, 2)), blocks.max((0, 2))


class Options(NamedTuple):
    """Options of a call, known when it is traced."""

    scale: float
    logit_cap: float | None
    dropout_rate: float
    broadcast_dropout: bool
    masked_gradient: bool
    precision: jax.lax.PrecisionLike
    queries: Blocks
    keys: Blocks
    never_empty: bool  # whether it is known that each query has a key


class Arrays(NamedTuple):
    """Arrays with gradients, whose heads have the axes `(kv_heads, group)`."""

    query: Array  # (batch, kv_heads, group, target, dim)
    key: Array  # (batch, kv_heads, source, dim)
    value: Array  # (batch, kv_heads, source, value_dim)
    bias: Array | None  # (#batch, #kv_heads, #group, #target, #source)
    sink: Array | None  # (1, kv_heads, group, 1)
    slopes: Array | None  # (heads,)


class Constants(NamedTuple):
    """Arrays without gradients."""

    mask: attention_mask.AttentionMask
    dropout_key: Array | None


class Softmax(NamedTuple):
    """A block of queries after some blocks of keys: `m`, `l` and `o` of the recurrence."""

    largest: Array  # (batch, kv_heads, group, target)
    total: Array  # (batch, kv_heads, group, target)
    context: Array  # (batch, kv_heads, group, target, value_dim)


class Output(NamedTuple):
    """The output, and what the backward pass computes weights from."""

    out: Array  # (batch, kv_heads, group, target, value_dim)
    largest: Array  # (batch, kv_heads, group, target)
    inverse_total: Array  # (batch, kv_heads, group, target)


class _Logits(NamedTuple):
    values: Array  # (batch, kv_heads, group, target, source)
    slope: (
        Array | float
    )  # the derivative of the values by the products of queries and keys
    allowed: Array | None  # the mask, broadcastable to the values


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
    options, arrays, constants = prepare(
        query, key, value,
        bias=bias,
        alibi_slopes=alibi_slopes,
        mask=mask,
        scale=scale,
        logit_cap=logit_cap,
        logit_sink=logit_sink,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        masked_gradient=masked_gradient,
        precision=precision,
        block_size=block_size,
    )  # fmt: skip
    with naming_forward_mode():
        out: Any = _attend(options, arrays, constants)
    return with_all_heads(out)


def prepare(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: attention_mask.AttentionMask,
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    masked_gradient: bool = True,
    precision: jax.lax.PrecisionLike = None,
    block_size: int | None = None,
) -> tuple[Options, Arrays, Constants]:
    """Returns the arguments of `blockwise_attention` in the form that its two passes use.

    Raises:
        ArgumentValueError: if dropout has no key.
    """
    if dropout_rate and dropout_key is None:
        raise ArgumentValueError(
            f"dropout_rate={dropout_rate} without dropout_key: give a key."
        )
    batch, target, heads, dim = query.shape
    source, kv_heads = key.shape[1:3]
    if block_size is None:
        block_size = default_block_size(batch, heads)
    options = Options(
        scale=dim**-0.5 if scale is None else scale,
        logit_cap=logit_cap,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        masked_gradient=masked_gradient,
        precision=precision,
        queries=Blocks(target, min(block_size, target)),
        keys=Blocks(source, min(block_size, source)),
        never_empty=bias is None and attends_to_itself(mask, target == source),
    )
    if mask.query_segments is not None and mask.key_segments is None:
        mask = mask.replace(key_segments=mask.query_segments)
    mask_arrays = [_with_groups(to_ndim(x, 4), kv_heads) for x in mask.arrays]
    mask = mask.replace(arrays=tuple(mask_arrays))
    if bias is not None:
        bias = _with_groups(to_ndim(bias, 4), kv_heads)
    if logit_sink is not None:
        logit_sink = logit_sink.reshape(1, kv_heads, heads // kv_heads, 1)
    arrays = Arrays(
        query=_with_groups(jnp.moveaxis(query, 1, 2), kv_heads),
        key=jnp.moveaxis(key, 1, 2),
        value=jnp.moveaxis(value, 1, 2),
        bias=bias,
        sink=logit_sink,
        slopes=alibi_slopes,
    )
    return options, arrays, Constants(mask, dropout_key)


def default_block_size(batch: int, heads: int) -> int:
    """Returns a power of two, whose square is about the number of logits per example and head."""
    exponent = round(math.log2(_BLOCK_LOGITS / (batch * heads)) / 2)
    return min(max(int(2**exponent), 128), 512)


def with_all_heads(out: Array) -> Array:
    """Returns the output of groups of heads as `(batch, target, heads, value_dim)`."""
    batch, kv_heads, group, target, value_dim = out.shape
    out = out.reshape(batch, kv_heads * group, target, value_dim)
    return jnp.moveaxis(out, 2, 1)


@contextlib.contextmanager
def naming_forward_mode() -> Iterator[None]:
    """Says of JAX's error in forward-mode differentiation what to use instead."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise ArgumentValueError(
            "blockwise attention has no forward-mode derivative (jax.jvp, jax.jacfwd): "
            'use dot_product_attention(..., implementation="plain"), or that field of the layer.'
        ) from error


def attends_to_itself(
    mask: attention_mask.AttentionMask, same_length: bool
) -> bool:
    """Returns whether the mask lets each query attend to the key at its own place."""
    window, is_exact = attention_mask.window_of(mask.mask_fn)
    if not is_exact or mask.arrays:
        return False
    for context in (window.left_context, window.right_context):
        if context is not None and context < 0:
            return False
    if mask.query_positions is not mask.key_positions or not same_length:
        return False
    return mask.key_segments is None or mask.key_segments is mask.query_segments


def _with_groups(x: Array, kv_heads: int) -> Array:
    """Splits the second axis, of all query heads, by the key heads that they share."""
    batch, heads, *other_sizes = x.shape
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return x.reshape(batch, *groups, *other_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, arrays: Arrays, constants: Constants) -> Array:
    out, _ = _forward(options, arrays, constants)
    return out


Residuals = tuple[Arrays, Constants, Output]


def _forward(
    options: Options, arrays: Arrays, constants: Constants
) -> tuple[Array, Residuals]:
    queries = options.queries
    needed_keys = _needed_keys(queries, options.keys, constants.mask)

    def visit_queries(output: Output, i: Array) -> tuple[Output, None]:
        query = queries.take(arrays.query, i, 3)
        softmax = _visit_keys(
            options,
            arrays,
            constants,
            i,
            needed_keys,
            empty_softmax(query, arrays.value),
        )
        block = output_of(softmax, arrays)
        output = Output(
            queries.put(output.out, i, 3, block.out),
            queries.put(output.largest, i, 3, block.largest),
            queries.put(output.inverse_total, i, 3, block.inverse_total),
        )
        return output, None

    zeros = zeros_like(arrays.query[..., 0])
    value_dim = arrays.value.shape[-1]
    out = jnp.repeat(zeros[..., None], value_dim, -1).astype(arrays.value.dtype)
    output = Output(out, zeros, zeros)
    output, _ = jax.lax.scan(visit_queries, output, jnp.arange(queries.number))
    return output.out, (arrays, constants, output)


def empty_softmax(query: Array, value: Array) -> Softmax:
    """Returns the softmax of queries, in groups of heads, before they see any key."""
    zeros = zeros_like(query[..., 0])
    context = jnp.repeat(zeros[..., None], value.shape[-1], -1)
    return Softmax(zeros + _LOWEST, zeros, context)


def accumulate(
    options: Options, arrays: Arrays, constants: Constants, softmax: Softmax
) -> Softmax:
    """Returns the softmax of all queries after some more keys, whose values are in `arrays`."""
    queries = options.queries
    needed_keys = _needed_keys(queries, options.keys, constants.mask)

    def visit_queries(result: Softmax, i: Array) -> tuple[Softmax, None]:
        # From the state before this call: where the last two blocks of queries overlap, the last
        # one computes again what they share.
        block = Softmax(*(queries.take(x, i, 3) for x in softmax))
        block = _visit_keys(options, arrays, constants, i, needed_keys, block)
        parts = zip(result, block, strict=True)
        return Softmax(*(queries.put(x, i, 3, y) for x, y in parts)), None

    softmax, _ = jax.lax.scan(
        visit_queries, softmax, jnp.arange(queries.number)
    )
    return softmax


def output_of(softmax: Softmax, arrays: Arrays) -> Output:
    """Returns the output of queries that have seen all keys."""
    largest, total, context = softmax
    if arrays.sink is not None:
        # One more logit, without a value.
        largest = jnp.maximum(softmax.largest, arrays.sink)
        shrink = jnp.exp(softmax.largest - largest)
        total = total * shrink + jnp.exp(arrays.sink - largest)
        context = context * shrink[..., None]
    out = (context / total[..., None]).astype(arrays.value.dtype)
    return Output(out, largest, 1 / total)


def _visit_keys(
    options: Options,
    arrays: Arrays,
    constants: Constants,
    i: Array,
    needed_keys: tuple[Array, Array],
    softmax: Softmax,
) -> Softmax:
    """Returns the softmax of block `i` of the queries after the keys that it needs."""
    keys = options.keys
    query = options.queries.take(arrays.query, i, 3)
    first_needed, num_needed = needed_keys

    def is_unfinished(state: tuple[Array, Softmax]) -> Array:
        n, softmax = state
        if options.never_empty or not _skips(constants.mask):
            return n < num_needed[i]
        # A query whose keys were all masked attends to every key, so nothing may be skipped.
        has_empty = jnp.any(softmax.largest <= attention_mask.NEG_INF / 2)
        return (n < num_needed[i]) | (has_empty & (n < keys.number))

    def visit(state: tuple[Array, Softmax]) -> tuple[Array, Softmax]:
        n, softmax = state
        tile = _Tile(options, constants, i, (first_needed[i] + n) % keys.number)
        logits = tile.logits(arrays, query).values
        largest = jnp.maximum(softmax.largest, logits.max(-1))
        weights = jnp.exp(logits - largest[..., None])
        shrink = jnp.exp(softmax.largest - largest)
        total = softmax.total * shrink + weights.sum(-1)
        weights = tile.dropout(weights)
        value = keys.take(arrays.value, tile.key_block, 2)
        weights = weights.astype(value.dtype)
        context = softmax.context * shrink[..., None] + _product(
            options, "bkgts,bksd->bkgtd", weights, value
        )
        return n + 1, Softmax(largest, total, context)

    _, softmax = jax.lax.while_loop(
        is_unfinished, visit, (jnp.int32(0), softmax)
    )
    return softmax


def _backward(
    options: Options, residuals: Residuals, dout: Array
) -> tuple[Arrays, None]:
    arrays, _, output = residuals
    zeros = jax.tree.map(zeros_like, arrays._replace(sink=None))
    grads = add_gradients(options, residuals, dout, zeros)
    if arrays.sink is not None:
        grads = grads._replace(sink=sink_gradient(arrays.sink, output, dout))
    return in_dtypes_of(arrays, grads), None


def in_dtypes_of(arrays: Arrays, grads: Arrays) -> Arrays:
    """Returns gradients in the dtypes of what they are with respect to."""
    return jax.tree.map(lambda x, grad: grad.astype(x.dtype), arrays, grads)


def sink_gradient(sink: Array, output: Output, dout: Array) -> Array:
    """Returns the gradient of the sinks, from the outputs after all keys."""
    # The sink's weight, times dout · (0 - out): its value is 0.
    weights = jnp.exp(sink - output.largest) * output.inverse_total
    dsink = -jnp.sum(weights * _output_products(output, dout), (0, 3))
    return dsink[None, ..., None]


def _output_products(output: Output, dout: Array) -> Array:
    """Returns `dout · out` of each query."""
    return jnp.sum(dout.astype(jnp.float32) * output.out, -1)


def add_gradients(
    options: Options, residuals: Residuals, dout: Array, grads: Arrays
) -> Arrays:
    """Adds the gradients by way of the keys in the residuals, but for those of sinks.

    Those keys may be some of all that the output in the residuals comes from: the gradient by all
    is the sum.
    """
    arrays, constants, output = residuals
    queries, keys = options.queries, options.keys
    first_needed, num_needed = _needed_keys(queries, keys, constants.mask)
    delta = _output_products(output, dout)
    if not options.never_empty and _skips(constants.mask):
        # As in the forward pass: a block with a query without any key has visited all keys.
        smallest, _ = queries.bounds(output.largest.min((0, 1, 2)))
        has_empty = smallest <= attention_mask.NEG_INF / 2
        num_needed = jnp.where(has_empty, keys.number, num_needed)

    def visit_queries(grads: Arrays, i: Array) -> tuple[Arrays, None]:
        query = queries.take(arrays.query, i, 3)
        block_dout = queries.take(dout, i, 3)
        largest = queries.take(output.largest, i, 3)
        inverse_total = queries.take(output.inverse_total, i, 3)
        block_delta = queries.take(delta, i, 3)
        only_here = queries.only_here(i)
        if only_here is not None:
            inverse_total = jnp.where(to_ndim(only_here, 4), inverse_total, 0)

        def visit_keys(n: Array, grads: Arrays) -> Arrays:
            tile = _Tile(
                options, constants, i, (first_needed[i] + n) % keys.number
            )
            key = keys.take(arrays.key, tile.key_block, 2)
            value = keys.take(arrays.value, tile.key_block, 2)
            logits, slope, allowed = tile.logits(arrays, query)
            weights = (
                jnp.exp(logits - largest[..., None]) * inverse_total[..., None]
            )
            dropped_weights = tile.dropout(weights).astype(block_dout.dtype)
            dvalue = _product(
                options, "bkgts,bkgtd->bksd", dropped_weights, block_dout
            )
            dweights = _product(options, "bkgtd,bksd->bkgts", block_dout, value)
            dweights = tile.dropout(dweights)
            dlogits = weights * (dweights - block_delta[..., None])
            if not options.masked_gradient and allowed is not None:
                dlogits = jnp.where(allowed, dlogits, 0)
            dbias = grads.bias
            if dbias is not None:
                dbias = tile.add_to_bias(dbias, dlogits)
            dslopes = grads.slopes
            if dslopes is not None:
                distance = tile.alibi(
                    jnp.ones(1)
                )  # (#batch, 1, target, source)
                dslopes += jnp.sum(
                    dlogits * distance[:, :, None], (0, 3, 4)
                ).ravel()
            dproducts = (dlogits * slope).astype(query.dtype)
            dquery = _product(options, "bkgts,bksd->bkgtd", dproducts, key)
            dkey = _product(options, "bkgts,bkgtd->bksd", dproducts, query)
            return Arrays(
                query=grads.query + dquery,
                key=keys.add(grads.key, tile.key_block, 2, dkey),
                value=keys.add(grads.value, tile.key_block, 2, dvalue),
                bias=dbias,
                sink=None,
                slopes=dslopes,
            )

        # The loop over keys sums the gradient of one block of queries, and those of all keys.
        block_grads = grads._replace(query=zeros_like(query))
        block_grads = jax.lax.fori_loop(
            0, num_needed[i], visit_keys, block_grads
        )
        dquery = queries.add(grads.query, i, 3, block_grads.query)
        return block_grads._replace(query=dquery), None

    grads, _ = jax.lax.scan(visit_queries, grads, jnp.arange(queries.number))
    return grads


_attend.defvjp(_forward, _backward)


def zeros_like(x: Array) -> Array:
    """Returns the start of a sum, on the devices and with the sharding of its terms."""
    return jnp.zeros_like(x, jnp.float32)


def _skips(mask: attention_mask.AttentionMask) -> bool:
    """Returns whether the mask can exclude whole blocks."""
    window, _ = attention_mask.window_of(mask.mask_fn)
    return window != attention_mask.Window() or mask.query_segments is not None


def _needed_keys(
    queries: Blocks, keys: Blocks, mask: attention_mask.AttentionMask
) -> tuple[Array, Array]:
    """Returns, for each block of queries, the first block of keys to visit and how many follow."""
    window, _ = attention_mask.window_of(mask.mask_fn)
    is_needed = np.ones((queries.number, keys.number), bool)

    low, high = queries.bounds(mask.query_positions)
    key_low, key_high = keys.bounds(mask.key_positions)
    if window.left_context is not None:
        is_needed &= low[:, None] - key_high[None] <= window.left_context
    if window.right_context is not None:
        is_needed &= key_low[None] - high[:, None] <= window.right_context

    if mask.query_segments is not None:
        low, high = queries.bounds(mask.query_segments)
        key_low, key_high = keys.bounds(mask.key_segments)
        ranges_meet = (low[:, None] <= key_high[None]) & (
            key_low[None] <= high[:, None]
        )
        is_needed &= ranges_meet

    is_needed = jnp.asarray(is_needed)
    first = jnp.argmax(is_needed, 1)
    end = keys.number - jnp.argmax(is_needed[:, ::-1], 1)
    return first, jnp.where(is_needed.any(1), end - first, 0)


class _Tile(NamedTuple):
    """Pairs of one block of queries and one block of keys."""

    options: Options
    constants: Constants
    query_block: Array
    key_block: Array

    def take(self, x: Array) -> Array:
        """Returns the tile of an array with axes `(..., target, source)`, either of size 1."""
        rows = self.options.queries.take(x, self.query_block, 3)
        return self.options.keys.take(rows, self.key_block, 4)

    def logits(self, arrays: Arrays, query: Array) -> _Logits:
        options = self.options
        key = options.keys.take(arrays.key, self.key_block, 2)
        logits = (
            _product(options, "bkgtd,bksd->bkgts", query, key) * options.scale
        )
        slope = options.scale
        if options.logit_cap is not None:
            # d/dx of c tanh(x / c) is 1 - tanh²(x / c).
            squashed = jnp.tanh(logits / options.logit_cap)
            logits = options.logit_cap * squashed
            slope = slope * (1 - squashed**2)
        kv_heads = key.shape[1]
        if arrays.bias is not None:
            logits += self.take(arrays.bias).astype(jnp.float32)
        if arrays.slopes is not None:
            logits += _with_groups(self.alibi(arrays.slopes), kv_heads)
        allowed = self.mask(kv_heads)
        if allowed is not None:
            logits = jnp.where(allowed, logits, logits + attention_mask.NEG_INF)
        only_here = options.keys.only_here(self.key_block)
        if only_here is not None:
            logits = jnp.where(to_ndim(only_here, 5), logits, -jnp.inf)
        return _Logits(logits, slope, allowed)

    def mask(self, kv_heads: int) -> Array | None:
        """Returns which pairs may attend; None for all."""
        queries, keys, mask = (
            self.options.queries,
            self.options.keys,
            self.constants.mask,
        )
        masks: list[Array] = []
        if mask.mask_fn is not None:
            allowed = attention_mask.evaluate_mask(
                mask.mask_fn, *self.positions()
            )
            masks.append(_with_groups(allowed, kv_heads))
        if mask.query_segments is not None:
            assert mask.key_segments is not None
            same_segment = attention_mask.segment_mask(
                queries.take(
                    jnp.atleast_2d(mask.query_segments), self.query_block, 1
                ),
                keys.take(jnp.atleast_2d(mask.key_segments), self.key_block, 1),
            )
            masks.append(_with_groups(same_segment, kv_heads))
        masks += [self.take(array) for array in mask.arrays]
        if not masks:
            return None
        return functools.reduce(jnp.logical_and, masks)

    def positions(self) -> tuple[Array, Array]:
        """Returns the positions of queries and keys, each with an axis for the batch."""
        mask = self.constants.mask
        return (
            self.options.queries.positions(
                mask.query_positions, self.query_block
            ),
            self.options.keys.positions(mask.key_positions, self.key_block),
        )

    def alibi(self, slopes: Array) -> Array:
        return embedding.alibi_bias(slopes, *self.positions())

    def dropout(self, x: Array) -> Array:
        """Applies dropout with the mask of this tile, in the forward and the backward pass."""
        rate, dropout_key = (
            self.options.dropout_rate,
            self.constants.dropout_key,
        )
        if not rate:
            return x
        assert dropout_key is not None
        key = jax.random.fold_in(dropout_key, self.query_block)
        key = jax.random.fold_in(key, self.key_block)
        broadcast_axes = (0, 1, 2) if self.options.broadcast_dropout else ()
        keep = keep_mask(key, rate, x.shape, broadcast_axes)
        return dropout(x, rate=rate, mask=keep)

    def add_to_bias(self, dbias: Array, dlogits: Array) -> Array:
        """Adds this tile's gradient to that of the bias, summed over axes of size 1 in it."""
        queries, keys = self.options.queries, self.options.keys
        rows = queries.take(dbias, self.query_block, 3)
        axes = [axis for axis, size in enumerate(dbias.shape) if size == 1]
        tile = jnp.sum(dlogits, axes, keepdims=True)
        rows = keys.add(rows, self.key_block, 4, tile)
        return queries.put(dbias, self.query_block, 3, rows)


def _product(options: Options, subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(
        subscripts,
        x,
        y,
        precision=options.precision,
        preferred_element_type=jnp.float32,
    )
