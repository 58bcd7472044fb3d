"""Losses for detection: rare classes, and boxes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from weft.functional.loss import sigmoid_cross_entropy


def focal_loss(
    logits: Float[Array, "*shape"],
    targets: Num[Array, "*shape"],
    *,
    alpha: float = 0.25,
    gamma: float = 1.5,
) -> Float[Array, "*shape"]:
    """Returns `alpha_t * (1 - p_t) ** gamma * cross_entropy` (Lin et al., 2017).

    `p_t` is the probability of the target; `alpha_t` is `alpha` for true targets (1), `1 - alpha`
    for false ones (0). With `gamma=0`, likely answers are not weakened.

    >>> focal_loss(jnp.zeros(2), jnp.array([1, 0]), gamma=0.0).round(4).tolist()
    [0.173..., 0.519...]
    """
    logits, targets = logits.astype(jnp.float32), targets.astype(jnp.float32)
    cross_entropy = sigmoid_cross_entropy(logits, targets)
    # p_t = exp(-cross_entropy), so that neither is computed from the other's rounding.
    weight = targets * alpha + (1 - targets) * (1 - alpha)
    return weight * (1 - jnp.exp(-cross_entropy)) ** gamma * cross_entropy


def generalized_iou(
    predictions: Float[Array, "*batch 4"], targets: Float[Array, "*batch 4"], *, eps: float = 1e-7
) -> Float[Array, "*batch"]:
    """Returns the overlap of two boxes, from -1 (far apart) to 1 (Rezatofighi et al., 2019).

    It is the intersection over the union, minus the share of the smallest enclosing box that
    neither covers. Boxes are two opposite corners, the smaller coordinates first; `eps` is added to
    divisors.

    >>> box, other = jnp.array([0.0, 0.0, 1.0, 1.0]), jnp.array([2.0, 0.0, 3.0, 1.0])
    >>> generalized_iou(box[None], jnp.stack([box, other])).round(3).tolist()
    [1.0, -0.33...]
    """
    a, b = predictions.astype(jnp.float32), targets.astype(jnp.float32)

    def area(low: Array, high: Array) -> Array:
        return jnp.prod(jnp.maximum(high - low, 0), axis=-1)

    low_a, high_a, low_b, high_b = a[..., :2], a[..., 2:], b[..., :2], b[..., 2:]
    intersection = area(jnp.maximum(low_a, low_b), jnp.minimum(high_a, high_b))
    union = area(low_a, high_a) + area(low_b, high_b) - intersection
    around = area(jnp.minimum(low_a, low_b), jnp.maximum(high_a, high_b))
    return intersection / (union + eps) - (around - union) / (around + eps)
