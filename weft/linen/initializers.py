"""First values of parameters: functions `init(key, shape, dtype)`, and functions that make them.

They are those of `weft.functional.initializers`, and two more under names that users of Flax know.
"""

from jax.nn.initializers import Initializer

from weft.functional.initializers import (
    constant,
    delta_orthogonal,
    glorot_normal,
    glorot_uniform,
    he_normal,
    he_uniform,
    kaiming_normal,
    kaiming_uniform,
    lecun_normal,
    lecun_uniform,
    normal,
    ones,
    orthogonal,
    truncated_normal,
    uniform,
    variance_scaling,
    xavier_normal,
    xavier_uniform,
    zeros,
)

__all__ = [
    "Initializer",
    "constant",
    "delta_orthogonal",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "ones_init",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
    "zeros_init",
]


def zeros_init() -> Initializer:
    """The initializer of zeros, made as the others are.

    Example:
        >>> import jax
        >>> zeros_init()(jax.random.key(0), (2,)).tolist()
        [0.0, 0.0]
    """
    return zeros


def ones_init() -> Initializer:
    """The initializer of ones, made as the others are.

    Example:
        >>> import jax
        >>> ones_init()(jax.random.key(0), (2,)).tolist()
        [1.0, 1.0]
    """
    return ones
