"""Supervised training: a loss and metrics of the outputs of any model.

The trainer's model is a `Supervised` layer around the user's model, which is called with the inputs
in a batch and knows nothing of losses. Losses and metrics are functions of outputs and batch that
return a number, or one per row; some have names. One per row is a mean over the rows that count, so
that rows that fill up a batch do not change it. Metrics that are not means are `weft.metrics`,
which add up over batches.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from weft import config, errors, functional, hierarchy, metrics, struct
from weft.functional.arrays import finite_or_counted
from weft.hierarchy.metrics import LossOfRows, MetricSummary, Summary, WeightedScalar
from weft.interop.hierarchy import as_hierarchy
from weft.metrics.classification import check_logits
from weft.typing import T, Tensor

OutputFn = Callable[[Any, Any], Any]
"""Function of a model's outputs and the batch."""
MetricLike = str | OutputFn | metrics.Metric
"""Name of a metric, function or metric."""

ROW_WEIGHT = "row_weight"
"""Field of a batch with 1 for rows that count and 0 for those that fill it up."""


def _same_shape(fn: Callable[[Tensor, Tensor], Tensor]) -> OutputFn:
    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            hint = ""
            if outputs.shape == (*targets.shape, 1):
                hint = " Give the targets that axis, `y[:, None]`, or let the model drop it."
            raise errors.LossError(
                f"the outputs have shape {outputs.shape} and the targets {targets.shape}; expected "
                f"equal shapes, since broadcasting would compare each with every other.{hint}"
            )
        return fn(outputs, targets)

    return checked


def _of_classes(fn: Callable[[Tensor, Tensor], Tensor]) -> OutputFn:
    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        check_logits(outputs, targets)
        return fn(outputs, targets)

    return checked


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape == targets.shape:  # of binary_cross_entropy
        return (outputs > 0) == (targets > 0.5)
    return _of_classes(lambda logits, labels: jnp.argmax(logits, -1) == labels)(outputs, targets)


LOSSES: dict[str, OutputFn] = {
    "cross_entropy": _of_classes(lambda x, y: functional.cross_entropy(x, y)[1]["per_target_loss"]),
    "binary_cross_entropy": _same_shape(functional.sigmoid_cross_entropy),
    "mse": _same_shape(functional.squared_error),
    "mae": _same_shape(functional.absolute_error),
    "huber": _same_shape(functional.huber_error),
}
CLASS_METRICS: dict[str, metrics.Metric] = {
    "auc": metrics.AUC(),
    "confusion_matrix": metrics.ConfusionMatrix(),
    "f1": metrics.F1Score(),
    "perplexity": metrics.Perplexity(),
    "precision": metrics.Precision(),
    "recall": metrics.Recall(),
}
METRICS: dict[str, OutputFn | metrics.Metric] = {"accuracy": _accuracy, **CLASS_METRICS, **LOSSES}


def metric_name(metric: MetricLike) -> str:
    """Returns the name under which a metric is reported, unless it was given one."""
    if isinstance(metric, str):
        return metric
    if isinstance(metric, metrics.AllRows):
        return metric_name(metric.fn)
    if isinstance(metric, metrics.Metric):
        by_type = {type(x): name for name, x in CLASS_METRICS.items()}
        by_type[metrics.Accuracy] = "accuracy"
        return by_type.get(type(metric), type(metric).__name__)
    return getattr(metric, "__name__", str(metric))


def compares_classes(metric: MetricLike) -> bool:
    """Returns whether a loss or metric compares outputs with classes."""
    if isinstance(metric, str | metrics.Metric) and not isinstance(metric, metrics.AllRows):
        return metric_name(metric) in ("cross_entropy", "accuracy", *CLASS_METRICS)
    return False


