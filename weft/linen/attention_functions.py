"""Attention as a function of queries, keys and values, with the options of the layers.

A layer's `attention_fn` is a function with some or all parameters of `dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.errors import ArgumentValueError
from weft.functional.attention_weights import (
    attention_weights,
    check_attention_shapes,
    drop_attention_weights,
)
from weft.linen.dtypes import promote_dtype
from weft.linen.module import Module
from weft.typing import DType

__all__ = ["dot_product_attention", "dot_product_attention_weights"]

Einsum = Callable[..., Array]


def dot_product_attention_weights(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    einsum: Einsum | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns the attention weights `softmax(query · key / sqrt(dim) + bias)`.

    Args:
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: True where a query may attend, broadcastable to the same shape.
        broadcast_dropout: whether all examples and heads share a dropout mask.
        dropout_rng: key for dropout.
        dropout_rate: rate for the weights.
        deterministic: disables dropout.
        dtype: dtype of the computation; by default promoted from query and key.
        precision: see `jax.lax.dot_general`.
        module: stores the weights before dropout, as `attention_weights` in its collection
            `intermediates`.
        force_fp32_for_softmax: whether to compute and return the softmax in float32.
        einsum_dot_general: replaces `jax.lax.dot_general`.
        einsum: replaces both; called with subscripts, queries and keys.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if the key for dropout is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> dot_product_attention_weights(x, x).tolist()
        [[[[0.5, 0.5], [0.5, 0.5]]]]
    """
    query, key = promote_dtype(query, key, dtype=dtype)
    check_attention_shapes(query, key)
    weights = attention_weights(
        query,
        key,
        bias=bias,
        mask=mask,
        float32_softmax=force_fp32_for_softmax,
        precision=precision,
        dot_general=einsum_dot_general,
        einsum=einsum,
    )
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if deterministic or dropout_rate == 0.0:
        return weights
    return drop_attention_weights(
        weights, rate=dropout_rate, prng_key=dropout_rng, broadcast=broadcast_dropout
    )


def dot_product_attention(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    value: Float[Array, "*batch source heads value_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Einsum | None = None,
    attn_weights_value_einsum: Einsum | None = None,
) -> Float[Array, "*batch target heads value_dim"]:
    """Returns the values averaged with the attention weights (Vaswani et al., 2017).

    See `dot_product_attention_weights` for the other arguments and errors.

    Args:
        qk_attn_weights_einsum: einsum of queries and keys.
        attn_weights_value_einsum: einsum of weights and values; give both or neither.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> dot_product_attention(x, x, x).shape
        (1, 3, 2, 4)
    """
    if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
        raise ArgumentValueError(
            "one of qk_attn_weights_einsum and attn_weights_value_einsum was given; give both, or "
            "none."
        )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    check_attention_shapes(query, key, value)
    weights = dot_product_attention_weights(
        query,
        key,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        dropout_rate,
        deterministic,
        query.dtype,
        precision,
        module,
        force_fp32_for_softmax,
        einsum_dot_general,
        qk_attn_weights_einsum,
    )
    if attn_weights_value_einsum is not None:
        return attn_weights_value_einsum("...hqk,...khd->...qhd", weights, value)
    return functional.attention_context(
        weights,
        value if value.dtype == weights.dtype else value.astype(weights.dtype),
        precision=precision,
        dot_general=einsum_dot_general,
    )
