"""Scores of predictions: classification, correlation and retrieval.

All are functions of whole arrays, without state. A weight of zero leaves an example out.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Num

from weft.functional.arrays import counted

Values = Num[Array, " n"]
Weights = Num[Array, " n"] | Bool[Array, " n"] | None
Scores = Float[Array, "queries items"]
Labels = Num[Array, "queries items"]
Mask = Bool[Array, " queries"] | None


def confusion_matrix(
    y_true: Int[Array, " n"], y_pred: Int[Array, " n"], *, num_classes: int, weights: Weights = None
) -> Float[Array, "classes classes"]:
    """Counts the examples of each true class (row) and predicted class (column).

    Examples whose class is outside `[0, num_classes)`, such as -1, do not count.

    >>> y_true, y_pred = jnp.array([0, 1, 1, -1]), jnp.array([0, 0, 1, 1])
    >>> confusion_matrix(y_true, y_pred, num_classes=2).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    counts = jnp.zeros((num_classes, num_classes))
    # A negative index would count from the end.
    rows, columns = (jnp.where(y < 0, num_classes, y) for y in (y_true, y_pred))
    return counts.at[rows, columns].add(_weights(weights, y_true), mode="drop")


def precision_recall_f_score(
    y_true: Values, y_pred: Values, *, beta: float = 1.0, eps: float = 1e-8, weights: Weights = None
) -> dict[str, Array]:
    """Returns "precision", "recall" and "f_score" of the positive class of labels 0 and 1.

    The F-score is (1 + beta^2) precision recall / (beta^2 precision + recall); `eps` is added to
    the denominators.

    >>> scores = precision_recall_f_score(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 0, 0]))
    >>> {name: round(float(x), 3) for name, x in scores.items()}
    {'precision': 0.5, 'recall': 0.333, 'f_score': 0.4}
    """
    (_, wrong), (missed, right) = confusion_matrix(
        y_true.astype(int), y_pred.astype(int), num_classes=2, weights=weights
    )
    precision, recall = right / (right + wrong + eps), right / (right + missed + eps)
    f_score = (1 + beta**2) * precision * recall / (beta**2 * precision + recall + eps)
    return {"precision": precision, "recall": recall, "f_score": f_score}


def roc_auc_score(y_true: Values, y_score: Values, *, weights: Weights = None) -> Array:
    """Returns the area under the ROC curve: how often a positive scores above a negative.

    Equal scores count one half. NaN if there are only positives or only negatives, or a score that
    counts is NaN.

    >>> roc_auc_score(jnp.array([0, 0, 1, 1]), jnp.array([0.1, 0.4, 0.35, 0.8])).item()
    0.75
    """
    weights, is_positive = _weights(weights, y_score), y_true > 0
    order = jnp.argsort(y_score)
    negative = jnp.where(is_positive, 0, weights)[order]
    below = jnp.concatenate([jnp.zeros(1), jnp.cumsum(negative)])
    first, last = (jnp.searchsorted(y_score[order], y_score, side=s) for s in ("left", "right"))
    positive = jnp.where(is_positive, weights, 0)
    pairs = positive * (below[first] + below[last]) / 2
    area = pairs.sum() / (positive.sum() * negative.sum())
    return jnp.where(jnp.any(jnp.isnan(y_score) & (weights > 0)), jnp.nan, area)


def pearson_correlation(
    x: Values, y: Values, *, weights: Weights = None, eps: float = 1e-8
) -> Array:
    """Returns the linear correlation; `eps` is added to the denominator.

    >>> round(pearson_correlation(jnp.array([1.0, 2, 3]), jnp.array([2.0, 4, 7])).item(), 4)
    0.9934
    """
    share = _weights(weights, x)
    share = share / jnp.maximum(share.sum(), eps)
    x, y = counted(x, share), counted(y, share)
    x, y = (v - (share * v).sum() for v in (x, y))
    products = ((share * a * b).sum() for a, b in ((x, y), (x, x), (y, y)))
    covariance, of_x, of_y = products
    return covariance / (jnp.sqrt(of_x * of_y) + eps)


def spearman_correlation(x: Values, y: Values, *, mask: Weights = None, eps: float = 1e-8) -> Array:
    """Returns the correlation of ranks; equal values share the mean of their ranks.

    >>> round(spearman_correlation(jnp.array([1, 2, 3, 4]), jnp.array([1, 3, 2, 4])).item(), 4)
    0.8
    """
    counts = jnp.ones(x.shape, bool) if mask is None else mask.astype(bool)

    def ranks(values: Array) -> Array:
        values = jnp.where(counts, values.astype(float), jnp.inf)
        ordered = jnp.sort(values)
        ends = (jnp.searchsorted(ordered, values, side=s) for s in ("left", "right"))
        return jnp.where(counts, sum(ends) / 2.0, 0)

    return pearson_correlation(ranks(x), ranks(y), weights=counts, eps=eps)


