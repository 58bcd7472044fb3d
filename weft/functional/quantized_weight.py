"""Weights that are stored in 8 or 4 bits, for a model whose weights are not trained.

    format  numbers                                bits per weight  largest error / block maximum
    int8    -127 … 127                             8 + 32 / block   1 / 254
    nf4     16 quantiles of a normal distribution  4 + 32 / block   0.152

The last axis is divided into blocks of up to 64 weights, and each block has a scale of its own, its
largest magnitude. The 16 numbers of nf4 are those of QLoRA (Dettmers et al., 2023, appendix E); two
of them share a byte. Other axes stay as they are, so that a stack of layers, or a layout over a
mesh, is the same for the codes as for the weights.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from weft.errors import ArgumentValueError

WeightFormat = Literal["int8", "nf4"]
"""Name of a format of stored weights."""

WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("int8", "nf4")
"""The names of the formats of stored weights."""

_BLOCK = 64
_INT8_MAX = 127
# The levels of NormalFloat in 4 bits, from -1 to 1, with an exact 0.
_NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495),
        *(0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
        *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
_NF4_MIDDLES = (_NF4[1:] + _NF4[:-1]) / 2


class QuantizedWeight(NamedTuple):
    """A weight in few bits.

    Attributes:
        codes: `Int8[Array, "*axes last"]` in int8, `UInt8[Array, "*axes last/2"]` in nf4.
        scales: `Float32[Array, "*axes blocks"]`, the largest magnitude of each block.
    """

    codes: Integer[Array, "*codes"]
    scales: Float[Array, "*scales"]


def can_quantize(shape: tuple[int, ...]) -> bool:
    """Returns whether a weight of this shape has blocks of at least 8 weights.

    >>> can_quantize((4, 12)), can_quantize((4, 24)), can_quantize((64,))
    (False, True, False)
    """
    return len(shape) >= 2 and block_size(shape) >= 8


def block_size(shape: tuple[int, ...]) -> int:
    """Returns the number of weights with a common scale: the largest power of two up to 64.

    >>> block_size((8, 128)), block_size((8, 80))
    (64, 16)
    """
    return math.gcd(shape[-1], _BLOCK)


def quantize_weight(
    weight: Float[Array, "*axes last"], weight_format: WeightFormat
) -> QuantizedWeight:
    """Rounds a weight to the nearest numbers of a format.

    Raises ArgumentValueError for another format, or if `can_quantize` is False.

    >>> quantized = quantize_weight(jnp.linspace(-2.0, 2.0, 16).reshape(2, 8), "nf4")
    >>> quantized.codes.shape, quantized.scales.tolist()
    ((2, 4), [[2.0], [2.0]])
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ArgumentValueError(
            f"weights have no format {weight_format!r}; expected 'int8' or 'nf4'."
        )
    if not can_quantize(weight.shape):
        raise ArgumentValueError(
            f"a weight of the shape {tuple(weight.shape)} has no blocks of 8; its last axis has to "
            "be a multiple of 8. Keep it in a floating-point dtype."
        )
    blocks = _in_blocks(weight.astype(jnp.float32), block_size(weight.shape))
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    # A block of zeros has any scale.
    relative = blocks / jnp.where(scales == 0, 1.0, scales)[..., None]
    if weight_format == "int8":
        codes = jnp.round(relative * _INT8_MAX).astype(jnp.int8)
        return QuantizedWeight(codes.reshape(weight.shape), scales)
    levels = jnp.searchsorted(jnp.asarray(_NF4_MIDDLES), relative)
    pairs = levels.astype(jnp.uint8).reshape(*weight.shape[:-1], -1, 2)
    return QuantizedWeight(pairs[..., 0] | (pairs[..., 1] << 4), scales)


def dequantize_weight(
    quantized: QuantizedWeight, dtype: DTypeLike = jnp.float32
) -> Float[Array, "*axes last"]:
    """Returns the weight that codes and scales stand for.

    >>> quantized = quantize_weight(jnp.full((2, 8), 3.0), "int8")
    >>> dequantize_weight(quantized)[0, 0].item()
    3.0
    """
    codes, scales = quantized
    if codes.dtype == jnp.int8:
        relative = codes.astype(jnp.float32) / _INT8_MAX
    else:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
        levels = jnp.asarray(_NF4)[pairs]
        relative = levels.reshape(*codes.shape[:-1], -1)
    blocks = _in_blocks(relative, relative.shape[-1] // scales.shape[-1])
    weight = blocks * scales.astype(jnp.float32)[..., None]
    return weight.reshape(relative.shape).astype(dtype)


def dequantized_shape(quantized: QuantizedWeight) -> tuple[int, ...]:
    """Returns the shape of the weight that codes stand for; they may be shapes, too."""
    *axes, last = quantized.codes.shape
    if quantized.codes.dtype == jnp.uint8:
        last *= 2
    return (*axes, last)


def _in_blocks(x: Float[Array, "*axes last"], size: int) -> Array:
    return x.reshape(*x.shape[:-1], -1, size)
