"""Weights in int8 with a scale for each output, for products with floats in generation.

    y = (x @ codes) * scales

The scale of an output is its largest weight / 127. Since it is the same for all inputs, it is
applied to the product. Codes have the axes of inputs first, whatever the order in the weight.
`weft.functional.quantize_weight` keeps the order, and has scales of blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from weft.functional import arrays
from weft.functional.embedding import lookup

_INT8_MAX = 127
_BLOCK = 64


class Int8Weight(NamedTuple):
    """A weight in int8.

    Attributes:
        codes: from -127 to 127.
        scales: of the outputs.
    """

    codes: Int8[Array, "*inputs *outputs"]
    scales: Float[Array, "*outputs"]


def int8_weight(
    weight: Float[Array, "*axes"], input_axes: tuple[int, ...]
) -> Int8Weight:
    """Rounds a weight to int8; its axes are those of inputs, and the others of outputs.

    >>> int8_weight(jnp.array([[1.0, -0.5], [0.0, 127.0]]), (1,)).codes.tolist()
    [[127, 0], [-64, 127]]
    """
    num_inputs = len(input_axes)
    weight = jnp.moveaxis(weight, input_axes, range(num_inputs))
    largest = jnp.max(jnp.abs(weight), axis=range(num_inputs))
    scales = largest / _INT8_MAX
    # Codes of zeros are 0 with any scale.
    divisors = jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    divisors = arrays.to_ndim(divisors, weight.ndim)
    codes = jnp.round(weight.astype(jnp.float32) / divisors)
    # Scales of 16 bits are rounded, so that the largest weight may be more than 127 of them.
    codes = jnp.clip(codes, -_INT8_MAX, _INT8_MAX)
    return Int8Weight(codes.astype(jnp.int8), scales)


def int8_product(
    x: Float[Array, "*batch_and_inputs"], weight: Int8Weight
) -> Float[Array, "*batch_and_outputs"]:
    """Returns the product over the axes of inputs, the last ones of `x`.

    >>> weight = int8_weight(jnp.array([[1.0, -2.0], [0.0, 2.0]]), (0,))
    >>> int8_product(jnp.array([[1.0, 2.0]]), weight).tolist()
    [[1.0, 2.0]]
    """
    codes, scales = weight
    num_inputs = codes.ndim - scales.ndim
    dtype = jnp.promote_types(x.dtype, scales.dtype)
    sum_dtype = jnp.promote_types(dtype, jnp.float32)
    if arrays.on_one_cpu():
        batch_shape = x.shape[: x.ndim - num_inputs]
        depth = math.prod(codes.shape[:num_inputs])
        y = _product_by_blocks(
            x.reshape(-1, depth).astype(sum_dtype), codes.reshape(depth, -1)
        )
        y = y.reshape(*batch_shape, *scales.shape)
    else:
        axes = tuple(range(x.ndim - num_inputs, x.ndim))
        y = jax.lax.dot_general(
            x,
            codes.astype(x.dtype),
            ((axes, tuple(range(num_inputs))), ((), ())),
            preferred_element_type=sum_dtype,
        )
    return (y * arrays.to_ndim(scales, y.ndim)).astype(dtype)


def _product_by_blocks(
    x: Float[Array, "rows inputs"], codes: Int8[Array, "inputs outputs"]
) -> Float[Array, "rows outputs"]:
    """Sums the products of some inputs after the other.

    XLA's CPU backend would write the whole weight to memory in floats, which takes many times
    longer than reading it. The floats of a block stay in the cache. For one row, those of one input
    are not even written: conversion, product and sum are one loop.
    """
    num_rows, depth = x.shape
    block = 1 if num_rows == 1 else math.gcd(depth, _BLOCK)

    def add_block(i: Array, y: Array) -> Array:
        start = i * block
        some_x = jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)
        some_codes = jax.lax.dynamic_slice_in_dim(codes, start, block)
        return y + some_x @ some_codes.astype(x.dtype)

    zeros = jnp.zeros((num_rows, codes.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, depth // block, add_block, zeros)


def int8_lookup(
    table: Int8Weight, ids: Int[Array, "*shape"]
) -> Float[Array, "*shape dim"]:
    """Returns the vectors of a table whose inputs are dimensions, and whose outputs are ids.

    An id outside returns NaN, as in `lookup`.

    >>> table = int8_weight(jnp.array([[1.0, 0.0], [0.0, 127.0]]), (1,))
    >>> int8_lookup(table, jnp.array([1, 0])).tolist()
    [[0.0, 127.0], [1.0, 0.0]]
    """
    codes = jnp.take(table.codes, ids, axis=1, mode="clip")
    scales = lookup(table.scales, ids)
    return jnp.moveaxis(codes, 0, -1).astype(scales.dtype) * scales[..., None]
