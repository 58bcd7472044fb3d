"""Attention of a scope, over one or several axes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from weft import functional
from weft.core.nn.linear import Initializer, default_kernel_init, dense_general
from weft.core.nn.stochastic import keep_mask
from weft.core.scope import Scope
from weft.errors import ArgumentShapeError, ArgumentValueError


def dot_product_attention(
    scope: Scope,
    query: Float[Array, "batch *target heads dim"],
    key: Float[Array, "batch *source heads dim"],
    value: Float[Array, "batch *source heads value_dim"],
    dtype: DTypeLike = jnp.float32,
    bias: Float[Array, "..."] | None = None,
    axis: int | Sequence[int] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch *target heads value_dim"]:
    """`softmax(query · key / sqrt(dim) + bias) · value` over some axes (Vaswani et al., 2017).

    Args:
        scope: gives a key of the stream `dropout`.
        query: what asks.
        key: what is compared with the queries.
        value: what is averaged.
        dtype: of the probabilities.
        bias: added to the logits, broadcastable to
            `(batch, *other axes, heads, *axes of query, *axes of key)`.
        axis: the axes that are attended over; by default all between batch and heads.
        broadcast_dropout: whether all examples and heads drop the same.
        dropout_rng: a key to use instead of one of the scope.
        dropout_rate: of the probabilities.
        deterministic: whether nothing is dropped.
        precision: of the multiplications, as in `jax.lax.dot_general`.

    Raises:
        ArgumentShapeError: if the shapes do not fit.
        ArgumentValueError: if an axis cannot be attended over.

    Example:
        >>> from weft.core import apply
        >>> x = jnp.ones((1, 5, 2, 4))
        >>> apply(dot_product_attention)({}, x, x, x).shape
        (1, 5, 2, 4)
    """
    if key.shape[:-1] != value.shape[:-1] or query.shape[-2:] != key.shape[-2:]:
        raise ArgumentShapeError(
            f"query {query.shape}, key {key.shape} and value {value.shape}: key and value must "
            "agree but in the last axis, query and key in the last two."
        )
    axes = _attended(query.ndim, axis)
    other = tuple(a for a in range(query.ndim - 2) if a not in axes)
    order = (*other, *axes, query.ndim - 2, query.ndim - 1)
    batch = tuple(query.shape[a] for a in other)

    def flat(x: Array) -> Array:
        x = jnp.transpose(x, order)
        return x.reshape(math.prod(batch), -1, *x.shape[-2:])

    targets = tuple(query.shape[a] for a in axes)
    sources = tuple(key.shape[a] for a in axes)
    logits = functional.attention_logits(flat(query), flat(key), precision=precision)
    logits = logits * query.shape[-1] ** -0.5
    full = (*batch, query.shape[-2], *targets, *sources)
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias, full).reshape(logits.shape)
    probs = jax.nn.softmax(logits)
    if dropout_rate > 0.0 and not deterministic:
        rng = scope.make_rng("dropout") if dropout_rng is None else dropout_rng
        shape = (*([1] * (len(batch) + 1)), *targets, *sources) if broadcast_dropout else full
        mask = jnp.broadcast_to(keep_mask(rng, dropout_rate, shape), full).reshape(probs.shape)
        probs = functional.dropout(probs, rate=dropout_rate, mask=mask)
    context = functional.attention_context(probs.astype(dtype), flat(value), precision=precision)
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
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    precision: lax.PrecisionLike = None,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = jax.nn.initializers.zeros,
    bias: bool = True,
    attention_fn: Callable[..., Array] = dot_product_attention,
) -> Float[Array, "batch *target out_features"]:
    """Attention with several heads, each with projections of its own.

    Args:
        scope: has the scopes `query`, `key`, `value` and `out`, each with `kernel` and `bias`.
        inputs_q: what asks.
        inputs_kv: what is asked; None for `inputs_q` itself.
        num_heads: the number of heads.
        dtype: of the computation.
        qkv_features: of all heads together; by default those of `inputs_q`.
        out_features: of the result; by default those of `inputs_q`.
        attention_axis: the axes that are attended over; by default all between batch and features.
        causal_mask: whether a position sees none that come after it.
        padding_mask: False for what is padding; it may have a last axis of size 1.
        key_padding_mask: the same for `inputs_kv`; by default that of the queries.
        segmentation: only positions of the same segment see each other.
        key_segmentation: the same for `inputs_kv`; by default that of the queries.
        cache: whether to decode: the first call, with inputs as long as the result will be, makes
            the collection `cache`; each later call has one position, which sees those before it.
        broadcast_dropout: see `dot_product_attention`.
        dropout_rng: see `dot_product_attention`.
        dropout_rate: see `dot_product_attention`.
        deterministic: see `dot_product_attention`.
        precision: see `dot_product_attention`.
        kernel_init: makes the kernels.
        bias_init: makes the biases.
        bias: whether the projections have a bias.
        attention_fn: computes the attention, with the arguments of `dot_product_attention`.

    Raises:
        ArgumentShapeError: if the shapes do not fit.
        ArgumentValueError: if the features cannot be shared out among the heads, or a cache is
            asked for where there is no one axis of time.

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
    query, key, value = _projected(scope, project, inputs_q, inputs_kv, num_heads, qkv_features)
    axes = _attended(query.ndim, attention_axis)
    key, value, seen = _decode(scope, key, value, axes) if cache else (key, value, None)
    pairs = (padding_mask, key_padding_mask), (segmentation, key_segmentation)
    context = scope.child(attention_fn)(
        query, key, value, dtype=dtype, axis=axes, precision=precision, dropout_rng=dropout_rng,
        bias=_bias(query, key, axes, seen, causal_mask, pairs), dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout, deterministic=deterministic,
    )  # fmt: skip
    return project(scope.push("out"), context, out_features or inputs_q.shape[-1], axis=(-2, -1))


