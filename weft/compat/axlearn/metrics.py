"""Metrics with AXLearn's names, arguments and results, for its three modules of metrics.

`weft.hierarchy.metrics_classification`, `metrics_correlation` and `metrics_retrieval` lead here.
For new programs, `weft.functional` has these metrics with scikit-learn's names.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from weft import functional
from weft.functional.metrics import Labels, Mask, Scores, Values, Weights
from weft.hierarchy.metrics import WeightedScalar

# Names of Weft that these modules also have.
accuracy_at_k = functional.accuracy_at_k
average_precision_at_k = functional.average_precision_at_k
pearson_correlation = functional.pearson_correlation
roc_auc_score = functional.roc_auc_score
spearman_correlation = functional.spearman_correlation


def confusion_matrix(
    y_true: Values, y_pred: Values, *, num_classes: int, weight: Weights = None
) -> Array:
    """Counts the examples of each true class (row) and predicted class (column).

    >>> confusion_matrix(jnp.array([0, 1]), jnp.array([0, 0]), num_classes=2).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    return functional.confusion_matrix(
        y_true, y_pred, num_classes=num_classes, weights=weight
    )


def precision_recall_f_score(
    y_true: Values,
    y_pred: Values,
    *,
    beta: float = 1.0,
    eps: float = 1e-8,
    weight: Weights = None,
) -> dict[str, WeightedScalar | Array]:
    """Returns "precision" and "recall" with what they are shares of, and "f_score".

    >>> scores = precision_recall_f_score(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 0, 0]))
    >>> float(scores["precision"].mean), float(scores["precision"].weight)
    (0.5, 2.0)
    """
    scores = functional.precision_recall_f_score(
        y_true, y_pred, beta=beta, eps=eps, weights=weight
    )
    counts = confusion_matrix(y_true, y_pred, num_classes=2, weight=weight)
    return {
        "precision": WeightedScalar(scores["precision"], counts[:, 1].sum()),
        "recall": WeightedScalar(scores["recall"], counts[1].sum()),
        "f_score": scores["f_score"],
    }


def f_score(
    y_true: Values,
    y_pred: Values,
    *,
    beta: float = 1.0,
    eps: float = 1e-8,
    weight: Weights = None,
) -> Array:
    """Returns the F-score of the positive class.

    >>> round(f_score(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 0, 0])).item(), 3)
    0.4
    """
    scores = functional.precision_recall_f_score(
        y_true, y_pred, beta=beta, eps=eps, weights=weight
    )
    return scores["f_score"]


def matthews_corrcoef(
    y_true: Values, y_pred: Values, *, weight: Weights = None, eps: float = 1e-8
) -> Array:
    """Returns Matthews' correlation of classes; see `functional.matthews_corrcoef`.

    >>> round(matthews_corrcoef(jnp.array([0, 1, 1, 0]), jnp.array([0, 1, 0, 0])).item(), 4)
    0.5774
    """
    return functional.matthews_corrcoef(y_true, y_pred, weights=weight, eps=eps)


def pearson_corrcoef(
    x: Values, y: Values, *, eps: float = 1e-8, weight: Weights = None
) -> Array:
    """Returns the linear correlation.

    >>> round(pearson_corrcoef(jnp.array([1.0, 2, 3]), jnp.array([1.0, 3, 2])).item(), 4)
    0.5
    """
    return functional.pearson_correlation(x, y, eps=eps, weights=weight)


def spearman_corrcoef(
    x: Values, y: Values, *, eps: float = 1e-8, mask: Weights = None
) -> Array:
    """Returns the correlation of ranks, of the values where `mask` is True.

    >>> round(spearman_corrcoef(jnp.array([1.0, 2, 9]), jnp.array([1.0, 3, 2])).item(), 4)
    0.5
    """
    return functional.spearman_correlation(x, y, eps=eps, mask=mask)


def average_rank(
    *, scores: Scores, relevance_labels: Labels, query_padding: Mask
) -> dict[str, Array]:
    """Returns as "avg_rank" the mean position, from 1, of the first relevant item.

    Queries without one do not count, nor do those whose `query_padding` is True.

    >>> scores, labels = jnp.array([[0.1, 0.9, 0.5]]), jnp.array([[0, 0, 1]])
    >>> average_rank(scores=scores, relevance_labels=labels, query_padding=jnp.array([False]))
    {'avg_rank': Array(2., dtype=float32)}
    """
    if query_padding is not None:
        query_padding = query_padding.astype(bool)
    rank = functional.average_rank(
        scores, relevance_labels, query_padding=query_padding
    )
    return {"avg_rank": rank}


def ndcg_at_k(
    scores: Scores,
    relevance_labels: Labels,
    top_ks: Sequence[int],
    ignore_ties: bool = True,
) -> dict[int, Array]:
    """Returns for each k the normalized discounted cumulative gain of each query.

    The gain of a label l at position i is l / log2(i + 1), as in scikit-learn's `ndcg_score`, and
    not 2^l - 1 as in `functional.ndcg_at_k`. With a k of -1, all items count.

    Args:
      ignore_ties: whether items of equal scores are in the order of their indices; otherwise each
        has the mean of their labels.

    >>> ndcg_at_k(jnp.array([[0.9, 0.5]]), jnp.array([[1, 3]]), top_ks=[1])[1].round(3).tolist()
    [0.333...]
    """
    num_items = scores.shape[-1]
    positions = jnp.arange(1.0, num_items + 1)
    discounts = 1 / jnp.log2(positions + 1)[None]
    labels = relevance_labels.astype(jnp.float32)
    best_gains = jnp.sort(labels, axis=-1, descending=True) * discounts
    if not ignore_ties:
        is_tied = (scores[:, :, None] == scores[:, None]).astype(jnp.float32)
        labels = jnp.einsum("qij,qj->qi", is_tied, labels) / is_tied.sum(
            axis=-1
        )
    order = jnp.argsort(-scores, axis=-1)
    gains = jnp.take_along_axis(labels, order, axis=-1) * discounts
    ndcg_by_k: dict[int, Array] = {}
    for k in top_ks:
        num_ranked = num_items if k == -1 else min(k, num_items)
        gain = gains[:, :num_ranked].sum(axis=-1)
        best_gain = best_gains[:, :num_ranked].sum(axis=-1)
        # Without a relevant item, 0 instead of 0 / 0.
        divisor = jnp.where(best_gain > 0, best_gain, 1)
        ndcg_by_k[k] = jnp.where(best_gain > 0, gain / divisor, 0)
    return ndcg_by_k
