"""Losses of logits, boxes, embeddings and rankings, and weighted means, all computed in float32.

Most functions return one number per example, for `weighted_mean`. `cross_entropy` and
`binary_cross_entropy` return `(loss, aux)`, where the dict `aux` has the loss of each target.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from weft.errors import ArgumentValueError
from weft.functional.arrays import (
    counted,
    finite_or_counted,
    positions,
    sharded_as,
)
from weft.functional.norm import l2_normalize

Aux = dict[str, Array]


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    target_labels: Int[Array, "*batch"],
    *,
    live_targets: Num[Array, "*batch"] | None = None,
    z_loss_scale: float = 0.0,
    label_smoothing: float = 0.0,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
) -> tuple[Float[Array, ""], Aux]:
    """Returns the mean negative log probability of the targets.

    Args:
        target_labels: the right class; labels outside `[0, classes)` do not count.
        live_targets: the weight of each target; by default 1 where the label is a class, else 0.
            Where it is 0, logits may be anything, including NaN, and have gradient 0.
        z_loss_scale: the factor of the squared log of the softmax's denominator, which keeps logits
            from drifting (Chowdhery et al., 2022).
        label_smoothing: the share of each target that is spread evenly over all classes (Szegedy et
            al., 2016).
        soft_target_labels: the probability of each class, not smoothed. Labels then only determine
            `accuracy` and the default of `live_targets`, which also excludes targets without any
            probability.

    Returns:
        The loss, and a dict of the scalars `total_loss` (the same loss), its parts
        `cross_entropy_loss` and `z_loss` (without its factor), `accuracy`, and `num_targets` (the
        sum of the weights), and of the arrays `per_target_loss` (with the z-loss, 0 where the
        weight is 0) and `live_targets`.

    Raises:
        ArgumentValueError: if `label_smoothing` is not between 0 and 1, or `z_loss_scale` is
            negative.

    >>> logits = jnp.array([[0.0, 0.0], [5.0, 0.0]])
    >>> loss, aux = cross_entropy(logits, jnp.array([1, -1]))
    >>> aux["per_target_loss"].round(3).tolist(), aux["num_targets"].item()
    ([0.693..., 0.0], 1.0)
    """
    check_factors("cross_entropy", label_smoothing, z_loss_scale)
    if live_targets is None:
        live_targets = which_targets_count(
            target_labels, logits.shape[-1], soft_target_labels
        )
    if soft_target_labels is not None:
        soft_target_labels = counted(
            soft_target_labels, live_targets[..., None]
        )
    statistics = logit_statistics(
        counted(logits, live_targets[..., None]),
        target_labels,
        label_smoothing=label_smoothing,
        soft_target_labels=soft_target_labels,
    )
    return cross_entropy_of_statistics(
        statistics,
        target_labels,
        live_targets=live_targets,
        z_loss_scale=z_loss_scale,
        soft_target_labels=soft_target_labels,
    )


def which_targets_count(
    target_labels: Int[Array, "*batch"],
    classes: int,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
) -> Bool[Array, "*batch"]:
    """Returns the default of the `live_targets` of `cross_entropy`."""
    live_targets = (target_labels >= 0) & (target_labels < classes)
    if soft_target_labels is not None:
        # The largest magnitude: XLA stores the comparison of each label for `any`.
        live_targets &= jnp.max(jnp.abs(soft_target_labels), axis=-1) != 0
    return live_targets


class LogitStatistics(NamedTuple):
    """Numbers that cross entropies need from the logits of each target, in float32.

    Attributes:
        log_normalizer: the logarithm of the softmax's denominator.
        expected: the mean of the logits, each weighted by the target's probability of the class.
        likeliest: the class with the largest logit, the first of several, without a gradient; the
            number of classes if a logit is NaN.
    """

    log_normalizer: Float[Array, "*batch"]
    expected: Float[Array, "*batch"]
    likeliest: Int[Array, "*batch"]


def logit_statistics(
    logits: Float[Array, "*batch classes"],
    target_labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
) -> LogitStatistics:
    """Computes the statistics of logits; the arguments are those of `cross_entropy`.

    >>> logit_statistics(jnp.array([[0.0, 2.0]]), jnp.array([1])).expected.tolist()
    [2.0]
    """
    logits = logits.astype(jnp.float32)
    classes = positions(logits.shape[-1], logits.ndim)
    if soft_target_labels is not None:
        probs = soft_target_labels.astype(jnp.float32)
        # A class without probability does not count, even if its logit is -inf.
        expected = jnp.sum(
            probs * finite_or_counted(logits, probs != 0), axis=-1
        )
    else:
        # A comparison and a sum, not a gather: stays local if classes are sharded over devices.
        is_target = target_labels[..., None] == classes
        expected = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        if label_smoothing:
            expected += label_smoothing * (logits.mean(-1) - expected)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Faster on CPUs than `argmax`, a reduction of two arrays.
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    likeliest = jnp.min(
        jnp.where(is_largest, classes, logits.shape[-1]), axis=-1
    )
    return LogitStatistics(log_normalizer, expected, likeliest)


def cross_entropy_of_statistics(
    statistics: LogitStatistics,
    target_labels: Int[Array, "*batch"],
    *,
    live_targets: Num[Array, "*batch"],
    z_loss_scale: float = 0.0,
    soft_target_labels: Float[Array, "*batch classes"] | None = None,
) -> tuple[Float[Array, ""], Aux]:
    """Returns what `cross_entropy` returns for logits that have these statistics.

    The statistics are finite also where a target does not count.
    """
    log_normalizer, expected, likeliest = statistics
    weights = live_targets.astype(jnp.float32)
    # - sum_c p_c (logit_c - log_normalizer), for probabilities that need not add up to 1.
    total_prob: Array | float = 1.0
    if soft_target_labels is not None:
        total_prob = counted(
            soft_target_labels.astype(jnp.float32).sum(-1), live_targets
        )
    cross_entropies = log_normalizer * total_prob - expected
    z_losses = jnp.square(log_normalizer)
    per_target_loss = cross_entropies
    if (
        z_loss_scale
    ):  # without the factor, the square may overflow where the loss does not
        per_target_loss = cross_entropies + z_loss_scale * z_losses
    per_target_loss = jnp.where(weights > 0, per_target_loss, 0)
    loss, num_targets = weighted_mean(per_target_loss, weights)
    cross_entropy_loss, _ = weighted_mean(cross_entropies, weights)
    z_loss, _ = weighted_mean(z_losses, weights)
    accuracy, _ = weighted_mean(likeliest == target_labels, weights)
    aux = {
        "total_loss": loss,
        "cross_entropy_loss": cross_entropy_loss,
        "z_loss": z_loss,
        "accuracy": accuracy,
        "num_targets": num_targets,
        "per_target_loss": per_target_loss * weights,
        "live_targets": live_targets,
    }
    return loss, aux


def check_factors(
    function: str, label_smoothing: float, z_loss_scale: float
) -> None:
    """Raises ArgumentValueError unless these are a share and a factor, naming the function."""
    if not 0 <= label_smoothing <= 1 or z_loss_scale < 0:
        raise ArgumentValueError(
            f"{function} got {label_smoothing=} and {z_loss_scale=}; expected a share between 0 "
            "and 1, and a factor of at least 0."
        )


def binary_cross_entropy(
    logits: Float[Array, "*shape"],
    *,
    target_labels: Num[Array, "*shape"],
    live_targets: Num[Array, "*shape"] | None = None,
) -> tuple[Float[Array, ""], Aux]:
    """Returns the mean of `sigmoid_cross_entropy`.

    Args:
        logits: of being true.
        target_labels: a probability; negative labels, and those from 2 on, do not count.
        live_targets: the weight of each target; by default 1 where the label counts. Where it is
            0, logits and labels may be anything.

    Returns:
        The loss, and a dict of `num_targets` and the arrays `per_target_loss` and `live_targets`.

    >>> loss, _ = binary_cross_entropy(jnp.zeros(2), target_labels=jnp.array([1, 0]))
    >>> round(loss.item(), 3)
    0.693
    """
    if live_targets is None:
        live_targets = (target_labels >= 0) & (target_labels < 2)
    weights = live_targets.astype(jnp.float32)
    logits = counted(logits, live_targets)
    target_labels = counted(target_labels, live_targets)
    cross_entropies = sigmoid_cross_entropy(logits, target_labels)
    per_target_loss = jnp.where(weights > 0, cross_entropies, 0)
    loss, num_targets = weighted_mean(per_target_loss, weights)
    aux = {
        "num_targets": num_targets,
        "per_target_loss": per_target_loss * weights,
        "live_targets": live_targets,
    }
    return loss, aux


def sigmoid_cross_entropy(
    logits: Float[Array, "*shape"], targets: Num[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns `-t * log(sigmoid(x)) - (1 - t) * log(1 - sigmoid(x))`, without overflow.

    >>> sigmoid_cross_entropy(jnp.array([1000.0, 1000.0]), jnp.array([1, 0])).tolist()
    [0.0, 1000.0]
    """
    logits = logits.astype(jnp.float32)
    targets = targets.astype(jnp.float32)
    # An infinite logit is certain: without a loss if it is right.
    is_right = jnp.isinf(logits) & (targets == (logits > 0))
    logits = counted(logits, ~is_right)
    # With softplus(x) = -log(1 - sigmoid(x)), and -log(sigmoid(x)) = softplus(x) - x.
    cross_entropies = jax.nn.softplus(logits) - targets * logits
    return counted(cross_entropies, ~is_right)