def _projected(
    scope: Scope,
    project: Callable[..., Array],
    inputs_q: Array,
    inputs_kv: Array | None,
    num_heads: int,
    qkv_features: int | None,
) -> list[Array]:
    """Queries, keys and values of all heads."""
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
    features = qkv_features or inputs_q.shape[-1]
    if features % num_heads:
        raise ArgumentValueError(
            f"qkv_features={features} cannot be shared out among num_heads={num_heads}; give a "
            "multiple of it."
        )
    heads = (num_heads, features // num_heads)
    inputs = {"query": inputs_q, "key": inputs_kv, "value": inputs_kv}
    return [project(scope.push(name), x, heads) for name, x in inputs.items()]


def _bias(
    query: Array,
    key: Array,
    axes: tuple[int, ...],
    seen: Array | None,
    causal_mask: bool,
    pairs: Any,
) -> Array | None:
    """What is added to the logits, so that each query sees only what it may."""
    masks = [] if seen is None else [seen]
    if causal_mask and seen is None:
        masks.append(_causal(query, key, axes))
    for combine, of_both in zip((jnp.logical_and, jnp.equal), pairs, strict=True):
        masks += _outer(combine, *of_both, axes=axes, ndim=query.ndim - 1)
    return functional.bool_to_bias(functools.reduce(jnp.logical_and, masks)) if masks else None


def _attended(ndim: int, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """The attended axes of arrays `(batch, *axes, heads, dim)`."""
    if axis is None:
        return tuple(range(1, ndim - 2))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(1 <= a < ndim - 2 for a in axes):
        raise ArgumentValueError(
            f"axis={axis}: attention goes over axes between the batch and the heads, which are "
            f"1 to {ndim - 3} here."
        )
    return axes


def _causal(query: Array, key: Array, axes: tuple[int, ...]) -> Array:
    """Which positions each one may see, in the order of the flattened axes."""
    targets, sources = (tuple(x.shape[a] for a in axes) for x in (query, key))
    order = jnp.arange(math.prod(targets))[:, None] >= jnp.arange(math.prod(sources))
    return order.reshape(*[1] * (query.ndim - len(axes) - 1), *targets, *sources)


def _outer(
    combine: Callable[[Array, Array], Array],
    of_query: Array | None,
    of_key: Array | None,
    *,
    axes: tuple[int, ...],
    ndim: int,
) -> list[Array]:
    """`combine` of each query with each key: `(batch, *other axes, 1, *targets, *sources)`.

    Nothing where there is nothing to combine.
    """
    if of_query is None:
        return []
    of_key = of_query if of_key is None else of_key

    def laid_out(x: Array, first: bool) -> Array:
        x = x[..., 0] if x.ndim == ndim else x
        other = tuple(a for a in range(x.ndim) if a not in axes)
        x = jnp.transpose(x, (*other, *axes))
        n = len(other)
        ones = (1,) * len(axes)
        around = (*x.shape[n:], *ones) if first else (*ones, *x.shape[n:])
        return x.reshape(*x.shape[:n], 1, *around)

    return [combine(laid_out(of_query, True), laid_out(of_key, False))]


def _decode(
    scope: Scope, key: Array, value: Array, axes: tuple[int, ...]
) -> tuple[Array, Array, Array | None]:
    """Keys and values of all positions so far, and which of them there are yet."""
    if axes != (1,) or key.ndim != 4:
        raise ArgumentValueError(
            f"cache=True decodes along one axis of time, axis 1; here it is over the axes {axes} "
            f"of an array with {key.ndim - 2} before the heads."
        )
    begun = scope.has_variable("cache", "cached_key")
    keys = scope.variable("cache", "cached_key", jnp.zeros_like, key)
    values = scope.variable("cache", "cached_value", jnp.zeros_like, value)
    index = scope.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
    if not begun:
        return key, value, None
    batch, length, heads, dim = keys.value.shape
    if key.shape != (batch, 1, heads, dim):
        raise ArgumentShapeError(
            f"a step of decoding has keys of shape {(batch, 1, heads, dim)}, and these have "
            f"{key.shape}: give one position at a time."
        )
    i = index.value
    keys.value = lax.dynamic_update_slice_in_dim(keys.value, key, i, axis=1)
    values.value = lax.dynamic_update_slice_in_dim(values.value, value, i, axis=1)
    index.value = i + 1
    return keys.value, values.value, (jnp.arange(length) <= i).reshape(1, 1, 1, length)
