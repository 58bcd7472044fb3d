"""Conversion to fewer bits: of whole trees, and without bias by stochastic rounding.

Rounding to the nearest number loses every update of a parameter that is smaller than half the
distance to the next number: in bfloat16, with 8 significant bits, less than 1/512 of the parameter.
Stochastic rounding keeps them on average: it rounds up with the probability that makes the
expected result exact (Gupta et al., 2015).
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

T = TypeVar("T")


def cast_floats(tree: T, dtype: jax.typing.DTypeLike | None) -> T:
    """Casts the floating-point arrays of a tree to a dtype; None leaves all unchanged.

    >>> cast_floats({"x": jnp.ones(2), "n": 3}, "bfloat16")["x"].dtype
    dtype(bfloat16)
    """

    def cast(x: object) -> object:
        is_array = isinstance(x, jax.Array | np.ndarray)
        return x.astype(dtype) if is_array and jnp.issubdtype(x.dtype, jnp.floating) else x

    return tree if dtype is None else jax.tree.map(cast, tree)


def stochastic_round(x: Float[Array, "*shape"], key: Key[Array, ""]) -> Float[Array, "*shape"]:
    """Rounds float32 to one of the two nearest bfloat16 numbers, such that the mean is `x`.

    A number that bfloat16 can represent is returned exactly, with its sign also for 0. Infinities
    and NaN are kept, and a finite number never becomes infinite: those beyond the largest bfloat16
    become that. The numbers drawn do not depend on how `x` is sharded.

    Args:
        x: converted to float32.
        key: equal keys round equally.

    >>> x = jnp.full(1000, 1 + 2**-10)  # between 1 and 1 + 2**-7
    >>> rounded = stochastic_round(x, jax.random.key(0))
    >>> sorted(set(rounded.tolist())), round(float(rounded.mean(dtype="float32")), 3)
    ([1.0, 1.0078125], 1.001)
    """
    x = x.astype(jnp.float32)
    # bfloat16 is the upper half of float32. Adding a random lower half to the bits, whose magnitude
    # is ordered as the numbers are, carries into the upper half as often as it should.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + _random_half(key, x.shape)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    largest = jnp.finfo(jnp.bfloat16).max
    rounded = jnp.where(jnp.isinf(rounded), jnp.copysign(largest, rounded), rounded)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _random_half(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns 16 random bits for each element, by hashing its index with the key.

    The arithmetic fuses with what uses it, where the generator of JAX would write arrays of twice
    the size of the parameters. The hash is the finalizer of MurmurHash3 (Appleby, 2011), twice.
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return _mixed(_mixed(index + first) ^ second) >> 16


def _mixed(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
