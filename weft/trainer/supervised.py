"""Supervised training: a loss and metrics of the outputs of any model.

The trainer's model is a `Supervised` layer around the user's model, which is called with the inputs
in a batch and knows nothing of losses. Losses and metrics are functions of outputs and batch that
return a number, or one per row; some have names. One per row is a mean over the rows that count, so
that rows that fill up a batch do not change it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, errors, functional, hierarchy
from weft.interop.hierarchy import as_hierarchy
from weft.typing import T, Tensor

OutputFn = Callable[[Any, Any], Any]
"""Function of a model's outputs and the batch."""

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
METRICS: dict[str, OutputFn] = {"accuracy": _accuracy, **LOSSES}


class Supervised(hierarchy.BaseModel):
    """Layer that computes a loss and metrics from the outputs of a model of any library.

    The model is called with the fields of the batch other than the target: with the array itself if
    there is only one, else with a dict of them.
    """

    class Config(hierarchy.BaseModel.Config):
        """Configures a Supervised.

        Attributes:
            layer: The model, see `weft.interop.as_hierarchy`.
            loss: Name of a loss, or a function of outputs and batch: a scalar, or one per row.
            metrics: Such names or functions, by the name to report them as.
            target: The field of the batch that named losses and metrics compare the outputs with.
            batch_spec: Shapes and dtypes of a batch, set by the trainer.
        """

        layer: config.Required[Any] = config.REQUIRED
        loss: config.Required[str | OutputFn] = config.REQUIRED
        metrics: dict[str, str | OutputFn] = {}
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

    def _function(self, kind: str, fn: str | OutputFn, named: Mapping[str, OutputFn]) -> OutputFn:
        if not isinstance(fn, str):
            return fn
        if fn not in named:
            raise errors.LossError(f"there is no {kind} {fn!r}. {errors.did_you_mean(fn, named)}")
        target = self.config.target
        if target is None:
            raise errors.LossError(
                f"the {kind} {fn!r} compares outputs with targets, but the data has no field for "
                "them; name it with target=…, or pass data as a pair (x, y)."
            )

        def of_targets(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
            if not hasattr(outputs, "shape"):
                raise errors.LossError(
                    f"the model returned a {type(outputs).__name__}, and the {kind} {fn!r} is that "
                    "of an array; pass a function of outputs and batch instead."
                )
            values = named[fn](outputs, batch[target])
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
        outputs = self.predict(input_batch)
        loss = self._mean("loss", self._loss, outputs, input_batch)
        self.add_summary("loss", loss)
        for name, fn in self._metrics.items():
            self.add_summary(name, self._mean(name, fn, outputs, input_batch))
        return jnp.asarray(loss.mean), {}

    @hierarchy.nowrap
    def is_per_row(self, outputs: Any, batch: Mapping[str, Any]) -> bool:
        """Returns whether loss and metrics all return one number per row."""
        fns = {"loss": self._loss, **self._metrics}
        dims = [self._values(name, fn, outputs, batch).ndim for name, fn in fns.items()]
        return all(dims)

    def _values(self, name: str, fn: OutputFn, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        rows = len(jax.tree.leaves(batch)[0])
        try:
            values = jnp.asarray(fn(outputs, batch), dtype=jnp.float32)
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
        self, name: str, fn: OutputFn, outputs: Any, batch: Mapping[str, Any]
    ) -> hierarchy.WeightedScalar:
        values, weights = self._values(name, fn, outputs, batch), batch.get(ROW_WEIGHT)
        if weights is None:
            return hierarchy.WeightedScalar(values.mean(), len(jax.tree.leaves(batch)[0]))
        if not values.ndim:
            raise errors.LossError(
                f"{name} returned a scalar, which includes the rows that fill up the batch; "
                "expected one number per row."
            )
        return hierarchy.WeightedScalar(*functional.weighted_mean(values, weights))
