"""Linear maps: one contraction of an input with a weight, plus an optional bias.

`dense` contracts the last axis, `dense_general` any axes, `project` any einsum. The result has the
operands' promoted dtype unless `preferred_element_type` is set.

`default_dot_general` replaces the product of all linear maps, such as by one of 8 bits.

On the CPU, the product is one of two matrices, with axes merged. For other products, XLA's CPU
backend computes a weight's gradient from a transposed copy of the output's gradient, which took
more time than the product itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import arrays, statistics


@contextlib.contextmanager
def default_dot_general(dot_general: Callable[..., Array] | None) -> Iterator[None]:
    """Replaces `jax.lax.dot_general` in linear maps without a `dot_general` of their own.

    A context or a decorator, in all ways of writing a model. Linear maps are layers such as
    `linen.Dense`, `nnx.Linear` and `hierarchy.Linear`, `Einsum`, the projections of attention and
    recurrent cells, and `dense`, `dense_general` and `project`, if the operands are real
    floating-point numbers. Embeddings, convolutions and attention's scores are not.

    `jax.jit` traces a function again for another product. Backward passes follow from the product
    of the forward pass.

    Args:
        dot_general: called with the weight as its second operand, such as
            `weft.functional.int8_dot_general`. None ends the replacement.

    >>> def zeros(x, weight, *args, **kwargs):
    ...     return 0 * jax.lax.dot_general(x, weight, *args, **kwargs)
    >>> with default_dot_general(zeros):
    ...     dense(jnp.ones((1, 3)), jnp.ones((3, 2)), jnp.ones(2)).tolist()
    [[1.0, 1.0]]
    """
    with arrays.dot_general_context(dot_general):
        yield


def _default_product(x: Array, weight: Array) -> Callable[..., Array] | None:
    default = arrays.dot_general_context.value
    if default is None:
        return None
    is_real = all(jnp.issubdtype(operand.dtype, jnp.floating) for operand in (x, weight))
    return default if is_real else None


class ProductOptions(TypedDict, total=False):
    """Options of linear maps, see `dense_general`."""

    precision: jax.lax.PrecisionLike
    preferred_element_type: jax.typing.DTypeLike | None
    dot_general: Callable[..., Array] | None
    out_sharding: Any


def dense(
    x: Num[Array, "*batch input"],
    weight: Num[Array, "input output"],
    bias: Num[Array, " output"] | None = None,
    **options: Unpack[ProductOptions],
) -> Num[Array, "*batch output"]:
    """Returns `x @ weight + bias`; for the options see `dense_general`.

    Raises:
        ArgumentShapeError: if the contracted axes differ in size.

    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    return dense_general(x, weight, bias, **options)