def categorical_hinge_loss(
    logits: Float[Array, "*batch classes"],
    targets: Num[Array, "*batch classes"],
) -> Float[Array, "*batch"]:
    """Returns the hinge loss of the right class's lead over the best other class, with margin 1.

    Targets are one-hot. The best other class counts as at least 0, as in Keras.

    >>> logits = jnp.array([[2.0, 0.5], [0.0, 3.0]])
    >>> categorical_hinge_loss(logits, jnp.array([[1, 0], [1, 0]])).tolist()
    [0.0, 4.0]
    """
    logits = logits.astype(jnp.float32)
    targets = sharded_as(targets.astype(jnp.float32), logits)
    right = jnp.sum(targets * finite_or_counted(logits, targets != 0), axis=-1)
    best_wrong = jnp.max(
        (1 - targets) * finite_or_counted(logits, targets != 1), axis=-1
    )
    return jax.nn.relu(best_wrong - right + 1)


def squared_error(
    preds: Float[Array, "*shape"], targets: Num[Array, "*shape"]
) -> Array:
    """Returns `(preds - targets)²`."""
    return jnp.square(preds.astype(jnp.float32) - targets.astype(jnp.float32))


def absolute_error(
    preds: Float[Array, "*shape"], targets: Num[Array, "*shape"]
) -> Array:
    """Returns `|preds - targets|`."""
    return jnp.abs(preds.astype(jnp.float32) - targets.astype(jnp.float32))


