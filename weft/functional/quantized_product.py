"""Matrix products in 8 bits, with scales computed in each call: `jax.lax.dot_general` for training.

    format  forward         gradient of the first operand  gradient of the second
    int8    int8 × int8     int8 × int8                    operands' dtype
    fp8     e4m3 × e4m3     e5m2 × e4m3                    e5m2 × e4m3

Operands are divided by a scale that maps their largest magnitude to the format's largest number,
and rounded to the nearest. A gradient passes the rounding unchanged (Bengio et al., 2013).

In int8, every row and column of the product has a scale of its own, over the contracted axes. The
second operand is the weight of a layer. Its gradient, a sum over all positions of a batch, is the
product in which noise of 8 bits hurts, and is computed in full (SwitchBack, Wortsman et al., 2023).
In fp8, a tensor has one scale; gradients have more range and fewer digits (Micikevicius et al.,
2022), and what the backward pass keeps of both operands has 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from weft.errors import ArgumentValueError
from weft.functional.fp8 import dot_general_transpose_lhs, dot_general_transpose_rhs

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def int8_dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Float[Array, "*result"]:
    """Returns `jax.lax.dot_general` of operands rounded to int8, for `dot_general=` of layers.

    Products are summed in int32, without rounding. Has derivatives in reverse mode only.

    Args:
        rhs: the weight, whose gradient is computed in the operands' dtype.
        precision: of the weight's gradient.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype.
        out_sharding: must be None.

    Raises:
        ArgumentValueError: if `out_sharding` is set, or an operand has no floating-point numbers.

    >>> x, w = jnp.array([[1.0, 0.5], [100.0, 50.0]]), jnp.array([[1.0], [2.0]])
    >>> matrices = ((1,), (0,)), ((), ())
    >>> int8_dot_general(x, w, matrices).round().tolist()  # with 64 / 127 for 1 / 2
    [[2.0], [202.0]]
    """
    dtype = _checked("int8_dot_general", lhs, rhs, preferred_element_type, out_sharding)
    y: Any = _int8(lhs, rhs, _as_tuples(dimension_numbers), precision)
    return y.astype(dtype)


def fp8_dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Float[Array, "*result"]:
    """Returns `jax.lax.dot_general` of operands rounded to fp8, for `dot_general=` of layers.

    Products are summed in float32. Has derivatives in reverse mode only.

    Args:
        precision: has no effect.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype.
        out_sharding: must be None.

    Raises:
        ArgumentValueError: if `out_sharding` is set, or an operand has no floating-point numbers.

    >>> x, w = jnp.array([[448.0, 17.0]]), jnp.array([[1.0], [1.0]])
    >>> matrices = ((1,), (0,)), ((), ())
    >>> fp8_dot_general(x, w, matrices).round(1).tolist()  # 16 and 18 are neighbors
    [[464.0]]
    """
    dtype = _checked("fp8_dot_general", lhs, rhs, preferred_element_type, out_sharding)
    y: Any = _fp8(lhs, rhs, _as_tuples(dimension_numbers))
    return y.astype(dtype)


def _checked(
    name: str, lhs: Array, rhs: Array, dtype: DTypeLike | None, out_sharding: Any
) -> DTypeLike:
    """Returns the dtype of the result."""
    for which, x in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ArgumentValueError(
                f"{which} of {name} has the dtype {x.dtype.name}; expected floating-point numbers, "
                "which are quantized in the call."
            )
    if out_sharding is not None:
        raise ArgumentValueError(
            f"{name} has no out_sharding, but got {out_sharding}. Leave it out, and constrain the "
            "result instead: jax.lax.with_sharding_constraint(y, sharding)."
        )
    return jnp.result_type(lhs, rhs) if dtype is None else dtype


def _as_tuples(numbers: DimensionNumbers) -> DimensionNumbers:
    (a, b), (c, d) = numbers
    return (tuple(a), tuple(b)), (tuple(c), tuple(d))


def _quantized(x: Array, dtype: DTypeLike, axes: Sequence[int] | None) -> tuple[Array, Array]:
    """Returns `x` over a scale, in 8 bits, and the scale, of size 1 in `axes`, or a scalar."""
    x = x.astype(jnp.float32)
    is_int = jnp.issubdtype(dtype, jnp.integer)
    largest = float((jnp.iinfo if is_int else jnp.finfo)(dtype).max)
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    # Normal for the scale of zeros; NaN remains NaN.
    scale = jnp.maximum(amax / largest, jnp.finfo(jnp.float32).tiny)
    scaled = x / scale
    q = (jnp.round(scaled) if is_int else scaled).astype(dtype)
    return q, scale.reshape(()) if axes is None else scale


def _int8_product(lhs: Array, rhs: Array, numbers: DimensionNumbers) -> Float[Array, "*result"]:
    """Returns the product of operands that are rounded to int8 over the contracted axes."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers
    q_lhs, lhs_scale = _quantized(lhs, jnp.int8, lhs_contracted)
    q_rhs, rhs_scale = _quantized(rhs, jnp.int8, rhs_contracted)
    y = jax.lax.dot_general(q_lhs, q_rhs, numbers, preferred_element_type=jnp.int32)
    n_batch = len(lhs_batch)
    n_lhs = lhs.ndim - n_batch - len(lhs_contracted)
    n_rhs = rhs.ndim - n_batch - len(rhs_contracted)
    lhs_scale = _result_axes(lhs_scale, lhs_batch, lhs_contracted)
    rhs_scale = _result_axes(rhs_scale, rhs_batch, rhs_contracted)
    lhs_scale = jax.lax.expand_dims(lhs_scale, range(y.ndim - n_rhs, y.ndim))
    rhs_scale = jax.lax.expand_dims(rhs_scale, range(n_batch, n_batch + n_lhs))
    return y.astype(jnp.float32) * lhs_scale * rhs_scale


