"""Scores of predictions: classification, correlation and retrieval.

All are functions of whole arrays, without state. A weight of zero leaves an example out.
"""

from collections.abc import Sequence

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
    y_true: Int[Array, " n"],
    y_pred: Int[Array, " n"],
    *,
    num_classes: int,
    weights: Weights = None,
) -> Float[Array, "classes classes"]:
    """Counts the examples of each true class (row) and predicted class (column).

    Examples whose class is outside `[0, num_classes)`, such as -1, do not count.

    >>> y_true, y_pred = jnp.array([0, 1, 1, -1]), jnp.array([0, 0, 1, 1])
    >>> confusion_matrix(y_true, y_pred, num_classes=2).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    counts = jnp.zeros((num_classes, num_classes))
    # A negative index would count from the end; `mode="drop"` leaves out what is too large.
    rows = jnp.where(y_true < 0, num_classes, y_true)
    columns = jnp.where(y_pred < 0, num_classes, y_pred)
    return counts.at[rows, columns].add(_weights(weights, y_true), mode="drop")


def precision_recall_f_score(
    y_true: Values,
    y_pred: Values,
    *,
    beta: float = 1.0,
    eps: float = 1e-8,
    weights: Weights = None,
) -> dict[str, Array]:
    """Returns "precision", "recall" and "f_score" of the positive class of labels 0 and 1.

    The F-score is (1 + beta^2) precision recall / (beta^2 precision + recall); `eps` is added to
    the denominators.

    >>> scores = precision_recall_f_score(jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 0, 0]))
    >>> {name: round(float(x), 3) for name, x in scores.items()}
    {'precision': 0.5, 'recall': 0.333, 'f_score': 0.4}
    """
    counts = confusion_matrix(
        y_true.astype(int), y_pred.astype(int), num_classes=2, weights=weights
    )
    (_, false_positives), (false_negatives, true_positives) = counts
    precision = true_positives / (true_positives + false_positives + eps)
    recall = true_positives / (true_positives + false_negatives + eps)
    f_score = (
        (1 + beta**2)
        * precision
        * recall
        / (beta**2 * precision + recall + eps)
    )
    return {"precision": precision, "recall": recall, "f_score": f_score}


def roc_auc_score(
    y_true: Values, y_score: Values, *, weights: Weights = None
) -> Array:
    """Returns the area under the ROC curve: how often a positive scores above a negative.

    Equal scores count one half. NaN if there are only positives or only negatives, or a score that
    counts is NaN.

    >>> roc_auc_score(jnp.array([0, 0, 1, 1]), jnp.array([0.1, 0.4, 0.35, 0.8])).item()
    0.75
    """
    weights = _weights(weights, y_score)
    is_positive = y_true > 0
    positive_weights = jnp.where(is_positive, weights, 0)
    negative_weights = jnp.where(is_positive, 0, weights)
    # Each positive beats the negatives with smaller scores, and half of those with equal scores.
    lower, lower_or_equal = _weight_up_to(y_score, y_score, negative_weights)
    pairs = positive_weights * (lower + lower_or_equal) / 2
    area = pairs.sum() / (positive_weights.sum() * negative_weights.sum())
    counts_nan = jnp.any(jnp.isnan(y_score) & (weights > 0))
    return jnp.where(counts_nan, jnp.nan, area)


def pearson_correlation(
    x: Values, y: Values, *, weights: Weights = None, eps: float = 1e-8
) -> Array:
    """Returns the linear correlation; `eps` is added to the denominator.

    >>> round(pearson_correlation(jnp.array([1.0, 2, 3]), jnp.array([2.0, 4, 7])).item(), 4)
    0.9934
    """
    shares = _shares(weights, x, eps)
    x = counted(x, shares)
    y = counted(y, shares)
    x = x - (shares * x).sum()
    y = y - (shares * y).sum()
    covariance = (shares * x * y).sum()
    x_variance = (shares * x * x).sum()
    y_variance = (shares * y * y).sum()
    return covariance / (jnp.sqrt(x_variance * y_variance) + eps)


def spearman_correlation(
    x: Values, y: Values, *, mask: Weights = None, eps: float = 1e-8
) -> Array:
    """Returns the correlation of ranks; equal values share the mean of their ranks.

    >>> round(spearman_correlation(jnp.array([1, 2, 3, 4]), jnp.array([1, 3, 2, 4])).item(), 4)
    0.8
    """
    counts = _weights(mask, x).astype(bool)

    def ranks(values: Array) -> Array:
        # Examples that are masked go to the end of the order, where they move no rank.
        values = jnp.where(counts, values.astype(float), jnp.inf)
        first, end = _positions_of_equals(jnp.sort(values), values)
        return jnp.where(counts, (first + end) / 2.0, 0)

    return pearson_correlation(ranks(x), ranks(y), weights=counts, eps=eps)


def matthews_corrcoef(
    y_true: Values,
    y_pred: Values,
    *,
    weights: Weights = None,
    eps: float = 1e-8,
) -> Array:
    """Returns Matthews' correlation of classes, 0 if all labels, or all predictions, are equal.

    Of two classes, it is the correlation of labels 0 and 1; of more, see Gorodkin (2004).

    >>> round(matthews_corrcoef(jnp.array([1, 1, 1, 0]), jnp.array([1, 0, 1, 1])).item(), 3)
    -0.333
    """
    shares = _shares(weights, y_true, eps)

    def chance(a: Array, b: Array) -> Array:
        """Returns how often an `a` equals a `b` of another example."""
        lower, lower_or_equal = _weight_up_to(a, b, shares)
        return jnp.sum(shares * (lower_or_equal - lower))

    # As covariance and variances of one-hot classes, without a matrix over all pairs of classes.
    covariance = jnp.sum(shares * (y_true == y_pred)) - chance(y_true, y_pred)
    label_variance = 1 - chance(y_true, y_true)
    prediction_variance = 1 - chance(y_pred, y_pred)
    product = jnp.maximum(
        label_variance * prediction_variance, 0
    )  # rounding may make it negative
    return covariance / (jnp.sqrt(product) + eps)


def accuracy_at_k(
    scores: Scores,
    relevance_labels: Labels,
    *,
    top_ks: Sequence[int],
    query_padding: Mask = None,
) -> dict[str, Array]:
    """Returns for each k, as "accuracy@k", how many queries have a relevant item in their first k.

    >>> accuracy_at_k(jnp.array([[0.1, 0.9]]), jnp.array([[1, 0]]), top_ks=[1, 2])
    {'accuracy@1': Array(0., dtype=float32), 'accuracy@2': Array(1., dtype=float32)}
    """
    is_relevant = _by_score(scores, relevance_labels) > 0
    any_so_far = jnp.cumsum(is_relevant, axis=-1) > 0  # (queries, items)
    results = {}
    for k in top_ks:
        results[f"accuracy@{k}"] = _mean_over_queries(
            _at_rank(any_so_far, k), query_padding
        )
    return results


def average_rank(
    scores: Scores, relevance_labels: Labels, *, query_padding: Mask = None
) -> Array:
    """Returns the mean position, from 1, of the first relevant item of queries that have one.

    >>> average_rank(jnp.array([[0.1, 0.9, 0.5]]), jnp.array([[0, 0, 1]])).item()
    2.0
    """
    is_relevant = _by_score(scores, relevance_labels) > 0
    padding = ~is_relevant.any(axis=-1)
    if query_padding is not None:
        padding = padding | query_padding
    ranks = jnp.argmax(is_relevant, axis=-1) + 1.0
    return _mean_over_queries(ranks, padding)


def average_precision_at_k(
    scores: Scores,
    relevance_labels: Labels,
    *,
    top_ks: Sequence[int],
    query_padding: Mask = None,
) -> dict[str, Array]:
    """Returns for each k, as "map@k", the mean over queries of the average precision.

    That is the precision at the position of each relevant item among the first k, summed and
    divided by the number of relevant items, at most k.

    >>> scores, labels = jnp.array([[0.9, 0.5, 0.1]]), jnp.array([[1, 0, 1]])
    >>> round(average_precision_at_k(scores, labels, top_ks=[3])["map@3"].item(), 4)
    0.8333
    """
    is_relevant = (_by_score(scores, relevance_labels) > 0).astype(
        float
    )  # (queries, items)
    positions = jnp.arange(1.0, scores.shape[-1] + 1)[None]
    precision_of_relevant = (
        is_relevant * jnp.cumsum(is_relevant, axis=-1) / positions
    )
    precision_sums = jnp.cumsum(precision_of_relevant, axis=-1)
    num_relevant = is_relevant.sum(axis=-1)
    results = {}
    for k in top_ks:
        average_precisions = _at_rank(precision_sums, k) / jnp.clip(
            num_relevant, 1, k
        )
        results[f"map@{k}"] = _mean_over_queries(
            average_precisions, query_padding
        )
    return results


def ndcg_at_k(
    scores: Scores,
    relevance_labels: Labels,
    *,
    top_ks: Sequence[int],
    query_padding: Mask = None,
) -> dict[str, Array]:
    """Returns for each k, as "ndcg@k", the mean normalized discounted cumulative gain.

    The gain of a label l at position i is (2^l - 1) / log2(i + 1), the norm that of the best order
    (Burges et al., 2005). Queries without a relevant item have 0.

    >>> ndcg_at_k(jnp.array([[0.9, 0.5]]), jnp.array([[1, 0]]), top_ks=[2])["ndcg@2"].item()
    1.0
    """
    discounts = 1 / jnp.log2(jnp.arange(2.0, scores.shape[-1] + 2))[None]

    def cumulative_gains(labels: Array) -> Array:
        return jnp.cumsum((2.0**labels - 1) * discounts, axis=-1)

    gains = cumulative_gains(_by_score(scores, relevance_labels))
    best_gains = cumulative_gains(
        jnp.sort(relevance_labels, axis=-1, descending=True)
    )
    has_relevant = best_gains > 0
    normalized = jnp.where(
        has_relevant, gains / jnp.where(has_relevant, best_gains, 1), 0
    )
    results = {}
    for k in top_ks:
        results[f"ndcg@{k}"] = _mean_over_queries(
            _at_rank(normalized, k), query_padding
        )
    return results


def _weights(weights: Weights, like: Array) -> Array:
    if weights is None:
        return jnp.ones(like.shape)
    return weights.astype(float)


def _shares(weights: Weights, like: Array, eps: float) -> Array:
    """Returns weights whose sum is 1."""
    weights = _weights(weights, like)
    return weights / jnp.maximum(weights.sum(), eps)


def _positions_of_equals(ordered: Array, values: Array) -> tuple[Array, Array]:
    """Returns where the numbers equal to each value begin and end in an ordered array."""
    first = jnp.searchsorted(ordered, values, side="left")
    end = jnp.searchsorted(ordered, values, side="right")
    return first, end


def _weight_up_to(
    values: Array, compared: Array, weights: Array
) -> tuple[Array, Array]:
    """Returns, for each value, the total weight of what is less, and of what is not greater.

    By a sort and cumulative sums: n log n operations, where comparing all pairs takes n².
    """
    order = jnp.argsort(compared)
    cumulative = jnp.concatenate([jnp.zeros(1), jnp.cumsum(weights[order])])
    first, end = _positions_of_equals(compared[order], values)
    return cumulative[first], cumulative[end]


def _by_score(scores: Array, labels: Array) -> Array:
    """Returns the labels of each query's items, from the highest score to the lowest."""
    order = jnp.argsort(-scores, axis=-1)
    return jnp.take_along_axis(labels, order, axis=-1)


def _at_rank(values: Array, k: int) -> Array:
    """Returns the column of rank k, or the last one if there are fewer."""
    return values[:, :k][:, -1]


def _mean_over_queries(values: Array, padding: Mask) -> Array:
    is_query = None if padding is None else ~padding
    weights = _weights(is_query, values)
    return (counted(values, is_query) * weights).sum() / jnp.maximum(
        weights.sum(), 1
    )
