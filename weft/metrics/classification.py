"""Metrics of classification that are ratios of counts.

    hits        of each class, the examples that are predicted right
    predicted   of each class, the examples that are predicted to be of it
    actual      of each class, the examples that are of it

    precision = hits / predicted    recall = hits / actual    F1 = 2 hits / (predicted + actual)

Counts are sums of weights in float32. Values equal those of scikit-learn with the same weights; a
ratio of 0 to 0 is 0, as there.
"""

from typing import Literal, NamedTuple, Self, get_args

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from weft import errors, functional, struct
from weft.metrics.metric import Metric, Weights, target_weights
from weft.typing import Tensor

Average = Literal["binary", "macro", "micro", "weighted"] | None
"""How the scores of classes become one number, as in scikit-learn.

"binary" is the score of class 1 of two classes, "macro" the mean over the classes that occur in
targets or predictions, "weighted" that weighted by the classes' number of targets, and "micro" the
ratio of the sums over classes. None keeps one score for each class.
"""
_AVERAGES = get_args(get_args(Average)[0])


class Predictions(NamedTuple):
    """Targets and predictions of a batch as classes, with the weight of each."""

    actual: Int[Tensor, "..."]
    predicted: Int[Tensor, "..."]
    weights: Float[Tensor, "..."]
    num_classes: int


