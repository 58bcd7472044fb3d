"""The probabilities of dot-product attention, in the dtype of queries and keys.

`weft.functional.attention` computes logits and probabilities in float32. In half precision that
doubles the memory of what is usually the largest array of a model; here everything stays in the
dtype that comes in, or only the softmax is in float32.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from weft.errors import ArgumentShapeError
from weft.functional.attention import attention_logits

_LOGITS = "...qhd,...khd->...hqk"


def attention_weights(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    float32_softmax: bool = False,
    precision: lax.PrecisionLike = None,
    dot_general: Callable[..., Array] | None = None,
    einsum: Callable[..., Array] | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns `softmax(query · key / sqrt(dim) + bias)` over the source.

    Args:
        query: what asks.
        key: what is compared with the queries, of the same dtype.
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: where it is False, or 0, a logit is the dtype's lowest number; likewise. A query that
            may attend to nothing attends to everything alike.
        float32_softmax: whether to compute the softmax in float32, and return that.
        precision: of the multiplication, as in `jax.lax.dot_general`.
        dot_general: multiplies in place of `jax.lax.dot_general`.
        einsum: multiplies in place of both, called with subscripts, queries and keys.

    Raises:
        ArgumentShapeError: if bias or mask do not broadcast to the logits.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> attention_weights(x, x, mask=jnp.array([True, False, True]))[0, 0, 0].tolist()
    [0.5, 0.0, 0.5]
    """
    query = query / math.sqrt(query.shape[-1])
    if einsum is not None:
        logits = einsum(_LOGITS, query, key)
    else:
        logits = attention_logits(
            query, key, precision=precision, preferred_element_type=None, dot_general=dot_general
        )
    if bias is not None:
        _check("bias", bias, logits)
        logits = logits + bias
    if mask is not None:
        _check("mask", mask, logits)
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    if float32_softmax and logits.dtype != jnp.float32:
        logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1)


def _check(name: str, given: Array, logits: Array) -> None:
    shape, full = jnp.shape(given), logits.shape
    if shape == full:
        return
    sizes = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > len(full) or any(n not in (1, m) for n, m in sizes):
        raise ArgumentShapeError(
            f"{name} has shape {shape}, which does not broadcast to that of the logits, {full}: "
            "(*batch, heads, queries, keys)."
        )
