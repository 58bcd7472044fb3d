"""Metrics that need all rows at once: they keep what batches have, and compute at the end.

The rows are a tuple with an entry for each batch. Merging joins the tuples, so that nothing is
copied, and moves rows to the host, which has room for them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from weft import errors, functional, struct
from weft.metrics.classification import check_logits
from weft.metrics.metric import Metric, Weights, target_weights
from weft.typing import Tensor


class Rows(NamedTuple):
    """Rows of a batch."""

    outputs: PyTree
    targets: PyTree
    weights: ArrayLike


class _OfRows(Metric):
    """Base of metrics that keep rows."""

    batches: tuple[Rows, ...] = struct.field(default=(), kw_only=True)

    def merge(self, other: Self) -> Self:
        batches = _on_host((*self.batches, *other.batches))
        return self.replace(batches=batches)

    def _with_rows(
        self, outputs: PyTree, targets: PyTree, weights: ArrayLike
    ) -> Self:
        return self.replace(batches=(Rows(outputs, targets, weights),))

    def _all_rows(self) -> Rows:
        if not self.batches:
            raise errors.LossError(
                f"{type(self).__name__} has no batch yet; call `metric = metric.update(...)`."
            )
        concatenate: Any = (
            jnp.concatenate if _is_traced(self.batches) else np.concatenate
        )
        return jax.tree.map(lambda *parts: concatenate(parts), *self.batches)


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _on_host(batches: tuple[Rows, ...]) -> tuple[Rows, ...]:
    if _is_traced(batches):
        return batches
    return jax.device_get(batches)


class AUC(_OfRows):
    """Area under the ROC curve, exactly: how often a positive has a larger score than a negative.

    Equal scores count one half. Of more than two classes, the mean of each class against the rest,
    by softmax. It is NaN if a class has no target, or all. The scores of all rows are kept, 4 bytes
    for each class and row.

    >>> metric = AUC().update(jnp.array([0.1, 0.4]), jnp.array([0, 0]))
    >>> metric = metric.update(jnp.array([0.35, 0.8]), jnp.array([1, 1]))
    >>> float(metric.compute())
    0.75
    """

    def of_batch(
        self, outputs: ArrayLike, targets: ArrayLike, weights: Weights = None
    ) -> Self:
        """Returns the metric of one batch alone.

        Args:
            outputs: Logits of each class along the last axis; or, in the shape of the targets, any
                score that grows with the probability of class 1.
            targets: Classes. A target outside `[0, classes)` does not count.
            weights: Of rows or of targets; 1 by default.

        Raises LossError if the shapes or dtypes do not fit.
        """
        outputs = jnp.asarray(outputs)
        targets = jnp.asarray(targets)
        weights = target_weights(weights, targets).reshape(-1)
        if outputs.shape == targets.shape:
            num_classes = 2
            scores = outputs.astype(jnp.float32).reshape(-1)
        else:
            check_logits(outputs, targets)
            num_classes = outputs.shape[-1]
            if num_classes == 1:
                raise errors.LossError(
                    f"AUC got outputs of shape {outputs.shape}, logits of a single class; let the "
                    "model drop the last axis."
                )
            scores = _class_scores(
                outputs.astype(jnp.float32).reshape(-1, num_classes)
            )
        targets = targets.reshape(-1)
        is_class = (targets >= 0) & (targets < num_classes)
        return self._with_rows(scores, targets, jnp.where(is_class, weights, 0))

    def compute(self) -> Tensor:
        """Returns the area, `Float[Array, ""]`."""
        return _mean_area(*self._all_rows())


def _class_scores(logits: Tensor) -> Tensor:
    """Returns a score of class 1 of two classes, or of each of more."""
    if logits.shape[-1] == 2:
        # The difference grows with the probability and, unlike it, does not round to 1.
        return logits[:, 1] - logits[:, 0]
    return jax.nn.softmax(logits)


@jax.jit
def _mean_area(scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the area of the scores of class 1, or the mean of those of all classes by column.

    Compiled as a whole: operation by operation, it takes longer than the epoch of a small model.
    """
    if scores.ndim == 1:
        return functional.roc_auc_score(targets > 0, scores, weights=weights)
    areas = []
    for i in range(scores.shape[-1]):
        areas.append(
            functional.roc_auc_score(
                targets == i, scores[:, i], weights=weights
            )
        )
    return jnp.mean(jnp.stack(areas))


class AllRows(_OfRows):
    """Metric by any function that takes all rows at once, such as one of scikit-learn.

    The function is called on the host with NumPy arrays, once for an evaluation. `weft.fit` gives
    it the outputs and the batch, as other functions. Rows of weight 0 are left out; other weights
    are for the function to use: `row_weight` of the batch. The outputs and batches of all rows are
    kept in the host's memory.

    >>> def spread(outputs, targets):
    ...     return np.std(outputs - targets)
    >>> metric = AllRows(spread).update(jnp.array([1.0, 3.0]), jnp.array([0.0, 0.0]))
    >>> metric = metric.update(jnp.array([5.0]), jnp.array([0.0]))
    >>> round(float(metric.compute()), 3)
    1.633
    """

    fn: Callable[[PyTree, PyTree], Any] = struct.field(pytree_node=False)

    def of_batch(
        self, outputs: PyTree, targets: PyTree, weights: Weights = None
    ) -> Self:
        """Returns the metric of one batch alone.

        Args:
            outputs: Arrays, in nested dicts, lists or tuples, whose first axis is that of the rows.
            targets: The same.
            weights: Of rows.
        """
        if weights is None:
            num_rows = len(jax.tree.leaves(outputs)[0])
            weights = jnp.ones(num_rows)
        return self._with_rows(outputs, targets, weights)

    def compute(self) -> Any:
        """Returns the function's result for all rows.

        Raises LossError inside of `jax.jit`.
        """
        outputs, targets, weights = self._all_rows()
        if _is_traced(weights):
            raise errors.LossError(
                "AllRows computes on the host, where it can leave rows out; call compute() outside "
                "of jax.jit, with the metric that the compiled function returns."
            )
        counts = np.asarray(weights) > 0
        outputs, targets = jax.tree.map(
            lambda x: np.asarray(x)[counts], (outputs, targets)
        )
        return self.fn(outputs, targets)
