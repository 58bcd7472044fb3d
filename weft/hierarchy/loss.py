"""Losses in the style of AXLearn: means with their weights, and intermediate values.

See `weft.functional` for the formulas.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from weft import errors, functional
from weft.functional.arrays import counted, finite_or_counted
from weft.hierarchy.metrics import WeightedScalar
from weft.typing import Tensor


class ReductionMethod(enum.StrEnum):
    """Reduction of the losses of examples."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


def _reduce(
    loss: Tensor, weight: Tensor | None, reduction: ReductionMethod
) -> Tensor:
    if reduction == ReductionMethod.MEAN:
        return functional.weighted_mean(loss, weight)[0]
    weighted = loss if weight is None else counted(loss, weight) * weight
    return jnp.sum(weighted) if reduction == ReductionMethod.SUM else weighted


def _broadcast_weight(weight: Tensor | None, ndim: int) -> Tensor | None:
    """Returns weights of examples, with axes of size 1 for the axes of an example."""
    if weight is None or weight.ndim >= ndim:
        return weight
    return weight.reshape(*weight.shape, *[1] * (ndim - weight.ndim))


def _counted(weight: Tensor | None, *arrays: Tensor) -> list[Tensor]:
    """Returns arrays with 0 where the weight of the element or example is 0."""
    weights = [_broadcast_weight(weight, x.ndim) for x in arrays]
    return [
        counted(x, weight) for x, weight in zip(arrays, weights, strict=True)
    ]


def _weighted_scalar(
    loss: Tensor, weight: Tensor | None, eps: float
) -> WeightedScalar:
    weight = _broadcast_weight(weight, loss.ndim)
    return WeightedScalar(*functional.weighted_mean(loss, weight, eps=eps))


def mean_squared_error(
    preds: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    sample_weight: Num[Array, "*batch"] | None = None,
    eps: float = 1e-7,
) -> WeightedScalar:
    """Returns the mean of `(preds - targets)²`.

    Args:
      sample_weight: per element or per example; all 1 by default. Where it is 0, the values may be
        anything, including NaN.
      eps: where the weights sum to less, the mean is 0.

    Returns:
      The mean, with the sum of the weights of all elements.

    >>> loss = mean_squared_error(jnp.array([[1.0, 2.0], [5.0, 5.0]]), jnp.zeros((2, 2)),
    ...                           sample_weight=jnp.array([1.0, 0.0]))
    >>> loss.mean.item(), loss.weight.item()
    (2.5, 2.0)
    """
    preds, targets = _counted(sample_weight, preds, targets)
    return _weighted_scalar(
        functional.squared_error(preds, targets), sample_weight, eps
    )


def bilinear_mean_squared_error(
    preds: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    *,
    shape: tuple[int, ...],
    sample_weight: Num[Array, "*batch"] | None = None,
    eps: float = 1e-7,
) -> WeightedScalar:
    """Returns the mean squared error of images that are first resized bilinearly.

    Args:
      targets: their shape may differ from that of `preds`.
      shape: the shape to resize both to, with all axes.
      sample_weight, eps: as for `mean_squared_error`, of the resized images.
    """
    preds, targets = (
        jax.image.resize(
            x.astype(jnp.float32), shape, "bilinear", antialias=False
        )
        for x in (preds, targets)
    )
    return mean_squared_error(preds, targets, sample_weight, eps)


def l1_loss(
    preds: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    sample_weight: Num[Array, "*batch"] | None = None,
    eps: float = 1e-7,
) -> WeightedScalar:
    """Returns the mean of `|preds - targets|`; see `mean_squared_error`."""
    preds, targets = _counted(sample_weight, preds, targets)
    return _weighted_scalar(
        functional.absolute_error(preds, targets), sample_weight, eps
    )