def _result_axes(scale: Array, batch: Sequence[int], contracted: Sequence[int]) -> Array:
    free = [a for a in range(scale.ndim) if a not in (*batch, *contracted)]
    shape = [scale.shape[a] for a in (*batch, *free)]
    return jax.lax.transpose(scale, (*batch, *free, *contracted)).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _int8(
    lhs: Array, rhs: Array, numbers: DimensionNumbers, precision: jax.lax.PrecisionLike
) -> Float[Array, "*result"]:
    return _int8_product(lhs, rhs, numbers)


def _int8_fwd(lhs, rhs, numbers, precision):
    return _int8(lhs, rhs, numbers, precision), (lhs, rhs)


def _int8_bwd(numbers, precision, residuals, g):
    lhs, rhs = residuals
    of_lhs = dot_general_transpose_lhs(
        g, lhs, rhs, dimension_numbers=numbers, dot_general=_int8_product
    )
    of_rhs = dot_general_transpose_rhs(
        g.astype(lhs.dtype),
        lhs,
        rhs,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return of_lhs.astype(lhs.dtype), of_rhs.astype(rhs.dtype)


_int8.defvjp(_int8_fwd, _int8_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fp8(lhs: Array, rhs: Array, numbers: DimensionNumbers) -> Float[Array, "*result"]:
    return _fp8_fwd(lhs, rhs, numbers)[0]


def _fp8_fwd(lhs, rhs, numbers):
    q_lhs, lhs_scale = _quantized(lhs, jnp.float8_e4m3fn, None)
    q_rhs, rhs_scale = _quantized(rhs, jnp.float8_e4m3fn, None)
    y = jax.lax.dot_general(q_lhs, q_rhs, numbers, preferred_element_type=jnp.float32)
    y *= lhs_scale * rhs_scale
    # Empty arrays carry the operands' dtypes.
    empty = jnp.zeros(0, lhs.dtype), jnp.zeros(0, rhs.dtype)
    return y, (q_lhs, lhs_scale, q_rhs, rhs_scale, empty)


def _fp8_bwd(numbers, residuals, g):
    q_lhs, lhs_scale, q_rhs, rhs_scale, (like_lhs, like_rhs) = residuals
    q_g, scale = _quantized(g, jnp.float8_e5m2, None)
    options: Any = {"dimension_numbers": numbers, "preferred_element_type": jnp.float32}
    of_lhs = dot_general_transpose_lhs(q_g, q_lhs, q_rhs, **options) * (rhs_scale * scale)
    of_rhs = dot_general_transpose_rhs(q_g, q_lhs, q_rhs, **options) * (lhs_scale * scale)
    return of_lhs.astype(like_lhs.dtype), of_rhs.astype(like_rhs.dtype)


_fp8.defvjp(_fp8_fwd, _fp8_bwd)
