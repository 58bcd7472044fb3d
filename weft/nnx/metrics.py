"""Metrics: objects that accumulate batches and compute a value over all of them.

A metric picks its inputs from the keyword arguments of `update`, so that several can share one call
(`MultiMetric`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from weft import errors, struct
from weft.functional.arrays import counted
from weft.nnx.filters import Filter
from weft.nnx.pytree import Pytree
from weft.nnx.split_merge import split
from weft.nnx.variables import A, Variable
from weft.typing import PyTree

_ARRAYS = jax.Array | np.ndarray | Variable | int | float | np.generic


class MetricState(Variable[A]):
    """Accumulator of a metric."""

    __slots__ = ()


class Metric(Pytree):
    """Base class of metrics.

    >>> class Largest(Metric):
    ...     def __init__(self):
    ...         self.value = MetricState(jnp.array(-jnp.inf))
    ...     def reset(self):
    ...         self.value[...] = -jnp.inf
    ...     def update(self, *, values, **_):
    ...         self.value[...] = jnp.maximum(self.value, values.max())
    ...     def compute(self):
    ...         return self.value[...]
    >>> largest = Largest()
    >>> largest.update(values=jnp.array([1.0, 3.0]))
    >>> float(largest.compute())
    3.0
    """

    def __init__(self) -> None:
        raise _undefined_error(self, "__init__")

    def reset(self) -> None:
        """Discards all updates."""
        raise _undefined_error(self, "reset")

    def update(self, **kwargs: PyTree) -> None:
        """Adds a batch; keyword arguments unknown to the metric are ignored."""
        raise _undefined_error(self, "update")

    def compute(self) -> PyTree:
        """Returns the value over all batches."""
        raise _undefined_error(self, "compute")

    def split(self, *filters: Filter) -> Any:
        """Splits the metric into a description and states; see `nnx.split`."""
        return split(self, *filters)


def _undefined_error(metric: Metric, method: str) -> errors.MetricMethodError:
    return errors.MetricMethodError(
        f"{type(metric).__name__} does not define {method}; a metric defines __init__, update, "
        "compute and reset."
    )


def _array_argument(
    metric: Metric, name: str, kwargs: Mapping[str, PyTree]
) -> Array:
    """Returns an argument of `update`; raises MetricArgumentError for a missing or a wrong one."""
    if name not in kwargs:
        raise errors.MetricArgumentError(
            f"{type(metric).__name__}.update needs the keyword argument {name!r}, and was given "
            f"{', '.join(map(repr, kwargs)) or 'none'}; call metric.update({name}=...)."
        )
    value = kwargs[name]
    if not isinstance(value, _ARRAYS):
        raise errors.MetricArgumentError(
            f"{type(metric).__name__}.update was given {name}={value!r}; give an array or a number."
        )
    return jnp.asarray(value)


class Average(Metric):
    """Mean of all values of the keyword argument `argname`.

    >>> loss = Average("loss")
    >>> loss.update(loss=jnp.array([1.0, 2.0]))
    >>> loss.update(loss=6.0)
    >>> float(loss.compute())
    3.0
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.total = MetricState(jnp.array(0, jnp.float32))
        self.count = MetricState(jnp.array(0, jnp.int32))

    def reset(self) -> None:
        self.total[...] = 0
        self.count[...] = 0

    def update(
        self, mask: Bool[Array, "..."] | None = None, **kwargs: PyTree
    ) -> None:
        """Adds values.

        Args:
            mask: values to include, broadcastable to them; all by default.
            **kwargs: the values under `argname`, an array or a number.

        Raises:
            MetricArgumentError: if the values are missing, or not an array.
            MetricValueError: if the mask cannot be broadcast to them.
        """
        values = _array_argument(self, self.argname, kwargs)
        if mask is None:
            self.total[...] += values.sum()
            self.count[...] += values.size
            return
        mask = _full_mask(self, mask, values)
        self.total[...] += counted(values, mask).sum()
        self.count[...] += mask.sum()

    def compute(self) -> Float[Array, ""]:
        """Returns the mean; NaN without values."""
        return self.total[...] / self.count[...]