def huber_error(
    preds: Float[Array, "*shape"],
    targets: Num[Array, "*shape"],
    *,
    delta: float = 1.0,
) -> Array:
    """Returns half the squared error up to `delta`, and a linear error beyond (Huber, 1964).

    >>> huber_error(jnp.array([0.5, 3.0]), jnp.zeros(2)).tolist()
    [0.125, 2.5]
    """
    error = absolute_error(preds, targets)
    quadratic_part = jnp.minimum(error, delta)
    linear_part = error - quadratic_part
    return 0.5 * jnp.square(quadratic_part) + delta * linear_part


def kl_divergence(
    log_predictions: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    is_log_targets: bool = False,
) -> Float[Array, "*batch"]:
    """Returns `Σ p log(p / q)` of targets `p` and predictions `q`, where `0 log 0` is 0.

    `log_predictions` are `log q`; `targets` are `p`, or `log p` with `is_log_targets`.

    >>> half = jnp.log(jnp.array([0.5, 0.5]))
    >>> round(kl_divergence(half, jnp.array([1.0, 0.0])).item(), 3)
    0.693
    """
    log_q = log_predictions.astype(jnp.float32)
    targets = targets.astype(jnp.float32)
    if is_log_targets:
        p = jnp.exp(targets)
        is_possible = p > 0
        log_p = counted(targets, is_possible)
    else:
        p = targets
        is_possible = p > 0
        log_p = jnp.log(jnp.where(is_possible, p, 1))
    log_ratio = log_p - counted(log_q, is_possible)
    return jnp.sum(counted(p, is_possible) * log_ratio, axis=-1)