def huber_loss(
    *,
    predictions: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    delta: float = 1.0,
    sample_weight: Num[Array, "*batch"] | None = None,
    reduce_axis: int | None = None,
    reduction: ReductionMethod = ReductionMethod.NONE,
) -> Tensor:
    """Returns half the squared error up to `delta`, linear beyond (Huber, 1964).

    Args:
      delta: the largest error on the quadratic part.
      sample_weight: per element, or per example, of the losses after `reduce_axis`. Where it is 0,
        the values may be anything.
      reduce_axis: an axis to take the mean over first.
    """
    weight = _broadcast_weight(
        sample_weight, predictions.ndim - (reduce_axis is not None)
    )
    element_weight = weight
    if weight is not None and reduce_axis is not None:
        element_weight = jnp.expand_dims(weight, reduce_axis)
    predictions, targets = _counted(element_weight, predictions, targets)
    loss = functional.huber_error(predictions, targets, delta=delta)
    if reduce_axis is not None:
        loss = jnp.mean(loss, axis=reduce_axis)
    return _reduce(loss, weight, reduction)


def giou_loss(
    *,
    predictions: Float[Array, "*batch 4"],
    targets: Float[Array, "*batch 4"],
    reduction: ReductionMethod = ReductionMethod.NONE,
    sample_weight: Num[Array, "*batch"] | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Returns 1 minus `functional.generalized_iou` of boxes (Rezatofighi et al., 2019).

    `sample_weight` has a weight for each box; all 1 by default. Where it is 0, boxes may be
    anything.
    """
    predictions, targets = _counted(sample_weight, predictions, targets)
    return _reduce(
        1 - functional.generalized_iou(predictions, targets, eps=eps),
        sample_weight,
        reduction,
    )


def focal_loss(
    logits: Float[Array, "*shape"],
    targets: Num[Array, "*shape"],
    alpha: float = 0.25,
    gamma: float = 1.5,
    sample_weight: Num[Array, "*batch"] | None = None,
) -> Tensor:
    """Returns the sum of `functional.focal_loss`.

    `sample_weight` is per element or per example; all 1 by default. Where it is 0, logits and
    targets may be anything.
    """
    logits, targets = _counted(sample_weight, logits, targets)
    loss = functional.focal_loss(logits, targets, alpha=alpha, gamma=gamma)
    return _reduce(
        loss, _broadcast_weight(sample_weight, loss.ndim), ReductionMethod.SUM
    )


def kl_divergence(
    log_predictions: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    is_log_targets: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean of `functional.kl_divergence`, a Kullback-Leibler divergence.

    The second result is a dict of `per_example_loss`, `Float[Array, "*batch"]`.
    """
    per_example = functional.kl_divergence(
        log_predictions, targets, is_log_targets=is_log_targets
    )
    return jnp.mean(per_example), {"per_example_loss": per_example}


def large_margin_cosine_loss(
    logits: Float[Array, "batch classes"],
    *,
    labels: Int[Array, " batch"] | None = None,
    soft_labels: Float[Array, "batch classes"] | None = None,
    alpha: float = 1.0,
    margin: float = 0.0,
) -> tuple[Tensor, dict[str, Any]]:
    """Returns the cross entropy of `alpha * (logits - margin * labels)` (Wang et al., 2018).

    Args:
      logits: cosines of an embedding and the vector of each class.
      labels: the right class; a negative one does not count.
      soft_labels: the probability of each class instead.

    Returns:
      The mean, and a dict of `accuracy`, with the margin, and `num_examples`, both scalars.

    Raises:
      ArgumentValueError: unless exactly one of `labels` and `soft_labels` is given.
    """
    if (labels is None) == (soft_labels is None):
        raise errors.ArgumentValueError(
            "large_margin_cosine_loss needs the right classes once: pass either labels or "
            "soft_labels."
        )
    targets: Any = (
        soft_labels
        if labels is None
        else jax.nn.one_hot(labels, logits.shape[-1])
    )
    right: Any = jnp.argmax(targets, axis=-1) if labels is None else labels
    logits = functional.with_cosine_margin(
        logits, targets, alpha=alpha, margin=margin
    )
    loss, aux = functional.cross_entropy(
        logits, right, soft_target_labels=targets
    )
    correct = aux["live_targets"] & (jnp.argmax(logits, axis=-1) == right)
    num_examples = aux["num_targets"]
    accuracy = jnp.sum(correct) / jnp.maximum(1, num_examples)
    return loss, {"accuracy": accuracy, "num_examples": num_examples}


def asymmetric_contrastive_loss_from_logits(
    logits: Float[Array, "queries keys"],
    *,
    key_paddings: Num[Array, " keys"] | None = None,
    temperature: float | Tensor = 1.0,
    soft_labels: Float[Array, "queries keys"] | None = None,
) -> Tensor:
    """Returns `functional.contrastive_loss`, of finding each key among all (Oord et al., 2018)."""
    if key_paddings is not None:
        key_paddings = key_paddings.astype(bool)
    return functional.contrastive_loss(
        logits,
        temperature=temperature,
        key_paddings=key_paddings,
        soft_labels=soft_labels,
    )


def _key_paddings(
    positive_keys: Tensor,
    negative_keys: Tensor | None,
    negative_paddings: Tensor | None,
) -> Tensor | None:
    if negative_keys is None or negative_paddings is None:
        return None
    none = jnp.zeros(positive_keys.shape[:1], bool)
    return jnp.concatenate([none, negative_paddings.astype(bool)])


def _logits_with_negatives(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor | None,
    negative_paddings: Tensor | None,
) -> Tensor:
    if negatives is not None:
        if negative_paddings is not None:
            negatives = counted(
                negatives, ~negative_paddings.astype(bool)[:, None]
            )
        keys = jnp.concatenate([keys, negatives])
    return functional.contrastive_logits(queries, keys)


def asymmetric_contrastive_loss_from_features(
    queries: Float[Array, "queries dim"],
    positive_keys: Float[Array, "queries dim"],
    *,
    negative_keys: Float[Array, "negatives dim"] | None = None,
    negative_key_paddings: Num[Array, " negatives"] | None = None,
    temperature: float | Tensor = 1.0,
    soft_labels: Float[Array, "queries keys"] | None = None,
) -> Tensor:
    """Returns `asymmetric_contrastive_loss_from_logits` of inner products.

    Args:
      positive_keys: the key of each query; a negative key for all other queries.
      negative_key_paddings: True for padded negative keys.
      soft_labels: the probability of each key, the positive ones first.

    >>> x = 20 * jnp.eye(2)
    >>> asymmetric_contrastive_loss_from_features(x, x).item()
    0.0
    """
    return asymmetric_contrastive_loss_from_logits(
        _logits_with_negatives(
            queries, positive_keys, negative_keys, negative_key_paddings
        ),
        key_paddings=_key_paddings(
            positive_keys, negative_keys, negative_key_paddings
        ),
        temperature=temperature,
        soft_labels=soft_labels,
    )


def symmetric_contrastive_loss_from_logits(
    x_y_logits: Float[Array, "batch y_keys"],
    y_x_logits: Float[Array, "batch x_keys"],
    *,
    y_as_key_paddings: Num[Array, " y_keys"] | None = None,
    x_as_key_paddings: Num[Array, " x_keys"] | None = None,
    temperature: float | Tensor = 1.0,
    y_as_key_soft_labels: Float[Array, "batch y_keys"] | None = None,
    x_as_key_soft_labels: Float[Array, "batch x_keys"] | None = None,
) -> Tensor:
    """Returns the mean of the losses of finding y by x, and x by y (Radford et al., 2021, CLIP).

    Logits are of each x and all y, and the reverse; each has the arguments of
    `asymmetric_contrastive_loss_from_logits`.
    """
    x_to_y = asymmetric_contrastive_loss_from_logits(
        x_y_logits,
        key_paddings=y_as_key_paddings,
        temperature=temperature,
        soft_labels=y_as_key_soft_labels,
    )
    y_to_x = asymmetric_contrastive_loss_from_logits(
        y_x_logits,
        key_paddings=x_as_key_paddings,
        temperature=temperature,
        soft_labels=x_as_key_soft_labels,
    )
    return (x_to_y + y_to_x) / 2


def symmetric_contrastive_loss_from_features(
    x: Float[Array, "batch dim"],
    y: Float[Array, "batch dim"],
    *,
    x_negatives: Float[Array, "x_negatives dim"] | None = None,
    y_negatives: Float[Array, "y_negatives dim"] | None = None,
    x_negative_paddings: Num[Array, " x_negatives"] | None = None,
    y_negative_paddings: Num[Array, " y_negatives"] | None = None,
    temperature: float | Tensor = 1.0,
    y_as_key_soft_labels: Float[Array, "batch y_keys"] | None = None,
    x_as_key_soft_labels: Float[Array, "batch x_keys"] | None = None,
) -> Tensor:
    """Returns `symmetric_contrastive_loss_from_logits` of inner products.

    Args:
      x_negatives, y_negatives: further vectors, which match no y or no x.
      x_negative_paddings, y_negative_paddings: True for padded negatives.
      y_as_key_soft_labels, x_as_key_soft_labels: as for the logits, the negatives last.
    """
    return symmetric_contrastive_loss_from_logits(
        _logits_with_negatives(x, y, y_negatives, y_negative_paddings),
        _logits_with_negatives(y, x, x_negatives, x_negative_paddings),
        y_as_key_paddings=_key_paddings(y, y_negatives, y_negative_paddings),
        x_as_key_paddings=_key_paddings(x, x_negatives, x_negative_paddings),
        temperature=temperature,
        y_as_key_soft_labels=y_as_key_soft_labels,
        x_as_key_soft_labels=x_as_key_soft_labels,
    )


def negative_cosine_similarity_loss(
    predictions: Float[Array, "*batch dim"],
    targets: Float[Array, "*batch dim"],
    *,
    normalize_embedding: bool = True,
    eps: float = 1e-8,
    live_targets: Num[Array, "*batch"] | None = None,
    reduction: ReductionMethod = ReductionMethod.MEAN,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns minus the cosine of each prediction and its target.

    Args:
      normalize_embedding: whether to scale vectors to unit length; if not, the loss is minus the
        inner product.
      eps: the minimum length to divide by.
      live_targets: the weight of each target; all 1 by default. Where it is 0, NaN and infinities
        count as 0.

    Returns:
      The loss, and a dict of `cosine_similarity`, `Float[Array, "*batch"]`, and
      `elementwise_similarity`, `Float[Array, "*batch dim"]`, which adds up to it.
    """
    if live_targets is not None:
        is_live = live_targets[..., None] != 0
        predictions = finite_or_counted(predictions, is_live)
        targets = finite_or_counted(targets, is_live)
    products = functional.elementwise_similarity(
        predictions, targets, normalize_embedding=normalize_embedding, eps=eps
    )
    similarity = jnp.sum(products, axis=-1)
    aux = {"cosine_similarity": similarity, "elementwise_similarity": products}
    return _reduce(-similarity, live_targets, reduction), aux


flops_loss = functional.activation_flops
"""Cost of a search with sparse vectors, and their mean number of zeros."""


def ranking_pairwise_loss(
    *,
    logits: Float[Array, "batch items"],
    ranks: Int[Array, "batch items"],
    loss_scale: Float[Array, " batch"],
) -> tuple[Tensor, Tensor]:
    """Returns `pairwise_loss` of all pairs of items of different ranks.

    Args:
      ranks: from 1, the best; items may share one. A rank of 0 or less excludes an item.

    Returns:
      The mean over pairs, and their number.
    """
    return functional.pairwise_loss(
        logits=logits,
        pair_weights=functional.rank_pairs(ranks),
        loss_scale=loss_scale,
    )
