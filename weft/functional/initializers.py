"""Parameter initialization: those of `jax.nn.initializers`, and their building blocks.

`fan_sizes` and `draw` are the two halves of variance scaling, for weights whose input and output
axes are not the last two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.nn.initializers import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from jax.nn.initializers import Initializer, ones, variance_scaling, zeros
from jaxtyping import Array, Float, Key

from weft.errors import ArgumentValueError

Distribution = Literal["uniform", "normal", "truncated_normal"]
DISTRIBUTIONS: tuple[Distribution, ...] = (
    "uniform",
    "normal",
    "truncated_normal",
)

# That of tables of vectors: by the length of a vector.
default_embed_init = variance_scaling(1.0, "fan_in", "normal", out_axis=0)

# The standard deviation of a standard normal variable that is cut off at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978


def fan_sizes(
    shape: Sequence[int],
    *,
    in_axes: Sequence[int],
    out_axes: Sequence[int],
    batch_axes: Sequence[int] = (),
) -> dict[str, float]:
    """Returns a weight's numbers of inputs and outputs, and their mean.

    Axes not listed are a receptive field, such as a convolution's window, and count for both.
    `batch_axes` separate independent weights.

    >>> fan_sizes((3, 3, 8, 16), in_axes=(2,), out_axes=(3,))
    {'fan_in': 72.0, 'fan_out': 144.0, 'fan_avg': 108.0}
    """
    num_inputs = math.prod(shape[axis] for axis in in_axes)
    num_outputs = math.prod(shape[axis] for axis in out_axes)
    num_copies = math.prod(shape[axis] for axis in batch_axes)
    window_size = math.prod(shape) / max(
        1, num_inputs * num_outputs * num_copies
    )
    fan_in = num_inputs * window_size
    fan_out = num_outputs * window_size
    return {
        "fan_in": fan_in,
        "fan_out": fan_out,
        "fan_avg": (fan_in + fan_out) / 2,
    }


def draw(
    prng_key: Key[Array, ""],
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    distribution: Distribution,
    scale: float,
) -> Float[Array, "*shape"]:
    """Returns random values of mean 0.

    `scale` is the bound of the uniform distribution, and the standard deviation of the others.
    `"truncated_normal"` is cut off at about 2.3 standard deviations: at 2 of the original, then
    widened to the standard deviation `scale`.

    Raises ArgumentValueError if the distribution is unknown.
    """
    if distribution not in DISTRIBUTIONS:
        raise ArgumentValueError(
            f"distribution={distribution!r} is unknown; expected one of {', '.join(DISTRIBUTIONS)}."
        )
    factor = jnp.asarray(scale, dtype)
    if distribution == "uniform":
        return jax.random.uniform(prng_key, shape, dtype, -1.0, 1.0) * factor
    if distribution == "normal":
        return jax.random.normal(prng_key, shape, dtype) * factor
    values = jax.random.truncated_normal(prng_key, -2.0, 2.0, shape, dtype)
    return values * (factor / jnp.asarray(_TRUNCATED_STD, dtype))


def zeros_init() -> Initializer:
    """Returns the initializer of zeros.

    >>> zeros_init()(jax.random.key(0), (2,)).tolist()
    [0.0, 0.0]
    """
    return zeros


def ones_init() -> Initializer:
    """Returns the initializer of ones.

    >>> ones_init()(jax.random.key(0), (2,)).tolist()
    [1.0, 1.0]
    """
    return ones
