"""Activation functions of `jax.nn`, and PReLU, which has a learned slope."""

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
    identity,
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

from weft.nnx.kinds import Param
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.parameters import NO_METADATA, Metadata
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
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
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


class PReLU(Module):
    """Parametric ReLU: `x` where positive, a learned slope times `x` elsewhere (He et al., 2015).

    The parameter is `negative_slope`, a scalar.

    Args:
        negative_slope_init: initial value of the slope.
        dtype: computation dtype; by default that of the input.
        promote_dtype: casts input and slope to `dtype` if it is given.

    Example:
        >>> PReLU()(jnp.array([-1.0, 2.0])).tolist()
        [-0.009999999776482582, 2.0]
    """

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        promote_dtype: PromoteDtype = promote_dtype,
        negative_slope_metadata: Metadata = NO_METADATA,
    ):
        slope = jnp.asarray(negative_slope_init, param_dtype)
        self.negative_slope = Param(slope, **negative_slope_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Applies the activation elementwise."""
        x, slope = jnp.asarray(inputs), self.negative_slope[...]
        if self.dtype is not None:
            x, slope = self.promote_dtype((x, slope), dtype=self.dtype)
        return leaky_relu(x, slope.astype(x.dtype))
