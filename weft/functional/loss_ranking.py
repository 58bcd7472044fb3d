"""Pairwise ranking losses: the better one of two items should have the larger logit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rank_pairs(ranks: Int[Array, "batch items"]) -> Float[Array, "batch items items"]:
    """Returns 1 at (b, i, j) if item i is ranked before item j, else 0.

    Ranks start at 1, the best, and may be shared. A rank of 0 or less excludes an item.

    >>> rank_pairs(jnp.array([[1, 2, 0]])).tolist()
    [[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]
    """
    first, second = ranks[:, :, None], ranks[:, None, :]
    return ((first < second) & (first > 0)).astype(jnp.float32)


def pairwise_loss(
    *,
    logits: Float[Array, "batch items"],
    pair_weights: Float[Array, "batch items items"],
    loss_scale: Float[Array, " batch"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean of `-log sigmoid(logit_i - logit_j)`, and the sum of its weights.

    The loss of a Bradley-Terry model (Burges et al., 2005, RankNet).

    Args:
        logits: of each item.
        pair_weights: at (b, i, j), the weight of "item i is better than item j".
        loss_scale: a factor of each example's loss, not included in the weights.

    >>> loss, weight = pairwise_loss(
    ...     logits=jnp.zeros((1, 2)), pair_weights=rank_pairs(jnp.array([[1, 2]])),
    ...     loss_scale=jnp.ones(1))
    >>> round(loss.item(), 3), weight.item()
    (0.693, 1.0)
    """
    logits = logits.astype(jnp.float32)
    per_pair = jax.nn.softplus(logits[:, None, :] - logits[:, :, None])
    total = jnp.sum(per_pair * pair_weights * loss_scale[:, None, None])
    weight = jnp.sum(pair_weights, dtype=jnp.float32)
    return total / jnp.maximum(weight, 1e-7), weight
