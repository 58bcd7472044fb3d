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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from weft.errors import ArgumentValueError
from weft.functional.arrays import OutSharding
from weft.functional.fp8 import (
    dot_general_transpose_lhs,
    dot_general_transpose_rhs,
)

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def int8_dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: OutSharding = None,
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
    dtype = _checked(
        "int8_dot_general", lhs, rhs, preferred_element_type, out_sharding
    )
    y: Any = _int8(lhs, rhs, _as_tuples(dimension_numbers), precision)
    return y.astype(dtype)


def fp8_dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: OutSharding = None,
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
    dtype = _checked(
        "fp8_dot_general", lhs, rhs, preferred_element_type, out_sharding
    )
    y: Any = _fp8(lhs, rhs, _as_tuples(dimension_numbers))
    return y.astype(dtype)


def _checked(
    name: str,
    lhs: Array,
    rhs: Array,
    dtype: DTypeLike | None,
    out_sharding: OutSharding,
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
    if dtype is None:
        return jnp.result_type(lhs, rhs)
    return dtype


def _as_tuples(numbers: DimensionNumbers) -> DimensionNumbers:
    """Returns the numbers in a form that is hashable."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers
    contracted = tuple(lhs_contracted), tuple(rhs_contracted)
    return contracted, (tuple(lhs_batch), tuple(rhs_batch))


class _Quantized(NamedTuple):
    """An array in 8 bits, to be multiplied by a scale: of size 1 along axes, or a scalar."""

    numbers: Array
    scale: Array


def _quantized(
    x: Array, dtype: DTypeLike, axes: Sequence[int] | None
) -> _Quantized:
    """Quantizes `x` with a scale for the axes, or of the whole array."""
    x = x.astype(jnp.float32)
    is_int = jnp.issubdtype(dtype, jnp.integer)
    limits = jnp.iinfo(dtype) if is_int else jnp.finfo(dtype)
    largest_magnitude = jnp.max(
        jnp.abs(x), axis=axes, keepdims=True, initial=0.0
    )
    # Normal for the scale of zeros; NaN remains NaN.
    scale = jnp.maximum(
        largest_magnitude / float(limits.max), jnp.finfo(jnp.float32).tiny
    )
    scaled = x / scale
    if is_int:
        scaled = jnp.round(scaled)
    if axes is None:
        scale = scale.reshape(())
    return _Quantized(scaled.astype(dtype), scale)


def _int8_product(
    lhs: Array, rhs: Array, numbers: DimensionNumbers
) -> Float[Array, "*result"]:
    """Returns the product of operands that are rounded to int8 over the contracted axes."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers
    int_lhs, lhs_scale = _quantized(lhs, jnp.int8, lhs_contracted)
    int_rhs, rhs_scale = _quantized(rhs, jnp.int8, rhs_contracted)
    y = jax.lax.dot_general(
        int_lhs, int_rhs, numbers, preferred_element_type=jnp.int32
    )
    # The axes of `y` are (*batch, *axes of lhs alone, *axes of rhs alone).
    n_batch = len(lhs_batch)
    n_lhs = lhs.ndim - n_batch - len(lhs_contracted)
    n_rhs = rhs.ndim - n_batch - len(rhs_contracted)
    lhs_scale = _result_axes(lhs_scale, lhs_batch, lhs_contracted)
    rhs_scale = _result_axes(rhs_scale, rhs_batch, rhs_contracted)
    lhs_scale = jax.lax.expand_dims(lhs_scale, range(y.ndim - n_rhs, y.ndim))
    rhs_scale = jax.lax.expand_dims(rhs_scale, range(n_batch, n_batch + n_lhs))
    return y.astype(jnp.float32) * lhs_scale * rhs_scale


def _result_axes(
    scale: Array, batch: Sequence[int], contracted: Sequence[int]
) -> Array:
    """Returns an operand's scale in the order of the result's axes, without contracted ones."""
    free = [a for a in range(scale.ndim) if a not in (*batch, *contracted)]
    result_axes = (*batch, *free)
    shape = [scale.shape[a] for a in result_axes]
    return jax.lax.transpose(scale, (*result_axes, *contracted)).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _int8(
    lhs: Array,
    rhs: Array,
    numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike,
) -> Float[Array, "*result"]:
    return _int8_product(lhs, rhs, numbers)


def _int8_fwd(
    lhs: Array,
    rhs: Array,
    numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike,
) -> tuple[Array, tuple[Array, Array]]:
    y: Any = _int8(lhs, rhs, numbers, precision)
    return y, (lhs, rhs)


def _int8_bwd(
    numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike,
    residuals: tuple[Array, Array],
    dy: Array,
) -> tuple[Array, Array]:
    lhs, rhs = residuals
    dlhs = dot_general_transpose_lhs(
        dy, lhs, rhs, dimension_numbers=numbers, dot_general=_int8_product
    )
    drhs = dot_general_transpose_rhs(
        dy.astype(lhs.dtype),
        lhs,
        rhs,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return dlhs.astype(lhs.dtype), drhs.astype(rhs.dtype)


_int8.defvjp(_int8_fwd, _int8_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fp8(
    lhs: Array, rhs: Array, numbers: DimensionNumbers
) -> Float[Array, "*result"]:
    y, _ = _fp8_fwd(lhs, rhs, numbers)
    return y


class _Fp8Residuals(NamedTuple):
    lhs: _Quantized
    rhs: _Quantized
    empty_lhs: Array  # empty arrays carry the operands' dtypes
    empty_rhs: Array


def _fp8_fwd(
    lhs: Array, rhs: Array, numbers: DimensionNumbers
) -> tuple[Array, _Fp8Residuals]:
    fp8_lhs = _quantized(lhs, jnp.float8_e4m3fn, None)
    fp8_rhs = _quantized(rhs, jnp.float8_e4m3fn, None)
    y = jax.lax.dot_general(
        fp8_lhs.numbers,
        fp8_rhs.numbers,
        numbers,
        preferred_element_type=jnp.float32,
    )
    y *= fp8_lhs.scale * fp8_rhs.scale
    empty_lhs = jnp.zeros(0, lhs.dtype)
    empty_rhs = jnp.zeros(0, rhs.dtype)
    return y, _Fp8Residuals(fp8_lhs, fp8_rhs, empty_lhs, empty_rhs)


def _fp8_bwd(
    numbers: DimensionNumbers, residuals: _Fp8Residuals, dy: Array
) -> tuple[Array, Array]:
    lhs, rhs, empty_lhs, empty_rhs = residuals
    fp8_dy = _quantized(dy, jnp.float8_e5m2, None)
    operands = fp8_dy.numbers, lhs.numbers, rhs.numbers
    options: Any = {
        "dimension_numbers": numbers,
        "preferred_element_type": jnp.float32,
    }
    dlhs = dot_general_transpose_lhs(*operands, **options) * (
        rhs.scale * fp8_dy.scale
    )
    drhs = dot_general_transpose_rhs(*operands, **options) * (
        lhs.scale * fp8_dy.scale
    )
    return dlhs.astype(empty_lhs.dtype), drhs.astype(empty_rhs.dtype)


_fp8.defvjp(_fp8_fwd, _fp8_bwd)
