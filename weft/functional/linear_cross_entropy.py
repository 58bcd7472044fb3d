"""Cross entropy of the classes of an output layer, without all of its logits in memory.

The logits of a language model, tokens × vocabulary, are often its largest array. Their statistics
are computed from one chunk of the vocabulary at a time, and the backward pass computes the logits
of each chunk again:

    forward:   logits = x · chunkᵀ   →   log-sum-exp, expected logit, likeliest class of the chunk
    backward:  logits = x · chunkᵀ   →   d = ∂loss/∂logits   →   dx += d · chunk,  dchunk = dᵀ · x

This costs one more matrix product, and saves writing and reading logits, their exponentials and
their gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Num

from weft.errors import ArgumentValueError
from weft.functional import arrays, attention, embedding, loss


def linear_cross_entropy(
    x: Float[Array, "*batch dim"],
    weight: Float[Array, "classes dim"],
    target_labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " classes"] | None = None,
    logit_cap: float | None = None,
    live_targets: Num[Array, "*batch"] | None = None,
    z_loss_scale: float = 0.0,
    label_smoothing: float = 0.0,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
    chunk_size: int | None = None,
    num_shards: int = 1,
) -> tuple[Float[Array, ""], loss.Aux]:
    """Returns `cross_entropy` of the logits `x @ weight.T + bias`, which are never whole in memory.

    Logits are computed in float32, also from bfloat16. Many of them, from 16 MB on CPU and 2 GB on
    other devices, are computed in chunks, which takes reverse-mode derivatives only.

    Args:
        weight: the vector of each class: an embedding's table, or the transposed kernel of a dense
            layer.
        logit_cap: bounds the logits by `cap_logits`.
        chunk_size: the largest number of classes, in each shard, whose logits are in memory at
            once; by default chosen by the number of targets. With a size of all classes, logits
            are whole, and there are forward-mode derivatives (`jax.jvp`).
        num_shards: the number of devices over which the classes of `weight` are sharded, so that
            each works on its own and results are added up once.

    The other arguments, and the results, are those of `cross_entropy`.

    Raises:
        ArgumentValueError: if a factor is out of range, `chunk_size` is not positive, or
            `num_shards` does not divide the classes.

    >>> x, table = jnp.ones((2, 3)), jnp.eye(4, 3)
    >>> loss, aux = linear_cross_entropy(x, table, jnp.array([0, -1]), chunk_size=2)
    >>> round(loss.item(), 3), aux["num_targets"].item()
    (1.214, 1.0)
    """
    loss.check_factors("linear_cross_entropy", label_smoothing, z_loss_scale)
    if live_targets is None:
        live_targets = loss.which_targets_count(
            target_labels, weight.shape[0], soft_target_labels
        )
    statistics = linear_logit_statistics(
        x,
        weight,
        target_labels,
        bias=bias,
        logit_cap=logit_cap,
        live_targets=live_targets,
        label_smoothing=label_smoothing,
        soft_target_labels=soft_target_labels,
        chunk_size=chunk_size,
        num_shards=num_shards,
    )
    return loss.cross_entropy_of_statistics(
        statistics,
        target_labels,
        live_targets=live_targets,
        z_loss_scale=z_loss_scale,
        soft_target_labels=soft_target_labels,
    )


def linear_logit_statistics(
    x: Float[Array, "*batch dim"],
    weight: Float[Array, "classes dim"],
    target_labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " classes"] | None = None,
    logit_cap: float | None = None,
    live_targets: Num[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
    chunk_size: int | None = None,
    num_shards: int = 1,
) -> loss.LogitStatistics:
    """Returns `logit_statistics` of the logits; see `linear_cross_entropy` for the arguments.

    >>> table = jnp.array([[0.0], [2.0]])
    >>> linear_logit_statistics(jnp.ones((1, 1)), table, jnp.array([0])).likeliest.tolist()
    [1]
    """
    classes = weight.shape[0]
    where = None if live_targets is None else live_targets[..., None]
    x = arrays.counted(x, where)
    chunks = num_chunks(
        target_labels.size,
        classes,
        chunk_size=chunk_size,
        num_shards=num_shards,
    )
    if chunks == 1:
        logits = embedding.attend(weight, x, preferred_element_type=jnp.float32)
        logits = _finish_logits(logits, bias, logit_cap)
        if soft_target_labels is not None:
            soft_target_labels = arrays.counted(soft_target_labels, where)
        return loss.logit_statistics(
            logits,
            target_labels,
            label_smoothing=label_smoothing,
            soft_target_labels=soft_target_labels,
        )
    options = _Options(classes, logit_cap, label_smoothing)

    def chunked_statistics(
        x: Array,
        weight: Array,
        bias: Array | None,
        soft: Array | None,
        target_labels: Array,
    ) -> loss.LogitStatistics:
        weight = _split_classes(weight, 0, num_shards, chunks)
        if bias is not None:
            bias = _split_classes(bias, 0, num_shards, chunks)
        if soft is not None:
            class_axis = target_labels.ndim
            soft = _split_classes(soft, class_axis, num_shards, chunks)
            # With the shards between other axes, XLA copies the labels.
            soft = jnp.moveaxis(soft, class_axis, 0)
        return _statistics(options, x, _Head(weight, bias, soft), target_labels)

    operands = (x, weight, bias, soft_target_labels, target_labels)
    spec = arrays.explicit_spec(target_labels)
    return arrays.sharded_by_compiler(chunked_statistics, *operands, spec=spec)


def _split_classes(
    array: Array, axis: int, num_shards: int, chunks: int
) -> Array:
    """Splits the axis of the classes into shards, chunks and the classes of a chunk.

    The last chunk of each shard is padded with zeros.
    """
    first_sizes, last_sizes = array.shape[:axis], array.shape[axis + 1 :]
    classes_in_shard = array.shape[axis] // num_shards
    array = array.reshape(
        *first_sizes, num_shards, classes_in_shard, *last_sizes
    )
    chunk_size = -(-classes_in_shard // chunks)
    padding = chunks * chunk_size - classes_in_shard
    if padding:
        widths = [(0, 0)] * array.ndim
        widths[axis + 1] = (0, padding)
        array = jnp.pad(array, widths)
    return array.reshape(
        *first_sizes, num_shards, chunks, chunk_size, *last_sizes
    )


def num_chunks(
    num_targets: int,
    classes: int,
    *,
    chunk_size: int | None = None,
    num_shards: int = 1,
) -> int:
    """Returns the number of chunks in which `linear_cross_entropy` computes; 1 for whole logits.

    Raises:
        ArgumentValueError: if `chunk_size` is not positive, or `num_shards` does not divide the
            classes.

    >>> num_chunks(1024, 32_000, chunk_size=500), num_chunks(1024, 300)
    (64, 1)
    """
    if num_shards < 1 or classes % num_shards:
        raise ArgumentValueError(
            f"num_shards={num_shards} does not divide the {classes} classes of weight; expected "
            "the number of devices over which they are sharded."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ArgumentValueError(
            f"chunk_size={chunk_size} must be positive: the number of classes whose logits are in "
            "memory at once; None to choose one."
        )
    classes_in_shard = classes // num_shards
    if chunk_size is not None:
        least = -(-classes_in_shard // chunk_size)
    else:
        # Measured: on CPU, chunks of 2 MB stay in the cache, and save time. Accelerators need
        # larger products, and there only the memory is a gain.
        chunk_logits = 2**19 if arrays.platform() == "cpu" else 2**26
        least = classes_in_shard // max(
            256, chunk_logits // max(num_targets, 1)
        )
        if least < 8:
            return 1
    # Without a divisor, the last chunk is padded, for which the weight is copied.
    for chunks in range(least, 2 * least + 1):
        if classes_in_shard % chunks == 0:
            return chunks
    return least


_Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""Axes of the two operands of a product."""