def weighted_mean(
    values: Float[Array, "*shape"],
    weights: Num[Array, "*#shape"] | None = None,
    *,
    eps: float = 1e-7,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns `sum(values * weights) / sum(weights)`, and the sum of the weights.

    Args:
        values: what to average; ignored, even if not finite, where the weight is 0. For a gradient
            of 0 there, also what they are computed from must be finite.
        weights: broadcastable to `values`; 1 by default.
        eps: the mean is 0 if the weights sum to less.

    >>> mean, weight = weighted_mean(jnp.array([1.0, 5.0]), jnp.array([3, 1]))
    >>> mean.item(), weight.item()
    (2.0, 4.0)
    """
    values = values.astype(jnp.float32)
    if weights is None:
        return jnp.mean(values), jnp.float32(values.size)
    weights = jnp.broadcast_to(weights, values.shape).astype(jnp.float32)
    total_weight = jnp.sum(weights)
    weighted_sum = jnp.sum(counted(values, weights) * weights)
    # The divisor is at least `eps`, for the gradient of a mean that is replaced by 0.
    mean = weighted_sum / jnp.maximum(total_weight, eps)
    return jnp.where(total_weight > eps, mean, 0), total_weight


def contrastive_logits(
    x: Float[Array, "x_batch dim"], y: Float[Array, "y_batch dim"]
) -> Float[Array, "x_batch y_batch"]:
    """Returns the inner product of each `x` with each `y`, in float32."""
    return jnp.einsum("id,jd->ij", x, y, preferred_element_type=jnp.float32)


def contrastive_loss(
    logits: Float[Array, "queries keys"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    key_paddings: Bool[Array, " keys"] | None = None,
    soft_labels: Float[Array, "queries keys"] | None = None,
) -> Float[Array, ""]:
    """Returns the cross entropy of finding each query's key among all keys (Oord et al., 2018).

    Args:
        logits: of each query and key; key `i` belongs to query `i`.
        temperature: divides the logits.
        key_paddings: True for padded keys, whose soft labels count as 0, and whose logits may be
            anything.
        soft_labels: the probability of each key, instead of one-hot labels; a query without any
            does not count.

    >>> round(contrastive_loss(jnp.zeros((2, 4))).item(), 3)
    1.386
    """
    if key_paddings is not None:
        logits = counted(logits, ~key_paddings)
        if soft_labels is not None:
            soft_labels = counted(soft_labels, ~key_paddings)
    if soft_labels is not None:
        # As `cross_entropy` does, for a temperature with a gradient.
        has_label = jnp.max(jnp.abs(soft_labels), axis=-1, keepdims=True)
        logits = counted(logits, has_label)
    logits = logits.astype(jnp.float32)
    # A logit of -inf has no gradient, of the temperature neither.
    is_finite = jnp.isfinite(logits)
    scaled = counted(logits, is_finite) / temperature
    logits = jnp.where(is_finite, scaled, logits)
    if key_paddings is not None:
        logits = jnp.where(key_paddings, jnp.finfo(jnp.float32).min, logits)
    labels = jnp.arange(logits.shape[0])
    loss, _ = cross_entropy(logits, labels, soft_target_labels=soft_labels)
    return loss


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
    logits = logits.astype(jnp.float32)
    targets = targets.astype(jnp.float32)
    cross_entropy = sigmoid_cross_entropy(logits, targets)
    # So that neither is computed from the other's rounding.
    target_prob = jnp.exp(-cross_entropy)
    weight = targets * alpha + (1 - targets) * (1 - alpha)
    return weight * (1 - target_prob) ** gamma * cross_entropy


def generalized_iou(
    predictions: Float[Array, "*batch 4"],
    targets: Float[Array, "*batch 4"],
    *,
    eps: float = 1e-7,
) -> Float[Array, "*batch"]:
    """Returns the overlap of two boxes, from -1 (far apart) to 1 (Rezatofighi et al., 2019).

    It is the intersection over the union, minus the share of the smallest enclosing box that
    neither covers. Boxes are two opposite corners, the smaller coordinates first; `eps` is added to
    divisors.

    >>> box, other = jnp.array([0.0, 0.0, 1.0, 1.0]), jnp.array([2.0, 0.0, 3.0, 1.0])
    >>> generalized_iou(box[None], jnp.stack([box, other])).round(3).tolist()
    [1.0, -0.33...]
    """
    predictions = predictions.astype(jnp.float32)
    targets = targets.astype(jnp.float32)

    def area(low: Array, high: Array) -> Array:
        return jnp.prod(jnp.maximum(high - low, 0), axis=-1)

    low_a, high_a = predictions[..., :2], predictions[..., 2:]
    low_b, high_b = targets[..., :2], targets[..., 2:]
    intersection = area(jnp.maximum(low_a, low_b), jnp.minimum(high_a, high_b))
    union = area(low_a, high_a) + area(low_b, high_b) - intersection
    enclosing = area(jnp.minimum(low_a, low_b), jnp.maximum(high_a, high_b))
    iou = intersection / (union + eps)
    uncovered_share = (enclosing - union) / (enclosing + eps)
    return iou - uncovered_share


def nearest_neighbor_entropy_loss(
    embeddings: Float[Array, "batch dim"],
    *,
    normalize_embedding: bool = True,
    eps: float = 1e-8,
) -> Float[Array, ""]:
    """Returns the mean of `-log(distance to the nearest other)`: low for evenly spread vectors.

    This is the Kozachenko-Leonenko estimate of differential entropy, up to sign and a constant
    (Sablayrolles et al., 2019).

    Args:
        embeddings: at least one; the only one is its own neighbor.
        normalize_embedding: whether to normalize the vectors first. In both cases, "nearest" means
            the largest inner product.
        eps: added to each component of a difference and to each distance, so that equal vectors
            have a finite loss; added to the squared length of a vector that is normalized.

    Raises:
        ArgumentValueError: if there is none.

    >>> opposite = jnp.array([[1.0, 0.0], [-5.0, 0.0]])
    >>> round(nearest_neighbor_entropy_loss(opposite).item(), 3)  # both are 2 apart
    -0.693
    """
    n = embeddings.shape[0]
    if n < 1:
        raise ArgumentValueError(
            f"embeddings of shape {embeddings.shape} have no neighbors; expected at least one."
        )
    x = embeddings.astype(jnp.float32)
    if normalize_embedding:
        x = l2_normalize(x, eps)
    similarity = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, x @ x.T)
    nearest = x[jnp.argmax(similarity, axis=1)]
    squares = jnp.sum(jnp.square(nearest - x + eps), axis=1)
    # The root has no gradient at 0.
    is_apart = squares > 0
    distances = jnp.where(
        is_apart, jnp.sqrt(jnp.where(is_apart, squares, 1)), 0
    )
    return -jnp.mean(jnp.log(distances + eps))


def elementwise_similarity(
    x: Float[Array, "*batch dim"],
    y: Float[Array, "*batch dim"],
    *,
    normalize_embedding: bool = True,
    eps: float = 1e-8,
) -> Float[Array, "*batch dim"]:
    """Returns products of components, which add up to the cosine of two vectors.

    Without `normalize_embedding`, they add up to the inner product. `eps` is added to squared
    lengths.

    >>> elementwise_similarity(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])).round(3).tolist()
    [0.0, 0.80...]
    """
    x = x.astype(jnp.float32)
    y = y.astype(jnp.float32)
    if normalize_embedding:
        x = l2_normalize(x, eps)
        y = l2_normalize(y, eps)
    return x * y


def activation_flops(
    embeddings: Float[Array, "*batch dim"],
    *,
    paddings: Num[Array, "*batch"] | None = None,
    sparsity_threshold: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns a smooth cost of a search with these sparse vectors, and their mean number of zeros.

    The cost is the sum over components of the squared mean magnitude: the expected number of
    products in an inner product if magnitudes were probabilities (Paria et al., 2020).

    Args:
        paddings: 1 for vectors that do not count, and may be anything.
        sparsity_threshold: the largest magnitude that counts as zero.

    >>> cost, zeros = activation_flops(jnp.array([[1.0, 0.0], [1.0, 2.0]]))
    >>> cost.item(), zeros.item()
    (2.0, 0.5)
    """
    vectors = embeddings.astype(jnp.float32).reshape(-1, embeddings.shape[-1])
    if paddings is None:
        paddings = jnp.zeros(vectors.shape[:1])
    is_live = 1 - paddings.astype(jnp.float32).reshape(-1)
    magnitudes = jnp.abs(counted(vectors, is_live[:, None]))
    num_live = jnp.maximum(1, is_live.sum())
    mean_magnitudes = (
        jnp.sum(magnitudes * is_live[:, None], axis=0) / num_live
    )  # (dim,)
    num_zeros = jnp.sum(magnitudes <= sparsity_threshold, axis=1)  # (vectors,)
    cost = jnp.sum(jnp.square(mean_magnitudes))
    mean_zeros = jnp.sum(num_zeros * is_live) / num_live
    return cost, mean_zeros


