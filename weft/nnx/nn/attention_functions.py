"""Dot-product attention as a function.

Any function that accepts some of its options can be the `attention_fn` of a layer.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.functional.attention_weights import (
    attention_weights,
    check_attention_shapes,
    drop_attention_weights,
)
from weft.nnx.kinds import Intermediate
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.typing import DType

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source kv_heads dim"],
    value: Float[Array, "*batch source kv_heads value_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = promote_dtype,
    is_causal: bool = False,
) -> Float[Array, "*batch target heads value_dim"]:
    """Returns `softmax(query · key / sqrt(dim) + bias) · value` (Vaswani et al., 2017).

    Args:
        query: queries.
        key: keys; if they have fewer heads, consecutive query heads share one (Ainslie et al.,
            2023).
        value: values.
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: True, or nonzero, where a query may attend; broadcastable to the same shape.
        broadcast_dropout: whether all examples and heads share one dropout mask.
        deterministic: whether dropout is off.
        dtype: computation dtype; by default promoted from query, key and value.
        precision: precision of the products, as in `jax.lax.dot_general`.
        module: module that sows the weights, before dropout, as the `Intermediate`
            `attention_weights`.
        promote_dtype: casts query, key and value to `dtype`.
        is_causal: whether queries attend only to keys at or before their position.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if dropout has no key.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> dot_product_attention(x, x[:, :, :1], x[:, :, :1]).shape
        (1, 3, 2, 4)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    check_attention_shapes(query, key, value, shared_heads=True)
    if is_causal:
        targets, sources = (jnp.arange(x.shape[-3]) for x in (query, key))
        earlier = functional.causal_mask(targets[:, None], sources[None])
        mask = earlier if mask is None else jnp.logical_and(*functional.same_ndim(mask, earlier))
    weights = attention_weights(query, key, bias=bias, mask=mask, precision=precision)
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    if dropout_rate != 0.0 and not deterministic:
        weights = drop_attention_weights(
            weights, rate=dropout_rate, prng_key=dropout_rng, broadcast=broadcast_dropout
        )
    return functional.attention_context(weights, value, precision=precision)
