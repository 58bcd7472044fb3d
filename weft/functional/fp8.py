"""Matrix products in 8-bit floating point, with delayed scaling (Micikevicius et al., 2022).

A tensor is divided by a scale before it is rounded to 8 bits. The scale follows from the largest
magnitudes of the tensor in previous steps, its amax history, so that one pass over the tensor is
enough. Inputs and weights have the dtype e4m3, gradients e5m2.

Gradients return the next values of scales and histories: with respect to `scale` and
`amax_history`, functions return not a derivative but what replaces them after the step. The
optimizer must write these values instead of adding them.

The `qdq` functions round to 8 bits and convert back, and the compiler may replace the product of
two such tensors by one of 8 bits. `quantized_dot` calls the product of 8 bits itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from weft.errors import ArgumentValueError
from weft.functional.arrays import SpecEntry, explicit_spec, sharded_by_compiler

# Collection of variables whose gradients are their next values.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

DimensionNumbers = Any
_DTYPES = tuple(
    map(
        jnp.dtype,
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


def get_fp8_max(fp8_dtype: DTypeLike, out_dtype: DTypeLike) -> Float[Array, ""]:
    """Returns the largest number of a dtype of 8 bits, in another dtype.

    Raises ArgumentValueError if the dtype does not have 8 bits.

    >>> get_fp8_max(jnp.float8_e4m3fn, jnp.float32)
    Array(448., dtype=float32)
    """
    if jnp.dtype(fp8_dtype) not in _DTYPES:
        raise ArgumentValueError(
            f"{jnp.dtype(fp8_dtype).name} is not a dtype of 8 bits; expected one of "
            f"{', '.join(dtype.name for dtype in _DTYPES)}."
        )
    return jnp.asarray(jnp.finfo(fp8_dtype).max, out_dtype)


def quantize(
    x: Array, q_dtype: DTypeLike, scale: Array, compute_dtype: DTypeLike
) -> Array:
    """Returns `x / scale`, clipped to the range of `q_dtype` and rounded to it."""
    largest = get_fp8_max(q_dtype, compute_dtype)
    scaled = x / jnp.broadcast_to(jnp.asarray(scale, compute_dtype), x.shape)
    return jnp.clip(scaled, -largest, largest).astype(q_dtype)


def dequantize(x: Array, dq_dtype: DTypeLike | None, scale: Array) -> Array:
    """Returns `x * scale` in `dq_dtype`."""
    return x.astype(dq_dtype) * jnp.broadcast_to(
        jnp.asarray(scale, dq_dtype), x.shape
    )


def qdq(
    x: Array, q_dtype: DTypeLike, scale: Array, compute_dtype: DTypeLike
) -> Array:
    """Returns `x` rounded to multiples of `scale` of 8 bits, in its own dtype.

    >>> qdq(jnp.array([1.0, 3.3, 2000.0]), jnp.float8_e4m3fn, jnp.array([2.0]), jnp.float32)
    Array([  1.  ,   3.25, 896.  ], dtype=float32)
    """
    return dequantize(
        quantize(x, q_dtype, scale, compute_dtype), x.dtype, scale
    )


def compute_scale(
    amax: Array, scale: Array, fp8_max: float | Array, margin: int = 0
) -> Array:
    """Returns the scale that maps `amax` to `fp8_max / 2 ** margin`.

    The given scale remains where `amax` is 0 or not finite.

    >>> compute_scale(jnp.array(896.0), jnp.array([1.0]), 448.0)
    Array([2.], dtype=float32)
    """
    # In this order of operations, which defines the last bit.
    factor = (fp8_max / amax) / (2**margin)
    return 1 / jnp.where((amax > 0) & jnp.isfinite(amax), factor, 1 / scale)


def compute_amax_history(
    x: Array, amax_history: Float[Array, " steps"]
) -> Float[Array, " steps"]:
    """Returns the history with the largest magnitude of `x` in place of the oldest.

    >>> compute_amax_history(jnp.array([-7.0, 2.0]), jnp.array([3.0, 4.0, 5.0])).tolist()
    [7.0, 5.0, 3.0]
    """
    largest = jnp.max(jnp.abs(x)).astype(amax_history.dtype)
    return jnp.roll(amax_history, -1).at[0].set(largest)


def update_fp8_meta(
    x: Array, q_dtype: DTypeLike, scale: Array, amax_history: Array
) -> tuple[Array, Array]:
    """Returns the scale for `x`, from the history before it, and the history with it."""
    largest = get_fp8_max(q_dtype, jnp.float32)
    scale = compute_scale(jnp.max(amax_history), scale, largest)
    return scale, compute_amax_history(x, amax_history)


def quantize_dequantize_update(
    x: Array,
    q_dtype: DTypeLike,
    scale: Array,
    amax_history: Array,
    compute_dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Returns `qdq` of `x`, the scale for it, and the history with it."""
    scale, amax_history = update_fp8_meta(x, q_dtype, scale, amax_history)
    return qdq(x, q_dtype, scale, compute_dtype), scale, amax_history


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Array,
    scale: Array,
    amax_history: Array,
) -> Array:
    """Returns an operand rounded to 8 bits; its gradient passes unchanged."""
    return in_qdq_fwd(compute_dtype, q_dtype, inp, scale, amax_history)[0]


