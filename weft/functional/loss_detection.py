"""Losses of detectors: of classes that are rare, and of boxes."""

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
    """Returns the sigmoid cross entropy, less where the right answer is likely (Lin et al., 2017).

    It is `alpha_t * (1 - p_t) ** gamma * cross_entropy`, where `p_t` is the probability of the
    target, and `alpha_t` is `alpha` for true ones and `1 - alpha` for others.

    Args:
        logits: of being true.
        targets: 1 for true, 0 for false.
        alpha: the weight of true targets.
        gamma: how much likely answers are weakened; not at all at 0.

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
    """Returns how much two boxes overlap, from -1 (far apart) to 1 (Rezatofighi et al., 2019).

    The intersection over the union, less the share of the smallest box around both that neither
    covers.

    Args:
        predictions: boxes as two opposite corners, the smaller coordinates first.
        targets: likewise.
        eps: added to areas that are divided by.

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
