"""Linear maps: one contraction of an input with a weight, plus an optional bias.

`dense` contracts the last axis, `dense_general` any axes (several outputs, several heads, batched
weights), `project` whatever an einsum can say. Each gives the operands' promoted dtype unless
`preferred_element_type` asks for another.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from weft.errors import ArgumentShapeError


def dense(
    x: Num[Array, "*batch input"],
    weight: Num[Array, "input output"],
    bias: Num[Array, " output"] | None = None,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Num[Array, "*batch output"]:
    """Returns `x @ weight + bias`.

    Args:
        x: the input; its last axis is contracted.
        weight: the matrix.
        bias: added to every row; none by default.
        precision: of the multiplication, as in `jax.lax.dot_general`.
        preferred_element_type: the dtype of the sum, as in `jax.lax.dot_general`.

    Raises:
        ArgumentShapeError: if the contracted axes differ in size.

    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    return dense_general(
        x, weight, bias, precision=precision, preferred_element_type=preferred_element_type
    )


def dense_general(
    x: Num[Array, "*input"],
    weight: Num[Array, "*weight"],
    bias: Num[Array, "*features"] | None = None,
    *,
    axis: int | Sequence[int] = -1,
    batch_axes: int | Sequence[int] = (),
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Num[Array, "*output"]:
    """Contracts `axis` of `x` with as many axes of `weight`, and appends the weight's other axes.

    Args:
        x: the input.
        weight: shape `(*batch, *contracted, *features)`, in the order of `batch_axes` and `axis`.
        bias: shape `(*batch, *features)`; none by default.
        axis: the axes of `x` to contract.
        batch_axes: axes of `x` along which each position has a weight of its own. They come first
            in the output.
        precision: of the multiplication, as in `jax.lax.dot_general`.
        preferred_element_type: the dtype of the sum, as in `jax.lax.dot_general`.

    Raises:
        ArgumentShapeError: if the axes that should agree differ in size.

    >>> heads = jnp.ones((8, 4, 2))  # model dim, heads, dim per head
    >>> dense_general(jnp.ones((3, 5, 8)), heads).shape
    (3, 5, 4, 2)
    """
    axes = _canonical_axes(axis, x.ndim)
    batch = _canonical_axes(batch_axes, x.ndim)
    leading = batch + axes
    expected = tuple(x.shape[a] for a in leading)
    if weight.shape[: len(leading)] != expected:
        raise ArgumentShapeError(
            f"weight has shape {weight.shape}, but its leading axes must be {expected}: "
            f"the axes {leading} of x, whose shape is {x.shape}."
        )
    weight_batch = tuple(range(len(batch)))
    weight_axes = tuple(range(len(batch), len(leading)))
    dtype = jnp.result_type(x, weight)
    y = lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        ((axes, weight_axes), (batch, weight_batch)),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if bias is None:
        return y
    free = x.ndim - len(leading)
    shape = (*bias.shape[: len(batch)], *[1] * free, *bias.shape[len(batch) :])
    return y + bias.reshape(shape)


def project(
    subscripts: str,
    x: Num[Array, "*input"],
    weight: Num[Array, "*weight"],
    bias: Num[Array, "*features"] | None = None,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Num[Array, "*output"]:
    """Returns `einsum(subscripts, x, weight) + bias`.

    For contractions whose weight keeps its axes in an order of its own, as an attention's output
    projection, whose weight is stored like that of its input projections.

    Args:
        subscripts: of an einsum over `x` and `weight`.
        x: the input.
        weight: the weight.
        bias: broadcast against the result's last axes; none by default.
        precision: of the multiplication, as in `jax.numpy.einsum`.
        preferred_element_type: the dtype of the sum, as in `jax.numpy.einsum`.

    >>> weight = jnp.ones((8, 4, 2))  # model dim, heads, dim per head
    >>> project("btnh,dnh->btd", jnp.ones((3, 5, 4, 2)), weight).shape
    (3, 5, 8)
    """
    y = jnp.einsum(
        subscripts, x, weight, precision=precision, preferred_element_type=preferred_element_type
    )
    return y if bias is None else y + bias


def _canonical_axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(a % ndim for a in axes)