def _of_rows_that_count(tree: T, batch: Mapping[str, Any]) -> T:
    """Returns arrays of rows with 0 in place of NaN and infinities in the rows of weight 0.

    Even if such a row is not in the loss, the gradient of the parameters is that of all rows.
    """
    if ROW_WEIGHT not in batch:
        return tree
    counts = batch[ROW_WEIGHT] != 0

    def finite(x: Any) -> Any:
        if jnp.shape(x)[:1] != counts.shape:
            return x
        return finite_or_counted(x, counts.reshape(-1, *[1] * (jnp.ndim(x) - 1)))

    return jax.tree.map(finite, tree)


class MeanOfRows(MetricSummary):
    """Mean over rows of a metric that is a scalar, with what shows whether it is one.

    A scalar of a batch can be averaged over batches only if it is itself a mean over rows. So the
    metric is computed for each row alone, and their mean is compared with the scalar.

    Attributes:
        name: The metric.
        mean: Mean of the values of rows, with the rows' weights.
        whole, by_row: The scalar of a batch, and the mean of the values of its rows; of batches
            that were merged, of the first for which they differ.
        is_mean: Whether they are equal for all batches, up to rounding.
    """

    name: str = struct.field(pytree_node=False)
    mean: WeightedScalar
    whole: Tensor
    by_row: Tensor
    is_mean: Tensor

    @classmethod
    def of_batch(cls, name: str, fn: OutputFn, outputs: Any, batch: Mapping[str, Any]) -> Self:
        """Returns the mean of the rows of one batch."""
        leaves, tree = jax.tree.flatten((outputs, batch))
        rows = len(jax.tree.leaves(batch)[0])
        are_rows = [jnp.ndim(x) > 0 and len(x) == rows for x in leaves]

        def of_row(parts: list[Tensor]) -> Any:
            remaining = iter(parts)
            both = zip(leaves, are_rows, strict=True)
            one = [next(remaining)[None] if is_row else x for x, is_row in both]
            return fn(*tree.unflatten(one))

        whole = jnp.asarray(fn(outputs, batch))
        # In few bits, the sum over a batch rounds more.
        is_float = jnp.issubdtype(whole.dtype, jnp.inexact)
        tolerance = max(1e-3, 8 * float(jnp.finfo(whole.dtype).eps)) if is_float else 1e-3
        parts = [x for x, is_row in zip(leaves, are_rows, strict=True) if is_row]
        try:
            values = jnp.asarray(jax.vmap(of_row)(parts), jnp.float32)
        except Exception as error:
            error.add_note(
                f"The metric {name!r} is a scalar, and was called for each row alone, by jax.vmap, "
                "to see whether it is a mean over rows. Return one number per row, or call it once "
                f"with all rows: weft.metrics.AllRows({name})."
            )
            raise
        whole, by_row = whole.astype(jnp.float32), values.mean()
        size = tolerance * jnp.abs(values).mean() + 1e-6
        is_mean = (jnp.abs(whole - by_row) <= size) | (whole == by_row)
        is_mean |= jnp.isnan(whole) & jnp.isnan(by_row)
        mean = WeightedScalar(*functional.weighted_mean(values, batch.get(ROW_WEIGHT)))
        return cls(name, mean, whole, by_row, is_mean)

    def accumulate(self, other: Self) -> Self:
        both = zip((self.whole, self.by_row), (other.whole, other.by_row), strict=True)
        whole, by_row = (jnp.where(self.is_mean, its, own) for own, its in both)
        mean = self.mean.accumulate(other.mean)
        return type(self)(self.name, mean, whole, by_row, self.is_mean & other.is_mean)

    def value(self) -> Tensor | float:
        if not np.all(self.is_mean):
            raise errors.LossError(
                f"the metric {self.name!r} is a scalar that is not a mean over rows: "
                f"{float(self.whole):.4g} of a batch, but {float(self.by_row):.4g} as the mean of "
                "its rows one by one. So its value for all rows does not follow from those of "
                "batches. Return one number per row; or pass a metric that adds up, such as "
                f"weft.metrics.F1Score(), or weft.metrics.AllRows({self.name}), which calls the "
                "function once with all rows."
            )
        return self.mean.value()


