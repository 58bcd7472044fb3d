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
from types import CodeType, ModuleType
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import arrays, statistics
from weft.functional.arrays import OutSharding


@contextlib.contextmanager
def default_dot_general(
    dot_general: Callable[..., Array] | None,
) -> Iterator[None]:
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
    for operand in (x, weight):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            return None
    return default


class ProductOptions(TypedDict, total=False):
    """Options of linear maps, see `dense_general`."""

    precision: jax.lax.PrecisionLike
    preferred_element_type: jax.typing.DTypeLike | None
    dot_general: Callable[..., Array] | None
    out_sharding: OutSharding


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
    out_sharding: OutSharding = None,
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
    contracted_axes = statistics.canonical_axes(axis, x.ndim)
    batch_axes = statistics.canonical_axes(batch_axes, x.ndim)
    leading_axes = batch_axes + contracted_axes
    expected = tuple(x.shape[a] for a in leading_axes)
    n_batch, n_leading = len(batch_axes), len(leading_axes)
    if weight.shape[:n_leading] != expected:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}, but its leading axes must be {expected}: "
            f"the axes {leading_axes} of x, whose shape is {x.shape}."
        )
    if x.dtype != weight.dtype:
        x, weight = arrays.promote_dtype(x, weight, inexact=False)
    options = arrays.without_none(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    options["precision"] = precision
    if dot_general is None:
        dot_general = _default_product(x, weight)
    if dot_general is None:
        n_contracted = len(contracted_axes)
        last_axes = tuple(range(x.ndim - n_contracted, x.ndim))
        is_matrix_product = contracted_axes == last_axes and not batch_axes
        if is_matrix_product and merges_axes(x, weight, out_sharding):
            return product_of_matrices(x, weight, bias, n_contracted, **options)
        # Looked up in each call, and not in a `jax.jit`, for libraries that replace it.
        dot_general = jax.lax.dot_general
    weight_batch_axes = tuple(range(n_batch))
    weight_axes = tuple(range(n_batch, n_leading))
    dimension_numbers = (
        (contracted_axes, weight_axes),
        (batch_axes, weight_batch_axes),
    )
    y = dot_general(x, weight, dimension_numbers, **options)
    if bias is None:
        return y
    return add_bias(y, bias, n_batch)


class _Product(NamedTuple):
    """A function of JAX and its code, as they were when Weft was imported."""

    module: ModuleType
    name: str
    function: Callable[..., Array]
    code: CodeType | None

    @classmethod
    def current(cls, module: ModuleType, name: str) -> _Product:
        function = getattr(module, name)
        return cls(module, name, function, getattr(function, "__code__", None))


# Libraries of quantization replace these functions, or their code, and must see a layer's product.
_PRODUCTS = [
    _Product.current(jax.lax, "dot_general"),
    _Product.current(jnp, "einsum"),
    _Product.current(jnp, "dot"),
]


def merges_axes(
    x: Array, weight: Array, out_sharding: OutSharding = None
) -> bool:
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
    for module, name, function, code in _PRODUCTS:
        if getattr(module, name) is not function:
            return True
        if getattr(function, "__code__", None) is not code:
            return True
    return False


# One traced function, as `jnp.add` is, takes half as long to trace as two operations.
_traced_once = functools.partial(jax.jit, inline=arrays.INLINE)


@functools.partial(
    _traced_once,
    static_argnames=("n", "first", "precision", "preferred_element_type"),
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
    batch_shape = x.shape[: x.ndim - n]
    depth = math.prod(x.shape[x.ndim - n :])
    if first:  # the weight's features come before the contracted axes
        feature_shape = weight.shape[:first]
        matrix = jax.lax.reshape(weight, (math.prod(feature_shape), depth))
        dimension_numbers = ((1,), (1,)), ((), ())
    else:
        feature_shape = weight.shape[n:]
        matrix = jax.lax.reshape(weight, (depth, math.prod(feature_shape)))
        dimension_numbers = ((1,), (0,)), ((), ())
    rows = jax.lax.reshape(x, (math.prod(batch_shape), depth))
    y = jax.lax.dot_general(
        rows, matrix, dimension_numbers, precision, preferred_element_type
    )
    y = jax.lax.reshape(y, (*batch_shape, *feature_shape))
    if bias is None:
        return y
    return _plus_bias(y, bias)


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
    out_sharding: OutSharding = None,
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
        if (
            dot_general is None
            and x.dtype == weight.dtype
            and merges_axes(x, weight, out_sharding)
        ):
            contracted = _contracted_axes(subscripts, x.ndim, weight.ndim)
    if contracted is not None:
        return product_of_matrices(x, weight, bias, *contracted, **options)
    if dot_general is not None:
        # In this order, the product of the einsum has the weight as its second operand.
        operands, _, result = subscripts.partition("->")
        swapped = ",".join(reversed(operands.split(",")))
        y = jnp.einsum(
            f"{swapped}->{result}",
            weight,
            x,
            _dot_general=dot_general,
            **options,
        )
    else:
        einsum = einsum or jnp.einsum
        y = einsum(subscripts, x, weight, **options)
    if bias is None:
        return y
    return add_bias(y, bias)


@functools.lru_cache(maxsize=256)
def _contracted_axes(
    subscripts: str, x_ndim: int, weight_ndim: int
) -> tuple[int, int] | None:
    """Returns how many last axes of `x` the weight contracts, and the first of them in the weight.

    None unless this is the product of two matrices, up to the merging of neighboring axes.
    """
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2 or "..." in terms[1]:
        return None
    try:
        _, x_labels = _labels(terms[0], x_ndim, subscripts)
        _, weight_labels = _labels(terms[1], weight_ndim, subscripts)
        n = len(set(x_labels) & set(weight_labels))
        _, result_labels = _labels(
            result, x_ndim + weight_ndim - 2 * n, subscripts
        )
    except ArgumentShapeError:
        return None
    if n == 0:
        return None
    batch_labels, contracted_labels = x_labels[:-n], x_labels[-n:]
    features_last = batch_labels + weight_labels[n:]
    if (
        contracted_labels == weight_labels[:n]
        and result_labels == features_last
    ):
        return n, 0
    features_first = batch_labels + weight_labels[:-n]
    if (
        contracted_labels == weight_labels[-n:]
        and result_labels == features_first
    ):
        return n, weight_ndim - n
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
    x_ellipsis_axes, _ = _labels(terms[0], x_ndim, subscripts)
    weight_ellipsis_axes, weight_labels = _labels(
        terms[1], weight_ndim, subscripts
    )
    ndim = len(result.replace("...", ""))
    if "..." in result:
        ndim += max(x_ellipsis_axes, weight_ellipsis_axes)
    _, result_labels = _labels(result, ndim, subscripts)
    weight_axes = []
    result_axes = []
    for axis, label in enumerate(result_labels):
        if label in weight_labels:
            weight_axes.append(weight_labels.index(label))
            result_axes.append(axis)
    return tuple(weight_axes), tuple(result_axes), ndim


def _labels(
    term: str, ndim: int, subscripts: str
) -> tuple[int, list[str | int]]:
    """Returns the number of axes of the ellipsis, and one label per axis.

    The axes of an ellipsis are labeled by their distance from its end, where those of several
    operands meet: `..., 2, 1`.
    """
    first_labels, ellipsis, last_labels = term.partition("...")
    num_named = len(first_labels) + len(last_labels)
    num_ellipsis_axes = ndim - num_named
    if num_ellipsis_axes < 0 or (num_ellipsis_axes and not ellipsis):
        raise ArgumentShapeError(
            f"{term!r} of subscripts={subscripts!r} names {num_named} axes, of an "
            f"array that has {ndim}."
        )
    return num_ellipsis_axes, [
        *first_labels,
        *range(num_ellipsis_axes, 0, -1),
        *last_labels,
    ]


@functools.partial(_traced_once, static_argnums=2)
def add_bias(
    y: Num[Array, "*shape"],
    bias: Num[Array, "*batch_and_features"],
    n_batch: int = 0,
) -> Num[Array, "*shape"]:
    """Returns `y + bias`, for a bias over the first `n_batch` axes and the last axes of `y`.

    >>> add_bias(jnp.ones((2, 3, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0]]), 1)[:, 0].tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    return _plus_bias(y, bias, n_batch)


def _plus_bias(y: Array, bias: Array, n_batch: int = 0) -> Array:
    missing_axes = range(n_batch, n_batch + y.ndim - bias.ndim)
    if missing_axes:
        bias = jax.lax.expand_dims(bias, missing_axes)
    if y.dtype == bias.dtype != bool:
        return jax.lax.add(
            y, bias
        )  # `+` is traced for longer, since it promotes
    return y + bias


def broadcast_bias(
    bias: Num[Array, "*sizes"], axes: Sequence[int], ndim: int
) -> Num[Array, "*ones"]:
    """Returns the bias with `ndim` axes: its own at `axes`, and size 1 elsewhere.

    >>> broadcast_bias(jnp.ones((3, 2)), (1, 3), 4).shape
    (1, 3, 1, 2)
    """
    if bias.ndim >= ndim:
        return bias
    missing_axes = [axis for axis in range(ndim) if axis not in axes]
    return jax.lax.expand_dims(bias, missing_axes)