def check_logits(outputs: Tensor, targets: Tensor) -> None:
    """Raises LossError unless outputs are logits along the last axis and targets are labels."""
    if outputs.shape[:-1] != targets.shape or not outputs.ndim:
        raise errors.LossError(
            f"the outputs have shape {outputs.shape} and the targets {targets.shape}; expected "
            "logits of each class along the last axis, and one label for each row: outputs of "
            f"shape {(*targets.shape, 'classes')}."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise errors.LossError(
            f"the targets have dtype {targets.dtype}; expected integers, the right classes. "
            'Convert them, `y.astype("int32")`, or take "mse" for real numbers.'
        )


def predictions(
    outputs: ArrayLike,
    targets: ArrayLike,
    weights: Weights = None,
    num_classes: int | None = None,
) -> Predictions:
    """Returns the classes that outputs and targets mean.

    Args:
        outputs: Logits of each class along the last axis; or, in the shape of the targets, one
            logit of class 1 for each target, or the predicted class, an integer.
        targets: Classes; with one logit for each target also the probability of class 1. A target
            outside `[0, classes)` does not count.
        num_classes: Needed with predicted classes.

    Raises LossError if the shapes or dtypes do not fit.
    """
    outputs = jnp.asarray(outputs)
    targets = jnp.asarray(targets)
    weights = target_weights(weights, targets)
    if outputs.shape != targets.shape:
        check_logits(outputs, targets)
        if outputs.shape[-1] == 1:
            raise errors.LossError(
                f"the outputs have shape {outputs.shape}, logits of a single class; expected one "
                "for each class, or outputs in the shape of the targets, which are one logit of "
                "class 1 each: let the model drop the last axis."
            )
        predicted = jnp.argmax(outputs, -1)
        num_classes = outputs.shape[-1]
    elif jnp.issubdtype(outputs.dtype, jnp.floating):
        predicted = (outputs > 0).astype(int)
        num_classes = 2
        # A probability, or a class of 0 and 1. Others, such as -1, do not count.
        is_known = (targets >= 0) & (targets <= 1)
        targets = jnp.where(is_known, targets > 0.5, -1)
    elif outputs.dtype == bool:
        predicted = outputs.astype(int)
        num_classes = 2
    elif num_classes is None:
        raise errors.LossError(
            f"the outputs are integers of shape {outputs.shape}, the predicted classes; expected "
            "also how many classes there are: num_classes=…, or logits as outputs."
        )
    else:
        predicted = outputs
    is_class = (targets >= 0) & (targets < num_classes)
    weights = jnp.where(is_class, weights, 0)
    return Predictions(targets.astype(int), predicted, weights, num_classes)


class Accuracy(Metric):
    """Share of the targets that are predicted right; for the arguments see `predictions`.

    >>> logits, labels = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), jnp.array([0, 1, 1])
    >>> round(float(Accuracy().update(logits, labels).compute()), 3)
    0.667
    """

    num_classes: int | None = struct.field(pytree_node=False, default=None)
    hits: Tensor | None = None
    weight: Tensor | None = None

    def of_batch(
        self, outputs: ArrayLike, targets: ArrayLike, weights: Weights = None
    ) -> Self:
        batch = predictions(outputs, targets, weights, self.num_classes)
        is_right = batch.predicted == batch.actual
        hits = jnp.sum(jnp.where(is_right, batch.weights, 0))
        return self.replace(hits=hits, weight=jnp.sum(batch.weights))

    def compute(self) -> Tensor:
        """Returns the share, `Float[Array, ""]`; 0 if no target counts."""
        return _ratio(self.hits, self.weight)


class _OfClasses(Metric):
    """Base of ratios of counts of each class.

    Args:
        average: How the scores of classes become one number; see `Average`.
        num_classes: Needed if outputs are predicted classes.
    """

    average: Average = struct.field(pytree_node=False, default="binary")
    num_classes: int | None = struct.field(pytree_node=False, default=None)
    hits: Tensor | None = None
    predicted: Tensor | None = None
    actual: Tensor | None = None

    def __post_init__(self) -> None:
        if self.average is not None and self.average not in _AVERAGES:
            raise errors.LossError(
                f"{type(self).__name__} got average={self.average!r}. "
                f"{errors.did_you_mean(str(self.average), _AVERAGES)} Or None, for a score of each "
                "class."
            )

    def of_batch(
        self, outputs: ArrayLike, targets: ArrayLike, weights: Weights = None
    ) -> Self:
        batch = predictions(outputs, targets, weights, self.num_classes)
        if self.average == "binary" and batch.num_classes != 2:
            raise errors.LossError(
                f"{type(self).__name__} got outputs of {batch.num_classes} classes, and "
                "average='binary', the score of class 1 of two classes; choose average='macro', "
                "'weighted' or 'micro', or None for a score of each class."
            )
        # Comparisons and sums, not a scatter: they stay local where rows are sharded.
        classes = jnp.arange(batch.num_classes)[None]  # (1, classes)
        weights = batch.weights.reshape(-1)[:, None]  # (targets, 1)
        is_actual = batch.actual.reshape(-1)[:, None] == classes
        is_predicted = batch.predicted.reshape(-1)[:, None] == classes
        actual = jnp.where(is_actual, weights, 0)
        predicted = jnp.where(is_predicted, weights, 0)
        hits = jnp.where(is_predicted, actual, 0)
        return self.replace(
            hits=jnp.sum(hits, axis=0),
            predicted=jnp.sum(predicted, axis=0),
            actual=jnp.sum(actual, axis=0),
        )

    def _terms(
        self, hits: Tensor, predicted: Tensor, actual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns numerator and denominator of each class's score."""
        raise NotImplementedError(type(self))

    def compute(self) -> Tensor:
        """Returns the score, `Float[Array, ""]`, or those of classes with `average=None`."""
        hits = _of_some(self.hits)
        predicted = _of_some(self.predicted)
        actual = _of_some(self.actual)
        numerator, denominator = self._terms(hits, predicted, actual)
        scores = _ratio(numerator, denominator)
        if self.average is None:
            return scores
        if self.average == "binary":
            return scores[1]
        if self.average == "micro":
            return _ratio(jnp.sum(numerator), jnp.sum(denominator))
        if self.average == "weighted":
            class_weights = actual
        else:
            class_weights = (
                actual + predicted > 0
            )  # "macro": of the classes that occur
        return _ratio(jnp.sum(scores * class_weights), jnp.sum(class_weights))


class Precision(_OfClasses):
    """Share of the predictions of a class that are right.

    Args:
        average: How the scores of classes become one number; see `Average`.
        num_classes: Needed if outputs are predicted classes.

    >>> metric = Precision().update(jnp.array([2.0, 1.0, -1.0]), jnp.array([1, 0, 1]))
    >>> float(metric.compute())
    0.5
    """

    def _terms(
        self, hits: Tensor, predicted: Tensor, actual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return hits, predicted


class Recall(_OfClasses):
    """Share of the targets of a class that are predicted right.

    Args:
        average: How the scores of classes become one number; see `Average`.
        num_classes: Needed if outputs are predicted classes.

    >>> metric = Recall().update(jnp.array([2.0, 1.0, -1.0, -1.0]), jnp.array([1, 0, 1, 1]))
    >>> round(float(metric.compute()), 3)
    0.333
    """

    def _terms(
        self, hits: Tensor, predicted: Tensor, actual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return hits, actual


class F1Score(_OfClasses):
    """Harmonic mean of precision and recall.

    Args:
        average: How the scores of classes become one number; see `Average`.
        num_classes: Needed if outputs are predicted classes.

    >>> metric = F1Score()
    >>> metric = metric.update(jnp.array([2.0, 1.0]), jnp.array([1, 0]))
    >>> metric = metric.update(jnp.array([-1.0, -1.0]), jnp.array([1, 1]))
    >>> round(float(metric.compute()), 3)
    0.4
    """

    def _terms(
        self, hits: Tensor, predicted: Tensor, actual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return 2 * hits, predicted + actual


class ConfusionMatrix(Metric):
    """Counts of the targets of each class (row) by predicted class (column).

    Args:
        num_classes: Needed if outputs are predicted classes.

    >>> metric = ConfusionMatrix(num_classes=2).update(jnp.array([0, 0, 1]), jnp.array([0, 1, 1]))
    >>> metric.compute().tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """

    num_classes: int | None = struct.field(pytree_node=False, default=None)
    counts: Tensor | None = None

    def of_batch(
        self, outputs: ArrayLike, targets: ArrayLike, weights: Weights = None
    ) -> Self:
        batch = predictions(outputs, targets, weights, self.num_classes)
        counts = functional.confusion_matrix(
            batch.actual.reshape(-1),
            batch.predicted.reshape(-1),
            num_classes=batch.num_classes,
            weights=batch.weights.reshape(-1),
        )
        return self.replace(counts=counts)

    def compute(self) -> Tensor:
        """Returns the counts, `Float[Array, "classes classes"]`."""
        return _of_some(self.counts)


class Perplexity(Metric):
    """Exponential of the mean cross entropy of logits, in nats, over all targets that count.

    Outputs are logits along the last axis. A target outside `[0, classes)` does not count.

    >>> metric = Perplexity().update(jnp.zeros((2, 3, 5)), jnp.array([[0, 1, 2], [4, 4, -1]]))
    >>> round(float(metric.compute()), 3)
    5.0
    """

    nats: Tensor | None = None
    weight: Tensor | None = None

    def of_batch(
        self, outputs: ArrayLike, targets: ArrayLike, weights: Weights = None
    ) -> Self:
        outputs = jnp.asarray(outputs)
        targets = jnp.asarray(targets)
        check_logits(outputs, targets)
        is_class = (targets >= 0) & (targets < outputs.shape[-1])
        weights = jnp.where(is_class, target_weights(weights, targets), 0)
        _, aux = functional.cross_entropy(
            outputs, targets, live_targets=weights
        )
        nats = jnp.where(weights > 0, aux["per_target_loss"], 0)
        return self.replace(nats=jnp.sum(nats), weight=jnp.sum(weights))

    def compute(self) -> Tensor:
        """Returns the perplexity, `Float[Array, ""]`; 1 if no target counts."""
        return jnp.exp(_ratio(self.nats, self.weight))


def _of_some(counts: Tensor | None) -> Tensor:
    if counts is None:
        raise errors.LossError(
            "the metric has no batch yet; call `metric = metric.update(...)`."
        )
    return jnp.asarray(counts)


def _ratio(numerator: Tensor | None, denominator: Tensor | None) -> Tensor:
    """Returns the ratio in float32, 0 where the denominator is 0."""
    numerator = _of_some(numerator)
    denominator = _of_some(denominator)
    is_defined = denominator > 0
    ratio = numerator / jnp.where(is_defined, denominator, 1)
    return jnp.where(is_defined, ratio, 0)
