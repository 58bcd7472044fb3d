"""Keys that compile fast, for tests of the origin of random numbers, not of their values.

Each draw and each fold of JAX's own keys adds some 30 ms to the compilation of a program, and a
test that compares two libraries does dozens. These do arithmetic of a few steps instead; different
keys still give different numbers, so whoever folds another number or draws in another order is
found out.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

_STEP, _FOLD = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)


def quick_key(seed):
    """Returns a key in place of `jax.random.key(seed)`."""
    return jax.random.key(seed, impl=_QUICK)


def draw(seed, *shape):
    """Returns numbers in place of `jax.random.normal`, without a program that would have to be
    compiled.
    """
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _mixed(x):
    """Returns a one-to-one function of 32 bits; each bit changes about half of the result."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    return (x ^ (x >> 15)) * np.uint32(0x846CA68B)


def _count(shape, step):
    return np.arange(1, math.prod(shape) + 1, dtype=np.uint32).reshape(shape) * step


@jax.jit
def _seed(seed):
    return _mixed(seed.astype(jnp.uint32) + _STEP)[None]


@functools.partial(jax.jit, static_argnums=1)
def _split(key, shape):
    count = _count((*shape, 1), _FOLD)
    return _mixed(key.reshape([1] * len(shape) + [-1]) + count)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key, width, shape):
    return _mixed(key[0] ^ _count(shape, _STEP)).astype(f"uint{width}")


@jax.jit
def _fold_in(key, data):
    return _mixed(key ^ _mixed(data.astype(jnp.uint32) + _FOLD))


_QUICK = define_prng_impl(
    key_shape=(1,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="quick",
    tag="quick",
)
