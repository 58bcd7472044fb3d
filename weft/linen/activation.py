"""Activation functions: those of `jax.nn`, and PReLU with a learned slope."""

from __future__ import annotations

import jax.numpy as jnp
from jax.nn import (
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from jaxtyping import Array, Float

from weft.linen.methods import compact
from weft.linen.module import Module
from weft.typing import DType

__all__ = [
    "PReLU",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "normalize",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
]

normalize = standardize
"""Alias of `standardize`: subtracts the mean and divides by the standard deviation."""


class PReLU(Module):
    """Leaky ReLU with a learned slope (He et al., 2015): `x` if positive, else `slope * x`.

    The parameter `negative_slope` is a scalar.

    Example:
        >>> import jax
        >>> y, variables = PReLU().init_with_output(jax.random.key(0), jnp.array([-1.0, 2.0]))
        >>> y, variables
        (Array([-0.01,  2.  ], dtype=float32),
         {'params': {'negative_slope': Array(0.01, dtype=float32)}})
    """

    param_dtype: DType = jnp.float32
    negative_slope_init: float = 0.01

    @compact
    def __call__(self, inputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        slope = self.param(
            "negative_slope", lambda _: jnp.asarray(self.negative_slope_init, self.param_dtype)
        )
        inputs = jnp.asarray(inputs)
        return leaky_relu(inputs, slope.astype(inputs.dtype))