def with_cosine_margin(
    cosines: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    alpha: float = 1.0,
    margin: float = 0.0,
) -> Float[Array, "*batch classes"]:
    """Returns `alpha * (cosines - margin * targets)`: the right class must lead by a margin.

    These are the logits of a softmax cross entropy (Wang et al., 2018, CosFace). `cosines` are
    those of an embedding and each class; `targets` are one-hot, or probabilities.

    >>> right = jnp.array([1.0, 0.0])
    >>> with_cosine_margin(jnp.array([0.5, 0.5]), right, alpha=10, margin=0.5).tolist()
    [0.0, 5.0]
    """
    return alpha * (cosines.astype(jnp.float32) - margin * targets)


def rank_pairs(
    ranks: Int[Array, "batch items"],
) -> Float[Array, "batch items items"]:
    """Returns 1 at (b, i, j) if item i is ranked before item j, else 0.

    Ranks start at 1, the best, and may be shared. A rank of 0 or less excludes an item.

    >>> rank_pairs(jnp.array([[1, 2, 0]])).tolist()
    [[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]
    """
    first = ranks[:, :, None]
    second = ranks[:, None, :]
    is_before = (first < second) & (first > 0)
    return is_before.astype(jnp.float32)


def pairwise_loss(
    *,
    logits: Float[Array, "batch items"],
    pair_weights: Float[Array, "batch items items"],
    loss_scale: Float[Array, " batch"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean of `-log sigmoid(logit_i - logit_j)`, and the sum of its weights.

    The loss of a Bradley-Terry model (Burges et al., 2005, RankNet).

    Args:
        pair_weights: at (b, i, j), the weight of "item i is better than item j". The logit of an
            item without any may be anything.
        loss_scale: a factor of each example's loss, not included in the weights.

    >>> loss, weight = pairwise_loss(
    ...     logits=jnp.zeros((1, 2)), pair_weights=rank_pairs(jnp.array([[1, 2]])),
    ...     loss_scale=jnp.ones(1))
    >>> round(loss.item(), 3), weight.item()
    (0.693, 1.0)
    """
    logits = logits.astype(jnp.float32)
    # logit_j - logit_i at (b, i, j)
    differences = counted(logits[:, None, :] - logits[:, :, None], pair_weights)
    pair_losses = jax.nn.softplus(differences)
    total_loss = jnp.sum(pair_losses * pair_weights * loss_scale[:, None, None])
    total_weight = jnp.sum(pair_weights, dtype=jnp.float32)
    return total_loss / jnp.maximum(total_weight, 1e-7), total_weight