class Supervised(hierarchy.BaseModel):
    """Layer that computes a loss and metrics from the outputs of a model of any library.

    The model is called with the fields of the batch other than the target: with the array itself if
    there is only one, else with a dict of them.
    """

    class Config(hierarchy.BaseModel.Config):
        """Configures a Supervised.

        Attributes:
            layer: The model, see `weft.interop.as_hierarchy`.
            loss: Name of a loss, or a function of outputs and batch: a scalar, one per row, or a
                mean with its weight, a `WeightedScalar`.
            metrics: Such names or functions, or metrics of `weft.metrics`, by the name to report
                them as. A function may also return a metric of its batch.
            target: The field of the batch that named losses and metrics compare the outputs with.
            batch_spec: Shapes and dtypes of a batch, set by the trainer.
        """

        layer: config.Required[Any] = config.REQUIRED
        loss: config.Required[str | OutputFn] = config.REQUIRED
        metrics: dict[str, MetricLike] = {}
        target: str | None = None
        batch_spec: config.Required[Any] = config.REQUIRED

    def __init__(self, cfg: Config, *, parent: hierarchy.Module | None):
        super().__init__(cfg, parent=parent)
        self._loss = self._function("loss", cfg.loss, LOSSES)
        self._metrics = {
            name: self._function("metric", x, METRICS) for name, x in cfg.metrics.items()
        }
        if cfg.target is not None and cfg.target not in cfg.batch_spec:
            raise errors.LossError(
                f"the batch has no field target={cfg.target!r}. "
                f"{errors.did_you_mean(cfg.target, cfg.batch_spec)}"
            )
        self._add_child("model", as_hierarchy(cfg.layer, inputs=(self._inputs(cfg.batch_spec),)))

    def _function(
        self, kind: str, fn: MetricLike, named: Mapping[str, OutputFn | metrics.Metric]
    ) -> OutputFn:
        """Returns a function of outputs and batch, for `_values`."""
        if isinstance(fn, metrics.AllRows):
            return lambda outputs, batch: fn.update(outputs, batch, batch.get(ROW_WEIGHT))
        if not isinstance(fn, str | metrics.Metric):
            return fn
        name = metric_name(fn)
        if isinstance(fn, str) and fn not in named:
            raise errors.LossError(f"there is no {kind} {fn!r}. {errors.did_you_mean(fn, named)}")
        of_arrays = named[fn] if isinstance(fn, str) else fn
        target = self.config.target
        if target is None:
            raise errors.LossError(
                f"the {kind} {name!r} compares outputs with targets, but the data has no field for "
                "them; name it with target=…, or pass data as a pair (x, y)."
            )

        def of_targets(outputs: Any, batch: Mapping[str, Any]) -> Any:
            if not hasattr(outputs, "shape"):
                raise errors.LossError(
                    f"the model returned a {type(outputs).__name__}, and the {kind} {name!r} is "
                    "that of an array; pass a function of outputs and batch instead."
                )
            if isinstance(of_arrays, metrics.Metric):
                return of_arrays.update(outputs, batch[target], batch.get(ROW_WEIGHT))
            values = of_arrays(_of_rows_that_count(outputs, batch), batch[target])
            return jnp.mean(values, axis=range(1, values.ndim))

        return of_targets

    def _inputs(self, batch: Mapping[str, Any]) -> Any:
        fields = {k: v for k, v in batch.items() if k not in (self.config.target, ROW_WEIGHT)}
        return next(iter(fields.values())) if len(fields) == 1 else fields

    def _cast_inputs(self, inputs: T) -> T:
        return inputs  # targets and weights of rows stay as they are

    def predict(self, input_batch: Mapping[str, Any]) -> Any:
        """Returns the outputs of the model for a batch."""
        return self.call_model(self._inputs(input_batch))

    def call_model(self, inputs: Any) -> Any:
        """Returns the outputs of the model for its inputs."""
        inputs = functional.cast_floats(inputs, self.compute_dtype())
        try:
            return self.model(inputs)
        except Exception as error:
            shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", inputs)
            error.add_note(
                f"The model was called with {shapes}, the fields of the batch except the target."
            )
            raise

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss, and reports it and the metrics."""
        input_batch = {k: _of_rows_that_count(x, input_batch) for k, x in input_batch.items()}
        outputs = self.predict(input_batch)
        loss = self._values("loss", self._loss, outputs, input_batch)
        if not isinstance(loss, WeightedScalar):
            assert isinstance(loss, jax.Array)
            loss = self._mean("loss", loss, input_batch)
        self.add_summary("loss", loss)
        for name, fn in self._metrics.items():
            self.add_summary(name, self._of_metric(name, fn, outputs, input_batch))
        return jnp.asarray(loss.mean), {}

    def _of_metric(
        self, name: str, fn: OutputFn, outputs: Any, batch: Mapping[str, Any]
    ) -> Summary:
        values = self._values(name, fn, outputs, batch)
        if isinstance(values, Summary):
            return values
        # The scalar of a batch in training is what it is; only evaluation is over several batches.
        if values.ndim or (self.is_training and ROW_WEIGHT not in batch):
            return self._mean(name, values, batch)
        return MeanOfRows.of_batch(name, fn, outputs, batch)

    @hierarchy.nowrap
    def is_per_row(self, outputs: Any, batch: Mapping[str, Any]) -> bool:
        """Returns whether rows can be left out of the loss: whether it has one number per row.

        Raises LossError if the loss or a metric does not fit the outputs.
        """
        for name, fn in self._metrics.items():
            self._values(name, fn, outputs, batch)
        values = self._values("loss", self._loss, outputs, batch)
        return isinstance(values, jax.Array) and values.ndim > 0

    @hierarchy.nowrap
    def check_means(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Raises LossError if a metric is a scalar of a batch that is not a mean over its rows."""
        for name, fn in self._metrics.items():
            values = jax.eval_shape(functools.partial(self._values, name, fn), outputs, batch)
            if not isinstance(values, Summary) and not values.ndim:
                MeanOfRows.of_batch(name, fn, outputs, batch).value()

    def _values(
        self, name: str, fn: OutputFn, outputs: Any, batch: Mapping[str, Any]
    ) -> Tensor | Summary:
        """Returns the values of rows, a scalar, or what a metric reports."""
        rows = len(jax.tree.leaves(batch)[0])
        try:
            result = fn(outputs, batch)
            if isinstance(result, WeightedScalar if name == "loss" else Summary):
                return result
            values = jnp.asarray(result, dtype=jnp.float32)
        except errors.LossError:
            raise
        except Exception as error:
            error.add_note(
                f"{name} was called with two arguments: the outputs of the model, and the batch, a "
                f"dict of {', '.join(batch)}."
            )
            raise
        if values.shape not in ((), (rows,)):
            raise errors.LossError(
                f"{name} returned shape {values.shape} for a batch of {rows} rows; expected a "
                f"scalar, or one number per row, ({rows},)."
            )
        return values

    def _mean(self, name: str, values: Tensor, batch: Mapping[str, Any]) -> WeightedScalar:
        weights = batch.get(ROW_WEIGHT)
        if weights is None:
            rows = len(jax.tree.leaves(batch)[0])
            return WeightedScalar(values.mean(), rows) if values.ndim else LossOfRows(values, rows)
        if not values.ndim:
            raise errors.LossError(
                f"{name} returned a scalar, which includes the rows that fill up the batch; "
                "expected one number per row."
            )
        return WeightedScalar(*functional.weighted_mean(values, weights))