class _Options(NamedTuple):
    classes: int
    logit_cap: float | None
    label_smoothing: float


class _Head(NamedTuple):
    """Arrays with an axis of the vocabulary, split into shards and chunks of equal size."""

    weight: Float[Array, "shards chunks size dim"]
    bias: Float[Array, "shards chunks size"] | None
    soft_target_labels: Float[Array, "shards *batch chunks size"] | None

    @property
    def chunk_axes(self) -> _Head:
        """The axis of the chunks of each array."""
        bias_axis = None if self.bias is None else 1
        soft = self.soft_target_labels
        soft_axis = None if soft is None else soft.ndim - 2
        axes: Any = (1, bias_axis, soft_axis)
        return _Head(*axes)


class _Chunk(NamedTuple):
    """A chunk of the vocabulary of each shard.

    Attributes:
        logits: -inf in the padding.
        probs: the targets' probabilities.
        class_ids: the classes.
        weight: in the dtype of the products.
    """

    logits: Float[Array, "*batch shards size"]
    probs: Float[Array, "*batch shards size"]
    class_ids: Int[Array, "shards size"]
    weight: Float[Array, "shards size dim"]


def _finish_logits(
    products: Array, bias: Array | None, cap: float | None
) -> Array:
    logits = products.astype(jnp.float32)
    if bias is not None:
        logits += arrays.to_ndim(bias.astype(jnp.float32), logits.ndim)
    if cap is None:
        return logits
    return attention.cap_logits(logits, cap)


