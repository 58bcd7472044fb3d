"""Base of metrics: what a batch adds to a metric, and how batches add up.

A metric is an immutable pytree of options and sums. The value is computed from the sums of all
batches, since most metrics are not the mean of those of batches:

    metric = F1Score()                                    no batch yet
    metric = metric.update(outputs, targets, weights)     for each batch, also inside of `jax.jit`
    metric.compute()

A metric is also a `Summary`: a model may report that of its batch, and an evaler adds them up.
"""

import inspect
from collections.abc import Hashable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree

from weft import errors
from weft.core.spmd import constrain
from weft.hierarchy.metrics import MetricSummary
from weft.struct import child_names
from weft.typing import Tensor

Weights = ArrayLike | None


class Metric(MetricSummary):
    """Base of metrics. A subclass defines `of_batch` and `compute`.

    Fields with arrays default to None, for no batch yet, and add up over batches; for another rule,
    define `merge`. Options are fields with `struct.field(pytree_node=False)`.

    >>> class RootMeanSquare(Metric):
    ...     squares: jax.Array | None = None
    ...     weight: jax.Array | None = None
    ...     def of_batch(self, outputs, targets, weights=None):
    ...         weights = jnp.ones(len(targets)) if weights is None else weights
    ...         squares = jnp.sum(weights * (outputs - targets) ** 2)
    ...         return self.replace(squares=squares, weight=weights.sum())
    ...     def compute(self):
    ...         return jnp.sqrt(self.squares / self.weight)
    >>> metric = RootMeanSquare().update(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0]))
    >>> metric = metric.update(jnp.array([8.0]), jnp.array([0.0]))
    >>> round(float(metric.compute()), 3)
    4.761
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # `help` shows the options alone: sums are what batches add.
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(
            [x for x in parameters if x.name not in child_names(cls)]
        )

    def of_batch(
        self, outputs: PyTree, targets: PyTree, weights: Weights = None
    ) -> Self:
        """Returns the metric of one batch alone.

        Args:
            outputs: What the model returned.
            targets: What it should have returned.
            weights: Of rows or of targets; 1 by default. Those with 0 do not count.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `of_batch`."
        )

    def compute(self) -> Any:
        """Returns the value over all batches so far."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `compute`."
        )

    def update(
        self, outputs: PyTree, targets: PyTree, weights: Weights = None
    ) -> Self:
        """Returns the metric with one more batch; for the arguments see `of_batch`."""
        metric_of_batch = self.of_batch(outputs, targets, weights)
        # Each of several processes reads the sums, and the rows that a metric keeps.
        return self.merge(constrain(metric_of_batch, PartitionSpec()))

    def merge(self, other: Self) -> Self:
        """Returns the metric of the batches of both.

        Raises LossError if the two are not the same metric.
        """
        if not jax.tree.leaves(self):
            return other
        if not jax.tree.leaves(other):
            return self
        if _structure(self) != _structure(other):
            raise errors.LossError(
                f"{self!r:.300} and {other!r:.300} are different metrics, or of different classes, "
                "and cannot be merged; merge metrics of equal options."
            )
        return jax.tree.map(jnp.add, self, other)

    def accumulate(self, other: Self) -> Self:
        return self.merge(other)

    def value(self) -> Any:
        # Sums of several processes are equal on all; computed here, they need no collectives.
        return jax.device_get(self).compute()


def _structure(metric: Metric) -> tuple[Hashable, list[tuple[int, ...]]]:
    leaves, treedef = jax.tree.flatten(metric)
    return treedef, list(map(jnp.shape, leaves))


def target_weights(weights: Weights, targets: Tensor) -> Float[Tensor, "..."]:
    """Returns the weight of each target, given those of rows or of targets."""
    if weights is None:
        return jnp.ones(targets.shape)
    weights = jnp.asarray(weights)
    if weights.shape != targets.shape[: weights.ndim]:
        raise errors.LossError(
            f"the weights have shape {weights.shape} and the targets {targets.shape}; expected one "
            "weight for each row, or for each target."
        )
    missing_axes = tuple(range(weights.ndim, targets.ndim))
    weights = jnp.expand_dims(weights, missing_axes)
    return jnp.broadcast_to(weights, targets.shape).astype(jnp.float32)
