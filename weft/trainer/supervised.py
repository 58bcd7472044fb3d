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
from weft.hierarchy.metrics import (
    LossOfRows,
    MetricSummary,
    Summary,
    WeightedScalar,
)
from weft.hierarchy.module import get_public_method
from weft.interop.hierarchy import InHierarchy, as_hierarchy
from weft.metrics.classification import check_logits
from weft.typing import PyTree, T, Tensor

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


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    check_logits(logits, labels)
    _, details = functional.cross_entropy(logits, labels)
    return details["per_target_loss"]


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape == targets.shape:  # of binary_cross_entropy
        return (outputs > 0) == (targets > 0.5)
    check_logits(outputs, targets)
    return jnp.argmax(outputs, -1) == targets


LOSSES: dict[str, OutputFn] = {
    "cross_entropy": _cross_entropy,
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
METRICS: dict[str, OutputFn | metrics.Metric] = {
    "accuracy": _accuracy,
    **CLASS_METRICS,
    **LOSSES,
}


def metric_name(metric: MetricLike) -> str:
    """Returns the name under which a metric is reported, unless it was given one."""
    if isinstance(metric, str):
        return metric
    if isinstance(metric, metrics.AllRows):
        return metric_name(metric.fn)
    if type(metric) is metrics.Accuracy:
        return "accuracy"
    if isinstance(metric, metrics.Metric):
        for name, class_metric in CLASS_METRICS.items():
            if type(metric) is type(class_metric):
                return name
        return type(metric).__name__
    return getattr(metric, "__name__", str(metric))


def compares_classes(metric: MetricLike) -> bool:
    """Returns whether a loss or metric compares outputs with classes."""
    if isinstance(metric, str | metrics.Metric) and not isinstance(
        metric, metrics.AllRows
    ):
        return metric_name(metric) in (
            "cross_entropy",
            "accuracy",
            *CLASS_METRICS,
        )
    return False


def _without_padding(tree: T, batch: Mapping[str, Any]) -> T:
    """Returns arrays of rows with 0 in place of NaN and infinities in the rows of weight 0.

    Even if such a row is not in the loss, the gradient of the parameters is that of all rows.
    """
    if ROW_WEIGHT not in batch:
        return tree
    counts = batch[ROW_WEIGHT] != 0

    def finite(x: Tensor) -> Tensor:
        if jnp.shape(x)[:1] != counts.shape:
            return x
        axes_within_row = tuple(range(1, jnp.ndim(x)))
        return finite_or_counted(x, jnp.expand_dims(counts, axes_within_row))

    return jax.tree.map(finite, tree)


def no_method_error(
    layer: hierarchy.Module, method: str | None
) -> errors.LayerMethodError:
    """Returns the error of a hierarchy layer without a public method of that name."""
    return errors.LayerMethodError(
        f"{type(layer).__name__} has no method {method!r}; expected one such as 'forward'."
    )


class MeanOfRows(MetricSummary):
    """Mean over rows of a metric that is a scalar, with what shows whether it is one.

    A scalar of a batch can be averaged over batches only if it is itself a mean over rows. So the
    metric is computed for each row alone, and their mean is compared with the scalar.

    Attributes:
        name: The metric.
        mean: Mean of the values of rows, with the rows' weights.
        scalar_of_batch, mean_of_values: The scalar of a batch, and the mean of the values of its
            rows; of batches that were merged, of the first for which they differ.
        is_mean: Whether they are equal for all batches, up to rounding.
    """

    name: str = struct.field(pytree_node=False)
    mean: WeightedScalar
    scalar_of_batch: Tensor
    mean_of_values: Tensor
    is_mean: Tensor

    @classmethod
    def of_batch(
        cls,
        name: str,
        fn: OutputFn,
        outputs: PyTree,
        batch: Mapping[str, PyTree],
    ) -> Self:
        """Returns the mean of the rows of one batch."""
        leaves, tree = jax.tree.flatten((outputs, batch))
        num_rows = len(jax.tree.leaves(batch)[0])
        mapped_leaves: dict[
            int, Tensor
        ] = {}  # those with an axis of rows, by index
        for index, leaf in enumerate(leaves):
            if jnp.ndim(leaf) > 0 and len(leaf) == num_rows:
                mapped_leaves[index] = leaf

        def value_of_row(row_leaves: dict[int, Tensor]) -> Tensor:
            """Calls the metric with a batch of one row."""
            batch_leaves = list(leaves)
            for index, leaf in row_leaves.items():
                batch_leaves[index] = leaf[None]
            return fn(*tree.unflatten(batch_leaves))

        # The same function for the whole batch and for rows of it: a mean over rows is the mean of
        # its values for single rows, and for example a ratio of sums is not.
        scalar = jnp.asarray(fn(outputs, batch))
        tolerance = 1e-3
        if jnp.issubdtype(scalar.dtype, jnp.inexact):
            # In few bits, the sum over a batch rounds more.
            tolerance = max(tolerance, 8 * float(jnp.finfo(scalar.dtype).eps))
        try:
            values = jnp.asarray(
                jax.vmap(value_of_row)(mapped_leaves), jnp.float32
            )
        except Exception as error:
            error.add_note(
                f"The metric {name!r} is a scalar, and was called for each row alone, by jax.vmap, "
                "to see whether it is a mean over rows. Return one number per row, or call it once "
                f"with all rows: weft.metrics.AllRows({name})."
            )
            raise
        scalar = scalar.astype(jnp.float32)
        mean_of_values = values.mean()
        largest_difference = tolerance * jnp.abs(values).mean() + 1e-6
        is_close = jnp.abs(scalar - mean_of_values) <= largest_difference
        is_equal = scalar == mean_of_values  # also if both are infinite
        are_undefined = jnp.isnan(scalar) & jnp.isnan(mean_of_values)
        is_mean = is_close | is_equal | are_undefined
        mean = WeightedScalar(
            *functional.weighted_mean(values, batch.get(ROW_WEIGHT))
        )
        return cls(name, mean, scalar, mean_of_values, is_mean)

    def accumulate(self, other: Self) -> Self:
        return type(self)(
            self.name,
            self.mean.accumulate(other.mean),
            jnp.where(
                self.is_mean, other.scalar_of_batch, self.scalar_of_batch
            ),
            jnp.where(self.is_mean, other.mean_of_values, self.mean_of_values),
            self.is_mean & other.is_mean,
        )

    def value(self) -> Tensor | float:
        if not np.all(self.is_mean):
            raise errors.LossError(
                f"the metric {self.name!r} is a scalar that is not a mean over rows: "
                f"{float(self.scalar_of_batch):.4g} of a batch, but "
                f"{float(self.mean_of_values):.4g} as the mean of "
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
        """Configures a Supervised."""

        layer: config.Required[Any] = config.REQUIRED
        """The model, see `weft.interop.as_hierarchy`."""
        loss: config.Required[str | OutputFn] = config.REQUIRED
        """Name of a loss, or a function of outputs and batch: a scalar, one per row, or a mean with
        its weight, a `WeightedScalar`; or a pair of this and a dict of such numbers to report, such
        as the parts that the loss is the sum of."""
        metrics: dict[str, MetricLike] = {}
        """Such names or functions, or metrics of `weft.metrics`, by the name to report them as. A
        function may also return a metric of its batch."""
        target: str | None = None
        """The field of the batch that named losses and metrics compare the outputs with."""
        batch_spec: config.Required[Any] = config.REQUIRED
        """Shapes and dtypes of a batch, set by the trainer."""

    def __init__(self, cfg: Config, *, parent: hierarchy.Module | None):
        super().__init__(cfg, parent=parent)
        self._loss = self._function("loss", cfg.loss, LOSSES)
        self._metrics: dict[str, OutputFn] = {}
        for name, metric in cfg.metrics.items():
            self._metrics[name] = self._function("metric", metric, METRICS)
        if cfg.target is not None and cfg.target not in cfg.batch_spec:
            raise errors.LossError(
                f"the batch has no field target={cfg.target!r}. "
                f"{errors.did_you_mean(cfg.target, cfg.batch_spec)}"
            )
        model_inputs = self._model_inputs(cfg.batch_spec)
        self._add_child(
            "model", as_hierarchy(cfg.layer, inputs=(model_inputs,))
        )

    def _function(
        self,
        kind: str,
        metric: MetricLike,
        named: Mapping[str, OutputFn | metrics.Metric],
    ) -> OutputFn:
        """Returns a function of outputs and batch, for `_values`."""
        if isinstance(metric, metrics.AllRows):
            return lambda outputs, batch: metric.update(
                outputs, batch, batch.get(ROW_WEIGHT)
            )
        if not isinstance(metric, str | metrics.Metric):
            return metric
        name = metric_name(metric)
        if isinstance(metric, metrics.Metric):
            fn = metric
        elif metric in named:
            fn = named[metric]
        else:
            raise errors.LossError(
                f"there is no {kind} {metric!r}. {errors.did_you_mean(metric, named)}"
            )
        target = self.config.target
        if target is None:
            raise errors.LossError(
                f"the {kind} {name!r} compares outputs with targets, but the data has no field for "
                "them; name it with target=…, or pass data as a pair (x, y)."
            )

        def compare_with_targets(
            outputs: PyTree, batch: Mapping[str, PyTree]
        ) -> Tensor | Summary:
            if not hasattr(outputs, "shape"):
                raise errors.LossError(
                    f"the model returned a {type(outputs).__name__}, and the {kind} {name!r} is "
                    "that of an array; pass a function of outputs and batch instead."
                )
            if isinstance(fn, metrics.Metric):
                return fn.update(outputs, batch[target], batch.get(ROW_WEIGHT))
            values = fn(_without_padding(outputs, batch), batch[target])
            return jnp.mean(
                values, axis=range(1, values.ndim)
            )  # one number per row

        return compare_with_targets

    def _model_inputs(self, batch: Mapping[str, PyTree]) -> PyTree:
        """Returns the fields of a batch that the model is called with; if it is one, the array."""
        fields = dict(batch)
        fields.pop(ROW_WEIGHT, None)
        if self.config.target is not None:
            fields.pop(self.config.target, None)
        if len(fields) == 1:
            (inputs,) = fields.values()
            return inputs
        return fields

    def _cast_inputs(self, inputs: T) -> T:
        return inputs  # targets and weights of rows stay as they are

    def predict(self, input_batch: Mapping[str, PyTree]) -> PyTree:
        """Returns the outputs of the model for a batch."""
        return self.call_model(self._model_inputs(input_batch))

    def call_model(self, inputs: PyTree) -> PyTree:
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

    def apply_model(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        method: str | None,
    ) -> PyTree:
        """Returns what the model, or a public method of it, returns for any arguments."""
        args, kwargs = functional.cast_floats(
            (args, kwargs), self.compute_dtype()
        )
        if isinstance(self.model, InHierarchy):
            return self.model(*args, method=method, **kwargs)
        function = get_public_method(self.model, method or "forward")
        if function is None:
            raise no_method_error(self.model, method)
        return function(*args, **kwargs)

    def forward(
        self, input_batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss, and reports it and the metrics."""
        batch = _without_padding(dict(input_batch), input_batch)
        outputs = self.predict(
            batch
        )  # whole, since a model may mix rows, as BatchNorm does
        loss, parts = self._loss_and_parts(outputs, batch)
        if not isinstance(loss, WeightedScalar):
            assert isinstance(loss, jax.Array)
            loss = self._mean("loss", loss, batch)
        self.add_summary("loss", loss)
        for name, part in parts.items():
            if not isinstance(part, Summary):
                part = self._mean(name, part, batch)
            self.add_summary(name, part)
        for name, fn in self._metrics.items():
            self.add_summary(
                name, self._metric_summary(name, fn, outputs, batch)
            )
        return jnp.asarray(loss.mean), {}

    def _metric_summary(
        self,
        name: str,
        fn: OutputFn,
        outputs: PyTree,
        batch: Mapping[str, PyTree],
    ) -> Summary:
        values = self._values(name, fn, outputs, batch)
        if isinstance(values, Summary):
            return values
        # The scalar of a batch in training is what it is; only evaluation is over several batches.
        if values.ndim or (self.is_training and ROW_WEIGHT not in batch):
            return self._mean(name, values, batch)
        return MeanOfRows.of_batch(name, fn, outputs, batch)

    @hierarchy.nowrap
    def is_per_row(self, outputs: PyTree, batch: Mapping[str, PyTree]) -> bool:
        """Returns whether rows can be left out of the loss: whether it has one number per row.

        Raises LossError if the loss or a metric does not fit the outputs.
        """
        for name, fn in self._metrics.items():
            self._values(name, fn, outputs, batch)
        loss, parts = self._loss_and_parts(outputs, batch)
        is_per_row = isinstance(loss, jax.Array) and loss.ndim > 0
        for name, part in parts.items():
            if is_per_row and isinstance(part, jax.Array) and not part.ndim:
                raise errors.LossError(
                    f"the loss has one number per row, and {name!r}, which it returns with it, "
                    "is a scalar, which would include rows that fill up a batch; return one number "
                    "per row."
                )
        return is_per_row

    @hierarchy.nowrap
    def check_means(self, outputs: PyTree, batch: Mapping[str, PyTree]) -> None:
        """Raises LossError if a metric is a scalar of a batch that is not a mean over its rows."""
        for name, fn in self._metrics.items():
            values = jax.eval_shape(
                functools.partial(self._values, name, fn), outputs, batch
            )
            if not isinstance(values, Summary) and not values.ndim:
                MeanOfRows.of_batch(name, fn, outputs, batch).value()

    def _loss_and_parts(
        self, outputs: PyTree, batch: Mapping[str, PyTree]
    ) -> tuple[Tensor | Summary, dict[str, Tensor | Summary]]:
        """Returns the values of the loss, and the numbers by name that it returns with it."""
        parts: Mapping[str, Any] = {}

        def loss_alone(outputs: PyTree, batch: Mapping[str, PyTree]) -> Any:
            nonlocal parts
            result = self._loss(outputs, batch)
            if (
                isinstance(result, tuple)
                and len(result) == 2
                and isinstance(result[1], Mapping)
            ):
                result, parts = result
            return result

        loss = self._values("loss", loss_alone, outputs, batch)
        values_of_parts: dict[str, Tensor | Summary] = {}
        for name, part in parts.items():
            values_of_parts[name] = self._values(
                name, lambda *_, part=part: part, outputs, batch
            )
        return loss, values_of_parts

    def _values(
        self,
        name: str,
        fn: OutputFn,
        outputs: PyTree,
        batch: Mapping[str, PyTree],
    ) -> Tensor | Summary:
        """Returns the values of rows, a scalar, or what a metric reports."""
        rows = len(jax.tree.leaves(batch)[0])
        summary_type = Summary
        if name == "loss":
            summary_type = WeightedScalar
        try:
            result = fn(outputs, batch)
            if isinstance(result, summary_type):
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

    def _mean(
        self, name: str, values: Tensor, batch: Mapping[str, PyTree]
    ) -> WeightedScalar:
        weights = batch.get(ROW_WEIGHT)
        if weights is None:
            rows = len(jax.tree.leaves(batch)[0])
            if values.ndim:
                return WeightedScalar(values.mean(), rows)
            return LossOfRows(values, rows)
        if not values.ndim:
            raise errors.LossError(
                f"{name} returned a scalar, which includes the rows that fill up the batch; "
                "expected one number per row."
            )
        return WeightedScalar(*functional.weighted_mean(values, weights))