def matthews_corrcoef(
    y_true: Values, y_pred: Values, *, weights: Weights = None, eps: float = 1e-8
) -> Array:
    """Returns Matthews' correlation of classes, 0 if all labels, or all predictions, are equal.

    Of two classes, it is the correlation of labels 0 and 1; of more, see Gorodkin (2004).

    >>> round(matthews_corrcoef(jnp.array([1, 1, 1, 0]), jnp.array([1, 0, 1, 1])).item(), 3)
    -0.333
    """
    shares = _weights(weights, y_true)
    shares = shares / jnp.maximum(shares.sum(), eps)

    def chance(a: Array, b: Array) -> Array:
        """Returns how often an `a` equals a `b` of another example."""
        order = jnp.argsort(b)
        below = jnp.concatenate([jnp.zeros(1), jnp.cumsum(shares[order])])
        first, last = (jnp.searchsorted(b[order], a, side=side) for side in ("left", "right"))
        return jnp.sum(shares * (below[last] - below[first]))

    covariance = jnp.sum(shares * (y_true == y_pred)) - chance(y_true, y_pred)
    of_labels, of_predictions = (1 - chance(y, y) for y in (y_true, y_pred))
    return covariance / (jnp.sqrt(jnp.maximum(of_labels * of_predictions, 0)) + eps)


def accuracy_at_k(
    scores: Scores, relevance_labels: Labels, *, top_ks: Sequence[int], query_padding: Mask = None
) -> dict[str, Array]:
    """Returns for each k, as "accuracy@k", how many queries have a relevant item in their first k.

    >>> accuracy_at_k(jnp.array([[0.1, 0.9]]), jnp.array([[1, 0]]), top_ks=[1, 2])
    {'accuracy@1': Array(0., dtype=float32), 'accuracy@2': Array(1., dtype=float32)}
    """
    found = jnp.cumsum(_by_score(scores, relevance_labels) > 0, axis=-1) > 0
    return _means({f"accuracy@{k}": found[:, :k][:, -1] for k in top_ks}, query_padding)


def average_rank(scores: Scores, relevance_labels: Labels, *, query_padding: Mask = None) -> Array:
    """Returns the mean position, from 1, of the first relevant item of queries that have one.

    >>> average_rank(jnp.array([[0.1, 0.9, 0.5]]), jnp.array([[0, 0, 1]])).item()
    2.0
    """
    relevant = _by_score(scores, relevance_labels) > 0
    padding = ~relevant.any(axis=-1)
    padding = padding if query_padding is None else padding | query_padding
    return _means({"rank": jnp.argmax(relevant, axis=-1) + 1.0}, padding)["rank"]


def average_precision_at_k(
    scores: Scores, relevance_labels: Labels, *, top_ks: Sequence[int], query_padding: Mask = None
) -> dict[str, Array]:
    """Returns for each k, as "map@k", the mean over queries of the average precision.

    That is the precision at the position of each relevant item among the first k, summed and
    divided by the number of relevant items, at most k.

    >>> scores, labels = jnp.array([[0.9, 0.5, 0.1]]), jnp.array([[1, 0, 1]])
    >>> round(average_precision_at_k(scores, labels, top_ks=[3])["map@3"].item(), 4)
    0.8333
    """
    relevant = (_by_score(scores, relevance_labels) > 0).astype(float)
    positions = jnp.arange(1.0, scores.shape[-1] + 1)[None]
    sums = jnp.cumsum(relevant * jnp.cumsum(relevant, axis=-1) / positions, axis=-1)
    total = relevant.sum(axis=-1)
    return _means(
        {f"map@{k}": sums[:, :k][:, -1] / jnp.clip(total, 1, k) for k in top_ks}, query_padding
    )


def ndcg_at_k(
    scores: Scores, relevance_labels: Labels, *, top_ks: Sequence[int], query_padding: Mask = None
) -> dict[str, Array]:
    """Returns for each k, as "ndcg@k", the mean normalized discounted cumulative gain.

    The gain of a label l at position i is (2^l - 1) / log2(i + 1), the norm that of the best order
    (Burges et al., 2005). Queries without a relevant item have 0.

    >>> ndcg_at_k(jnp.array([[0.9, 0.5]]), jnp.array([[1, 0]]), top_ks=[2])["ndcg@2"].item()
    1.0
    """
    discounts = 1 / jnp.log2(jnp.arange(2.0, scores.shape[-1] + 2))[None]

    def gains(labels: Array) -> Array:
        return jnp.cumsum((2.0**labels - 1) * discounts, axis=-1)

    found = gains(_by_score(scores, relevance_labels))
    best = gains(jnp.sort(relevance_labels, axis=-1, descending=True))
    shares = jnp.where(best > 0, found / jnp.where(best > 0, best, 1), 0)
    return _means({f"ndcg@{k}": shares[:, :k][:, -1] for k in top_ks}, query_padding)


def _weights(weights: Weights, like: Array) -> Array:
    return jnp.ones(like.shape) if weights is None else weights.astype(float)


def _by_score(scores: Array, labels: Array) -> Array:
    return jnp.take_along_axis(labels, jnp.argsort(-scores, axis=-1), axis=-1)


def _means(values: dict[str, Array], padding: Array | None) -> dict[str, Array]:
    weights: Any = None if padding is None else ~padding
    return {
        name: (counted(x, weights) * _weights(weights, x)).sum()
        / jnp.maximum(_weights(weights, x).sum(), 1)
        for name, x in values.items()
    }