def _full_mask(
    metric: Metric, mask: Bool[Array, "..."], values: Array
) -> Bool[Array, "..."]:
    """Returns a mask of the shape of the values; raises MetricValueError if it does not fit."""
    mask = _array_argument(metric, "mask", {"mask": mask}).astype(bool)
    fits = mask.ndim <= values.ndim
    # Broadcasting aligns the last axes.
    for mask_size, size in zip(
        reversed(mask.shape), reversed(values.shape), strict=False
    ):
        fits = fits and mask_size in (1, size)
    if not fits:
        raise errors.MetricValueError(
            f"{type(metric).__name__}.update was given a mask of shape {mask.shape} for values of "
            f"shape {values.shape}; give one that can be broadcast to them."
        )
    return jnp.broadcast_to(mask, values.shape)


@struct.dataclass
class Statistics:
    """Mean, standard error of the mean and standard deviation."""

    mean: Float[Array, ""]
    standard_error_of_mean: Float[Array, ""]
    standard_deviation: Float[Array, ""]


class Welford(Metric):
    """Mean, deviation and error of all values, in one pass (Welford, 1962; Chan et al., 1979).

    Attributes:
        count: number of values, those of the keyword argument `argname`.

    >>> metric = Welford()
    >>> metric.update(values=jnp.array([1.0, 2.0, 3.0, 4.0]))
    >>> float(metric.compute().mean), float(metric.compute().standard_deviation)
    (2.5, 1.1180...)
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.count = MetricState(jnp.array(0, jnp.int32))
        self.mean = MetricState(jnp.array(0, jnp.float32))
        self.m2 = MetricState(jnp.array(0, jnp.float32))

    def reset(self) -> None:
        self.count[...] = 0
        self.mean[...] = 0
        self.m2[...] = 0

    def update(
        self, mask: Bool[Array, "..."] | None = None, **kwargs: PyTree
    ) -> None:
        """Adds values; see `Average.update`."""
        values = _array_argument(self, self.argname, kwargs)
        if not values.size:  # its mean is NaN
            return
        if mask is None:
            batch_count = values.size
            batch_mean = values.mean()
            batch_m2 = jnp.square(values - batch_mean).sum()
        else:
            mask = _full_mask(self, mask, values)
            batch_count = mask.sum()
            batch_sum = counted(values, mask).sum()
            batch_mean = batch_sum / jnp.maximum(batch_count, 1)
            batch_m2 = jnp.square(counted(values - batch_mean, mask)).sum()
        # Chan et al.: with n = n_a + n_b values and d = mean_b - mean_a, the mean grows by
        # d * n_b / n, and the sum of squared distances from it is M_a + M_b + d^2 * n_a * n_b / n.
        old_count = self.count[...]
        count = old_count + batch_count
        divisor = jnp.maximum(count, 1)  # a mask may exclude all values so far
        distance = batch_mean - self.mean[...]
        between = distance**2 * old_count * batch_count / divisor
        self.m2[...] += batch_m2 + between
        self.mean[...] += distance * batch_count / divisor
        self.count[...] = count

    def compute(self) -> Statistics:
        """Returns the statistics; deviation and error are NaN without values."""
        variance = self.m2[...] / self.count[...]
        deviation = jnp.sqrt(variance)
        return Statistics(
            mean=self.mean[...],
            standard_error_of_mean=deviation / jnp.sqrt(self.count[...]),
            standard_deviation=deviation,
        )


class Accuracy(Average):
    """Fraction of correct predictions, from `logits` and `labels`; `argname` is ignored.

    Args:
        threshold: for two classes, the logit from which on the prediction is 1; by default the
            prediction is the class of the largest logit.

    Raises MetricArgumentError if the threshold is not a float.

    >>> accuracy = Accuracy()
    >>> accuracy.update(logits=jnp.array([[0.1, 0.9], [0.8, 0.2]]), labels=jnp.array([1, 1]))
    >>> float(accuracy.compute())
    0.5
    """

    def __init__(self, threshold: float | None = None, argname: str = "values"):
        super().__init__(argname)
        if threshold is not None and not isinstance(threshold, float):
            raise errors.MetricArgumentError(
                f"threshold is {threshold!r}, a {type(threshold).__name__}; give a float, or None "
                "for the class of the largest logit."
            )
        self.threshold = threshold

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *,
        logits: Num[Array, "*batch classes"],
        labels: Int[Array, "*batch"],
        mask: Bool[Array, "..."] | None = None,
        **_: PyTree,
    ) -> None:
        """Adds predictions.

        Args:
            logits: logits per class, or of shape `(*batch,)` with a threshold.
            labels: true classes, or 0 and 1 with a threshold.
            mask: predictions to include; all by default.

        Raises MetricValueError if the shapes do not match, or labels are not integers.
        """
        has_classes = self.threshold is None
        expected_shape = logits.shape[:-1] if has_classes else logits.shape
        if labels.shape != expected_shape:
            logits_shape = "(*batch) with a threshold"
            if has_classes:
                logits_shape = "(*batch, n)"
            raise errors.MetricValueError(
                f"Accuracy.update was given logits of shape {logits.shape} and labels of shape "
                f"{labels.shape}; expected labels of shape (*batch) and logits of shape "
                f"{logits_shape}."
            )
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise errors.MetricValueError(
                f"Accuracy.update was given labels of dtype {labels.dtype}; give integers, such "
                "as labels.astype(int)."
            )
        if self.threshold is None:
            predictions = logits.argmax(-1)
        else:
            predictions = logits > self.threshold
        super().update(mask, **{self.argname: predictions == labels})


class MultiMetric(Metric):
    """Several metrics, updated together; each becomes an attribute.

    Raises MetricArgumentError if one is not a metric, or has the name of a method.

    >>> metrics = MultiMetric(loss=Average("loss"), size=Average("size"))
    >>> metrics.update(loss=1.0, size=4)
    >>> {name: float(value) for name, value in metrics.compute().items()}
    {'loss': 1.0, 'size': 4.0}
    """

    def __init__(self, **metrics: Metric):
        for name, metric in metrics.items():
            for method in ("update", "compute", "reset"):
                if not hasattr(metric, method):
                    raise errors.MetricArgumentError(
                        f"the metric {name!r} is {metric!r}, which lacks the methods update, "
                        "compute and reset; give a metric, such as nnx.metrics.Average()."
                    )
            if hasattr(MultiMetric, name):
                raise errors.MetricArgumentError(
                    f"a metric was given the name {name!r}, which is a method of MultiMetric; "
                    "use another name."
                )
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def _metrics(self) -> dict[str, Metric]:
        return {name: getattr(self, name) for name in self._metric_names}

    def reset(self) -> None:
        for metric in self._metrics().values():
            metric.reset()

    def update(self, **updates: PyTree) -> None:
        """Updates all metrics with those arguments that they know.

        `mask` can map names of metrics to masks; the others then have none.

        Raises MetricArgumentError if such a mapping names an unknown metric.
        """
        metrics = self._metrics()
        mask = updates.get("mask")
        if not isinstance(mask, Mapping):  # one mask for all, or none
            for metric in metrics.values():
                metric.update(**updates)
            return
        unknown_names = [repr(name) for name in mask if name not in metrics]
        if unknown_names:
            raise errors.MetricArgumentError(
                f"MultiMetric.update was given a mask for {', '.join(unknown_names)}; the "
                f"metrics are {', '.join(map(repr, metrics)) or '(none)'}."
            )
        del updates["mask"]
        for name, metric in metrics.items():
            metric_updates = dict(updates)
            if name in mask:
                metric_updates["mask"] = mask[name]
            metric.update(**metric_updates)

    def compute(self) -> dict[str, PyTree]:
        """Returns the values by name."""
        return {
            name: metric.compute() for name, metric in self._metrics().items()
        }