def _chunk(
    options: _Options, index: Array, x: Array, head: _Head, target_labels: Array
) -> _Chunk:
    """Computes the logits of a chunk of each shard."""
    shards, chunks, size, _ = head.weight.shape
    dtype = jnp.result_type(x, head.weight)

    def at_index(array: Array, axis: int) -> Array:
        return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)

    weight, bias, soft = jax.tree.map(at_index, head, head.chunk_axes)
    weight = weight.astype(dtype)
    products = _dot(x.astype(dtype), weight, ((x.ndim - 1,), (2,)))
    logits = _finish_logits(products, bias, options.logit_cap)

    classes_in_shard = options.classes // shards
    offset = index * size + jnp.arange(size)  # of each class within its shard
    class_ids = classes_in_shard * jnp.arange(shards)[:, None] + offset[None]
    if soft is not None:
        probs = jnp.moveaxis(soft, 0, -2).astype(jnp.float32)
    else:
        is_target = target_labels[..., None, None] == arrays.to_ndim(
            class_ids, x.ndim + 1
        )
        smoothing = options.label_smoothing
        probs = (
            jnp.where(is_target, 1 - smoothing, 0) + smoothing / options.classes
        )
    if chunks * size != classes_in_shard:
        is_class = arrays.to_ndim(offset < classes_in_shard, x.ndim + 1)
        logits = jnp.where(is_class, logits, -jnp.inf)
        probs = jnp.where(is_class, probs, 0)
    return _Chunk(logits, probs, class_ids, weight)


def _dot(
    a: Array, b: Array, contracted: _Axes, batch: _Axes = ((), ())
) -> Array:
    """Returns a product that is summed in float32."""
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(
        a, b, (contracted, batch), preferred_element_type=dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    options: _Options, x: Array, head: _Head, target_labels: Array
) -> loss.LogitStatistics:
    """Returns the statistics of all classes, from those of each chunk of each shard."""

    def chunk_statistics(
        carry: None, index: Array
    ) -> tuple[None, _ChunkStatistics]:
        logits, probs, class_ids, _ = _chunk(
            options, index, x, head, target_labels
        )
        largest = jnp.max(logits, axis=-1, keepdims=True)
        # As in `logit_statistics`.
        class_ids = arrays.to_ndim(class_ids, x.ndim + 1)
        candidates = jnp.where(logits == largest, class_ids, options.classes)
        statistics = _ChunkStatistics(
            log_normalizer=jax.nn.logsumexp(logits, axis=-1),
            expected=jnp.sum(jnp.where(probs == 0, 0, probs * logits), axis=-1),
            largest=largest[..., 0],
            likeliest=jnp.min(candidates, axis=-1),
        )
        return carry, statistics

    num_chunks = head.weight.shape[1]
    _, chunks = jax.lax.scan(chunk_statistics, None, jnp.arange(num_chunks))
    axes = (0, -1)  # chunks and shards
    is_largest = chunks.largest == jnp.max(
        chunks.largest, axis=axes, keepdims=True
    )
    candidates = jnp.where(is_largest, chunks.likeliest, options.classes)
    return loss.LogitStatistics(
        log_normalizer=jax.nn.logsumexp(chunks.log_normalizer, axis=axes),
        expected=jnp.sum(chunks.expected, axis=axes),
        likeliest=jnp.min(candidates, axis=axes),
    )