def dense_general(
    x: Num[Array, "*input"],
    weight: Num[Array, "*weight"],
    bias: Num[Array, "*features"] | None = None,
    *,
    axis: int | Sequence[int] = -1,
    batch_axes: int | Sequence[int] = (),
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    dot_general: Callable[..., Array] | None = None,
    out_sharding: Any = None,
) -> Num[Array, "*output"]:
    """Contracts `axis` of `x` with as many axes of `weight`, and appends the weight's other axes.

    Args:
        weight: shape `(*batch, *contracted, *features)`, in the order of `batch_axes` and `axis`.
        bias: shape `(*batch, *features)`.
        batch_axes: axes of `x` with a separate weight per position; they come first in the output.
        precision, preferred_element_type, out_sharding: as in `jax.lax.dot_general`.
        dot_general: replaces `jax.lax.dot_general`; receives `preferred_element_type` and
            `out_sharding` only if they are set.

    Raises:
        ArgumentShapeError: if the contracted or batch axes differ in size.

    >>> heads = jnp.ones((8, 4, 2))  # model dim, heads, dim per head
    >>> dense_general(jnp.ones((3, 5, 8)), heads).shape
    (3, 5, 4, 2)
    """
    axes = statistics.canonical_axes(axis, x.ndim)
    batch = statistics.canonical_axes(batch_axes, x.ndim)
    leading = batch + axes
    expected = tuple(x.shape[a] for a in leading)
    if weight.shape[: len(leading)] != expected:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}, but its leading axes must be {expected}: "
            f"the axes {leading} of x, whose shape is {x.shape}."
        )
    if x.dtype != weight.dtype:
        x, weight = arrays.promote_dtype(x, weight, inexact=False)
    n_batch, n_leading = len(batch), len(leading)
    weight_batch, weight_axes = tuple(range(n_batch)), tuple(range(n_batch, n_leading))
    options = arrays.without_none(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    options["precision"] = precision
    numbers = (axes, weight_axes), (batch, weight_batch)
    if dot_general is None:
        dot_general = _default_product(x, weight)
    is_last = axes == tuple(range(x.ndim - len(axes), x.ndim)) and not batch
    if dot_general is None and is_last and merges_axes(x, weight, out_sharding):
        return product_of_matrices(x, weight, bias, len(axes), **options)
    # Looked up in each call, and not in a `jax.jit`, for libraries that replace it.
    y = (dot_general or jax.lax.dot_general)(x, weight, numbers, **options)
    return y if bias is None else add_bias(y, bias, n_batch)


# Libraries of quantization replace these functions, or their code, and must see a layer's product.
_PRODUCTS = [
    (owner, name, getattr(owner, name), getattr(getattr(owner, name), "__code__", None))
    for owner, name in ((jax.lax, "dot_general"), (jnp, "einsum"), (jnp, "dot"))
]


def merges_axes(x: Array, weight: Array, out_sharding: Any = None) -> bool:
    """Returns whether to compute a product by `product_of_matrices`.

    Not over several devices, where an axis that is merged with another could not be sharded.
    """
    if x.ndim == weight.ndim == 2:
        # There are none to merge, but outside of a trace a compiled program starts sooner.
        if isinstance(x, Tracer) or isinstance(weight, Tracer):
            return False
        return out_sharding is None and not products_are_replaced()
    if x.ndim < 2 or out_sharding is not None:
        return False
    if not arrays.on_one_cpu() or jax.typeof(x).sharding.mesh.size > 1:
        return False
    return not products_are_replaced()


def products_are_replaced() -> bool:
    """Returns whether a library of quantization replaces JAX's products."""
    for owner, name, product, code in _PRODUCTS:
        if getattr(owner, name) is not product or getattr(product, "__code__", None) is not code:
            return True
    return False


# One traced function, as `jnp.add` is, takes half as long to trace as two operations.
_traced_once = functools.partial(jax.jit, inline=arrays.INLINE)


@functools.partial(
    _traced_once, static_argnames=("n", "first", "precision", "preferred_element_type")
)
def product_of_matrices(
    x: Num[Array, "*input"],
    weight: Num[Array, "*weight"],
    bias: Num[Array, "*features"] | None,
    n: int,
    first: int = 0,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Num[Array, "*output"]:
    """Contracts the last `n` axes of `x` with those of the weight from `first`: 0, or its last.

    >>> product_of_matrices(jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 6)), None, 2).shape
    (2, 3, 6)
    """
    batch, contracted = x.shape[: x.ndim - n], x.shape[x.ndim - n :]
    features = weight.shape[:first] if first else weight.shape[n:]
    depth, width = math.prod(contracted), math.prod(features)
    rows = jax.lax.reshape(x, (math.prod(batch), depth))
    matrix = jax.lax.reshape(weight, (width, depth) if first else (depth, width))
    numbers = ((1,), (1 if first else 0,)), ((), ())
    y = jax.lax.dot_general(rows, matrix, numbers, precision, preferred_element_type)
    y = jax.lax.reshape(y, (*batch, *features))
    return y if bias is None else _plus_bias(y, bias)


def project(
    subscripts: str,
    x: Num[Array, "*input"],
    weight: Num[Array, "*weight"],
    bias: Num[Array, "*features"] | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    dot_general: Callable[..., Array] | None = None,
    einsum: Callable[..., Array] | None = None,
    out_sharding: Any = None,
) -> Num[Array, "*output"]:
    """Returns `einsum(subscripts, x, weight) + bias`.

    For weights with another order of axes, such as an attention's output projection, which is
    stored like the input projections.

    Args:
        subscripts: of an einsum over `x` and `weight`.
        bias: broadcast against the result's last axes.
        precision, preferred_element_type, out_sharding: as in `jax.numpy.einsum`.
        dot_general: replaces `jax.lax.dot_general`, with the weight as its second operand.
        einsum: replaces `jax.numpy.einsum`; receives `preferred_element_type` and `out_sharding`
            only if they are set.

    >>> weight = jnp.ones((8, 4, 2))  # model dim, heads, dim per head
    >>> project("btnh,dnh->btd", jnp.ones((3, 5, 4, 2)), weight).shape
    (3, 5, 8)
    """
    options = arrays.without_none(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    options["precision"] = precision
    contracted = None
    if einsum is dot_general is None:
        dot_general = _default_product(x, weight)
        if dot_general is None and x.dtype == weight.dtype and merges_axes(x, weight, out_sharding):
            contracted = _contracted_axes(subscripts, x.ndim, weight.ndim)
    if contracted is not None:
        return product_of_matrices(x, weight, bias, *contracted, **options)
    if dot_general is not None:
        # In this order, the product of the einsum has the weight as its second operand.
        operands, _, result = subscripts.partition("->")
        swapped = ",".join(reversed(operands.split(",")))
        y = jnp.einsum(f"{swapped}->{result}", weight, x, _dot_general=dot_general, **options)
    else:
        y = (einsum or jnp.einsum)(subscripts, x, weight, **options)
    return y if bias is None else add_bias(y, bias)


@functools.lru_cache(maxsize=256)
def _contracted_axes(subscripts: str, x_ndim: int, weight_ndim: int) -> tuple[int, int] | None:
    """Returns how many last axes of `x` the weight contracts, and the first of them in the weight.

    None unless this is the product of two matrices, up to the merging of neighbouring axes.
    """
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2 or "..." in terms[1]:
        return None
    try:
        _, x = _labels(terms[0], x_ndim, subscripts)
        _, weight = _labels(terms[1], weight_ndim, subscripts)
        n = len(set(x) & set(weight))
        _, out = _labels(result, x_ndim + weight_ndim - 2 * n, subscripts)
    except ArgumentShapeError:
        return None
    for first in (0, weight_ndim - n):
        kept = weight[:first] if first else weight[n:]
        if n and x[-n:] == weight[first : first + n] and out == [*x[:-n], *kept]:
            return n, first
    return None


def project_weight_axes(
    subscripts: str, x_ndim: int, weight_ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns which axes of the weight remain in the result of `project`, and where.

    Returns:
        The weight's axes, the corresponding axes of the result in increasing order, and the
        result's number of axes.

    Raises:
        ArgumentValueError: if the subscripts do not name two operands and a result.
        ArgumentShapeError: if the subscripts name other numbers of axes.

    >>> project_weight_axes("btd,dnh->bnth", 3, 3)
    ((1, 2), (1, 3), 4)
    """
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2:
        raise ArgumentValueError(
            f"subscripts={subscripts!r} must name the axes of an input, a weight and a result, as "
            "'bi,io->bo'."
        )
    x_ellipsis, _ = _labels(terms[0], x_ndim, subscripts)
    weight_ellipsis, weight = _labels(terms[1], weight_ndim, subscripts)
    ndim = len(result.replace("...", ""))
    ndim += max(x_ellipsis, weight_ellipsis) if "..." in result else 0
    _, out = _labels(result, ndim, subscripts)
    kept = tuple(axis for axis, label in enumerate(out) if label in weight)
    return tuple(weight.index(out[axis]) for axis in kept), kept, ndim


def _labels(term: str, ndim: int, subscripts: str) -> tuple[int, list[str | int]]:
    """Returns the number of axes of the ellipsis, and one label per axis."""
    before, dots, after = term.partition("...")
    free = ndim - len(before) - len(after)
    if free < 0 or (free and not dots):
        raise ArgumentShapeError(
            f"{term!r} of subscripts={subscripts!r} names {len(before) + len(after)} axes, of an "
            f"array that has {ndim}."
        )
    return free, [*before, *range(free, 0, -1), *after]


@functools.partial(_traced_once, static_argnums=2)
def add_bias(
    y: Num[Array, "*shape"], bias: Num[Array, "*batch_and_features"], n_batch: int = 0
) -> Num[Array, "*shape"]:
    """Returns `y + bias`, for a bias over the first `n_batch` axes and the last axes of `y`.

    >>> add_bias(jnp.ones((2, 3, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0]]), 1)[:, 0].tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    return _plus_bias(y, bias, n_batch)


def _plus_bias(y: Array, bias: Array, n_batch: int = 0) -> Array:
    missing = range(n_batch, n_batch + y.ndim - bias.ndim)
    bias = jax.lax.expand_dims(bias, missing) if missing else bias
    # `+` is traced for longer, since it promotes.
    return jax.lax.add(y, bias) if y.dtype == bias.dtype != bool else y + bias


def broadcast_bias(
    bias: Num[Array, "*sizes"], axes: Sequence[int], ndim: int
) -> Num[Array, "*ones"]:
    """Returns the bias with `ndim` axes: its own at `axes`, and size 1 elsewhere.

    >>> broadcast_bias(jnp.ones((3, 2)), (1, 3), 4).shape
    (1, 3, 1, 2)
    """
    missing = [axis for axis in range(ndim) if axis not in axes]
    return jax.lax.expand_dims(bias, missing) if bias.ndim < ndim else bias