def in_qdq_fwd(compute_dtype, q_dtype, inp, scale, amax_history):
    """Returns the result of `in_qdq` and what its gradient needs."""
    y, *updates = quantize_dequantize_update(
        inp, q_dtype, scale, amax_history, compute_dtype
    )
    return y, tuple(updates)


def in_qdq_bwd(compute_dtype, q_dtype, res, g):
    """Returns the gradients of `in_qdq`."""
    return g, *res


in_qdq.defvjp(in_qdq_fwd, in_qdq_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def out_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    out: Array,
    scale: Array,
    amax_history: Array,
) -> Array:
    """Returns a result unchanged; its gradient is rounded to 8 bits."""
    return out


def out_qdq_fwd(compute_dtype, q_dtype, out, scale, amax_history):
    """Returns the result of `out_qdq` and what its gradient needs."""
    return out, (scale, amax_history)


def out_qdq_bwd(compute_dtype, q_dtype, res, g):
    """Returns the gradients of `out_qdq`."""
    scale, amax_history = res
    return quantize_dequantize_update(
        g, q_dtype, scale, amax_history, compute_dtype
    )


out_qdq.defvjp(out_qdq_fwd, out_qdq_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_q(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Array,
    scale: Array,
    amax_history: Array,
) -> tuple[Array, Array]:
    """Returns an operand in 8 bits, without a gradient, and its scale."""
    return in_q_fwd(compute_dtype, q_dtype, inp, scale, amax_history)[0]


def in_q_fwd(compute_dtype, q_dtype, inp, scale, amax_history):
    """Returns the result of `in_q` and what its gradient needs."""
    scale, amax_history = update_fp8_meta(inp, q_dtype, scale, amax_history)
    return (quantize(inp, q_dtype, scale, compute_dtype), scale), (
        scale,
        amax_history,
    )


def in_q_bwd(compute_dtype, q_dtype, res, g):
    """Returns the gradients of `in_q`."""
    return None, *res


in_q.defvjp(in_q_fwd, in_q_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def out_dq(
    dq_type: DTypeLike | None, lhs_scale: Array, rhs_scale: Array, out: Array
) -> Array:
    """Returns a product times both scales; its gradient passes unchanged."""
    return dequantize(out, dq_type, lhs_scale * rhs_scale)


def out_dq_fwd(dq_type, lhs_scale, rhs_scale, out):
    """Returns the result of `out_dq` and what its gradient needs."""
    return out_dq(dq_type, lhs_scale, rhs_scale, out), None


def out_dq_bwd(dq_type, res, g):
    """Returns the gradients of `out_dq`."""
    return None, None, g


out_dq.defvjp(out_dq_fwd, out_dq_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def quantized_dot(
    lhs: Array,
    q_lhs: Array,
    lhs_scale: Array,
    rhs: Array,
    q_rhs: Array,
    rhs_scale: Array,
    out_grad_scale: Array,
    out_grad_amax_history: Array,
    dimension_numbers: DimensionNumbers,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Returns the product of `q_lhs` and `q_rhs`, of 8 bits; its gradient is one as well.

    `lhs` and `rhs` are the tensors before quantization, which receive the gradient.
    """
    return lax.dot_general(
        q_lhs,
        q_rhs,
        dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=preferred_element_type,
    )


def quantized_dot_fwd(*args):
    """Returns the result of `quantized_dot` and what its gradient needs: all of its arrays."""
    return quantized_dot(*args), args[:8]


def quantized_dot_bwd(dimension_numbers, preferred_element_type, res, g):
    """Returns the gradients of `quantized_dot`."""
    lhs, q_lhs, lhs_scale, rhs, q_rhs, rhs_scale, scale, amax_history = res
    scale, amax_history = update_fp8_meta(
        g, jnp.float8_e5m2, scale, amax_history
    )
    q_g = quantize(g, jnp.float8_e5m2, scale, preferred_element_type)
    options = {
        "dimension_numbers": dimension_numbers,
        "precision": lax.Precision.HIGHEST,
        "preferred_element_type": preferred_element_type,
    }
    dlhs = dot_general_transpose_lhs(q_g, lhs, q_rhs, **options)
    drhs = dot_general_transpose_rhs(q_g, q_lhs, rhs, **options)
    dlhs = dequantize(dlhs, preferred_element_type, rhs_scale * scale)
    drhs = dequantize(drhs, preferred_element_type, lhs_scale * scale)
    return dlhs, None, None, drhs, None, None, scale, amax_history


quantized_dot.defvjp(quantized_dot_fwd, quantized_dot_bwd)


class ProductOptions(TypedDict, total=False):
    """Options of `jax.lax.dot_general`."""

    precision: lax.PrecisionLike
    preferred_element_type: DTypeLike | None


def dot_general_transpose_lhs(
    g: Array,
    x: Array,
    y: Array,
    *,
    dimension_numbers: DimensionNumbers,
    swap_ans: bool = False,
    dot_general: Callable[..., Array] = lax.dot_general,
    **options: Unpack[ProductOptions],
) -> Array:
    """Returns the gradient of `dot_general(x, y)` with respect to `x`, given that of the result.

    The dtypes may differ. With `swap_ans`, `g` is the gradient of `dot_general(y, x)`. `options`
    are those of `dot_general`, which computes the gradient.
    """
    (x_contracted, y_contracted), (x_batch, y_batch) = dimension_numbers
    x_free = [a for a in range(x.ndim) if a not in (*x_contracted, *x_batch)]
    y_free = [a for a in range(y.ndim) if a not in (*y_contracted, *y_batch)]
    # The axes of `g` are (*batch, *x_free, *y_free), or with `swap_ans` (*batch, *y_free, *x_free).
    n_batch = len(x_batch)
    start = n_batch if swap_ans else n_batch + len(x_free)
    g_contracted = tuple(range(start, start + len(y_free)))
    g_batch = tuple(range(n_batch))
    product = dot_general(
        g, y, ((g_contracted, tuple(y_free)), (g_batch, y_batch)), **options
    )
    # Its last axes are the contracted ones, in the order of `y`.
    x_axes = [*x_batch, *x_free]
    x_axes += [x_contracted[i] for i in np.argsort(y_contracted)]
    return lax.transpose(product, np.argsort(x_axes))


def dot_general_transpose_rhs(
    g: Array,
    x: Array,
    y: Array,
    *,
    dimension_numbers: DimensionNumbers,
    **options: Unpack[ProductOptions],
) -> Array:
    """Returns the gradient of `dot_general(x, y)` with respect to `y`."""
    (x_contracted, y_contracted), (x_batch, y_batch) = dimension_numbers
    swapped = (y_contracted, x_contracted), (y_batch, x_batch)
    return dot_general_transpose_lhs(
        g, y, x, dimension_numbers=swapped, swap_ans=True, **options
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Returns `jax.lax.dot_general`, in low precision, and its derivative in high precision.

    `precision` and `preferred_element_type` have no effect.
    """
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=lax.Precision.DEFAULT
    )


@dot_general_with_precision.defjvp
def dot_general_with_precision_jvp(
    dimension_numbers, precision, preferred_element_type, primals, tangents
):
    """Returns `dot_general_with_precision` and its derivative."""
    lhs, rhs = primals
    lhs_dot, rhs_dot = tangents
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=lax.Precision.HIGHEST,
    )
    out = dot_general_with_precision(lhs, rhs, dimension_numbers)
    return out, product(lhs, rhs_dot) + product(lhs_dot, rhs)


def fp8_scaled_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_scale: Array,
    rhs_scale: Array,
    grad_scale: Array,
    lhs_amax_history: Array,
    rhs_amax_history: Array,
    grad_amax_history: Array,
    quantize_compute_type: DTypeLike = jnp.float32,
) -> Array:
    """Returns `jax.lax.dot_general` of both operands quantized to 8 bits, in full scale.

    Args:
        precision: has no effect.
        lhs_scale, rhs_scale, grad_scale: the scales of the last step, shape `(1,)`.
        lhs_amax_history, rhs_amax_history, grad_amax_history: the histories, shape `(steps,)`.
        quantize_compute_type: the dtype in which operands are scaled.
    """

    def product(
        lhs: Array,
        rhs: Array,
        lhs_meta: tuple[Array, Array],
        rhs_meta: tuple[Array, Array],
        grad_meta: tuple[Array, Array],
    ) -> Array:
        quantize_operand: Any = functools.partial(
            in_q, quantize_compute_type, jnp.float8_e4m3fn
        )
        q_lhs, lhs_scale = quantize_operand(lhs, *lhs_meta)
        q_rhs, rhs_scale = quantize_operand(rhs, *rhs_meta)
        y = quantized_dot(
            lhs,
            q_lhs,
            lhs_scale,
            rhs,
            q_rhs,
            rhs_scale,
            *grad_meta,
            dimension_numbers,
            preferred_element_type,
        )
        return out_dq(preferred_element_type, lhs_scale, rhs_scale, y)

    metas = (
        (lhs_scale, lhs_amax_history),
        (rhs_scale, rhs_amax_history),
        (grad_scale, grad_amax_history),
    )
    spec = _spec_of_product(lhs, rhs, dimension_numbers)
    return sharded_by_compiler(product, lhs, rhs, *metas, spec=spec)


def _spec_of_product(
    lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers
) -> list[SpecEntry]:
    """Returns the sharding of a product over Explicit axes: that of its axes in the operands."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_spec = explicit_spec(lhs)
    spec = [lhs_spec[axis] for axis in lhs_batch]
    for axis, entry in enumerate(lhs_spec):
        if axis not in (*lhs_contracted, *lhs_batch):
            spec.append(entry)
    # Each axis of the mesh shards one axis at most.
    used_mesh_axes = set(jax.tree.leaves(spec))
    for axis, entry in enumerate(explicit_spec(rhs)):
        if axis not in (*rhs_contracted, *rhs_batch):
            is_free = used_mesh_axes.isdisjoint(jax.tree.leaves(entry))
            spec.append(entry if is_free else None)
    return spec