class _ChunkStatistics(NamedTuple):
    """Statistics of one chunk of each shard; stacked, of all chunks, along the first axis."""

    log_normalizer: Float[Array, "*batch shards"]
    expected: Float[Array, "*batch shards"]
    largest: Float[Array, "*batch shards"]
    likeliest: Int[Array, "*batch shards"]


class _Residuals(NamedTuple):
    x: Array
    head: _Head
    target_labels: Array
    log_normalizer: Array
    trained: _Head  # the arrays of the head that have a gradient


def _statistics_fwd(
    options: _Options, x: Any, head: Any, target_labels: Any
) -> tuple[loss.LogitStatistics, _Residuals]:
    """Computes the statistics; the leaves of arguments have a `value`, and say if perturbed."""
    soft = head.soft_target_labels
    trained = head
    if soft is None or not soft.perturbed:
        # The gradient of soft labels is as large as the logits, and rarely used.
        trained = head._replace(soft_target_labels=None)
    x, head, target_labels, trained = jax.tree.map(
        lambda argument: argument.value, (x, head, target_labels, trained)
    )
    statistics: Any = _statistics(options, x, head, target_labels)
    residuals = _Residuals(
        x, head, target_labels, statistics.log_normalizer, trained
    )
    return statistics, residuals


def _statistics_bwd(
    options: _Options,
    residuals: _Residuals,
    cotangents: tuple[Array | SymbolicZero, ...],
) -> tuple[Array, _Head, None]:
    x, head, target_labels, log_normalizer, trained = residuals

    def per_target(values: Array | SymbolicZero) -> Array:
        """Returns one number per target, with axes for shards and classes."""
        if isinstance(values, SymbolicZero):
            values = jnp.zeros_like(log_normalizer)
        return values[..., None, None]

    d_log_normalizer = per_target(cotangents[0])
    d_expected = per_target(cotangents[1])
    log_normalizer = per_target(log_normalizer)
    batch_axes = tuple(range(x.ndim - 1))

    def add_chunk(
        carry: tuple[Array, _Head], index: Array
    ) -> tuple[tuple[Array, _Head], None]:
        dx, d_head = carry
        logits, probs, _, weight = _chunk(
            options, index, x, head, target_labels
        )
        # Probabilities of ignored targets may be NaN; XLA would copy them if masked beforehand.
        probs = arrays.counted(probs, d_expected)
        d_logits = (
            d_log_normalizer * jnp.exp(logits - log_normalizer)
            + d_expected * probs
        )
        if options.logit_cap is not None:
            # The derivative of tanh; 0 in the padding, whose logits are not capped.
            d_logits *= 1 - jnp.square(
                jnp.maximum(logits / options.logit_cap, -1)
            )
        d_products = d_logits.astype(weight.dtype)
        # Shards stay apart until the end, so that devices add up their sums once.
        dx += _dot(d_products, weight, ((x.ndim,), (1,)), ((x.ndim - 1,), (0,)))
        d_weight = _dot(
            d_products, x.astype(weight.dtype), (batch_axes, batch_axes)
        )
        d_bias = None
        if trained.bias is not None:
            d_bias = jnp.sum(d_logits, axis=batch_axes)
        d_soft = None
        if trained.soft_target_labels is not None:
            d_soft = d_expected * arrays.finite_or_counted(logits, probs != 0)
            d_soft = jnp.moveaxis(d_soft, -2, 0)

        def write(gradient: Array, chunk: Array, axis: int) -> Array:
            chunk = chunk.astype(gradient.dtype)
            return jax.lax.dynamic_update_index_in_dim(
                gradient, chunk, index, axis
            )

        d_chunk = _Head(d_weight, d_bias, d_soft)
        d_head = jax.tree.map(write, d_head, d_chunk, trained.chunk_axes)
        return (dx, d_head), None

    shards, chunks = head.weight.shape[:2]
    dtype = jnp.promote_types(jnp.result_type(x, head.weight), jnp.float32)
    zeros = (
        jnp.zeros((shards, *x.shape), dtype),
        jax.tree.map(jnp.zeros_like, trained),
    )
    (dx, d_head), _ = jax.lax.scan(add_chunk, zeros, jnp.arange(chunks))
    return dx.sum(0).astype(x.dtype), d_head, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)
