"""Training of a model on data at hand in one call.

`fit` builds the config of an `SpmdTrainer` and runs it. `FitResult.config` is that config, to go on
with where the arguments do not suffice.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft import nnx
from weft.config import REQUIRED, InMemory, InstantiableConfig, config_for_function
from weft.core import flat_dict
from weft.errors import FitError, InputDatasetError, did_you_mean
from weft.hierarchy import Module, functional
from weft.input import Arrays, Batches, split
from weft.interop.models import adapter_of, model_of
from weft.interop.nnx import NNXModel
from weft.metrics import Metric
from weft.report.display import Display, make_display
from weft.report.recorder import error_console
from weft.trainer import compilation, evaler, mesh, parallelism, run_dir, state_builder
from weft.trainer.checkpointer import checkpointer, index, policy
from weft.trainer.fit_data import Data, Fields, FitData, read_data
from weft.trainer.hooks import INPUT_ENDED, Hook, check_hook
from weft.trainer.learner import Learner
from weft.trainer.model import LibraryModel, build_model
from weft.trainer.optimizers.algorithms import adam_optimizer, adamw_optimizer, sgd_optimizer
from weft.trainer.optimizers.base import TransformationLike, as_partitioned
from weft.trainer.optimizers.transformations import SCHEDULE_FREE
from weft.trainer.precision import Precision
from weft.trainer.run_lock import move_aside
from weft.trainer.summary_writer.files import JsonLinesWriter, read_json_lines
from weft.trainer.supervised import (
    LOSSES,
    MetricLike,
    OutputFn,
    Supervised,
    compares_classes,
    metric_name,
)
from weft.trainer.train_step import BatchTransform
from weft.trainer.trainer import SpmdTrainer
from weft.typing import LossName, MetricName, OptimizerName, PrecisionName, PyTree, Tensor

VALIDATION = "validation"
M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class History:
    """Values of a run by step, also of the part before it was resumed.

    Attributes:
        train: For each step the `step` itself, the `loss` and the metrics of its batch, and the
            `learning_rate` of a named optimizer.
        validation: For each evaluation the `step`, and the `loss` and the metrics of all its rows;
            empty without validation data.
    """

    train: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]

    def __repr__(self) -> str:
        parts: list[str] = []
        for name, columns in {"train": self.train, "validation": self.validation}.items():
            if columns:
                parts.append(f"{name}={len(columns['step'])} × ({', '.join(columns)})")
        return f"History({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class FitState:
    """State of a model after a step.

    Attributes:
        variables: Collections by name for Linen and NNX; the parameters of a hierarchy layer.
    """

    step: int
    variables: dict[str, Any] = dataclasses.field(repr=False)
    _trainer: SpmdTrainer = dataclasses.field(repr=False)

    def predict(self, inputs: PyTree) -> PyTree:
        """Returns the model's outputs for its inputs as NumPy arrays, in evaluation mode.

        Raises FitError if the model computes its own loss; call it with `variables` instead.
        """
        if not isinstance(self._trainer.model, Supervised):
            raise FitError(
                "predict is for models that were given a loss; this one returns its own. Call the "
                "model with the `variables` of this state."
            )
        with self._trainer.mesh():
            return jax.device_get(self._predict(self.variables, inputs))

    @functools.cached_property
    def _predict(self) -> Callable[[dict[str, PyTree], PyTree], PyTree]:
        def predict(variables: dict[str, PyTree], inputs: PyTree) -> PyTree:
            outputs, _ = functional(
                self._trainer.model,
                jax.random.key(0),
                {"model": variables},
                (inputs,),
                method="call_model",
                is_training=False,
            )
            return outputs

        return jax.jit(predict)

    def update(self, model: object) -> None:
        """Sets the variables of an NNX module to the values of this state.

        Raises LayerVariablesError if it is not a module with these variables.
        """
        adapter: Any = model_of(model)
        if not isinstance(adapter, NNXModel):
            raise FitError(
                f"update changes a module of NNX, but got a {type(model).__name__}; call the model "
                "with the `variables` of this state."
            )
        nnx = adapter.nnx  # Weft's or Flax's
        # Variables of a run have paths of texts; those of a module may have indices.
        model_paths = {tuple(map(str, path)): path for path in adapter.collections(model)}
        values: dict[Any, Any] = {}
        for path, value in flat_dict.flatten_dict(self.variables).items():
            values[model_paths.get(path, path)] = value
        updated, *_ = adapter.merge_values(flat_dict.unflatten_dict(values), {}, False)
        nnx.update(model, nnx.state(updated, lambda path, x: not isinstance(x, nnx.RngState)))


@dataclasses.dataclass(frozen=True)
class FitResult(Generic[M]):
    """Result of `fit`.

    Attributes:
        model: The model that was given. A module of NNX has the values of the last step.
        last: State after the last step.
        best: State with the smallest loss on the validation data, or the best value of the argument
            `best`; without validation data, the last one.
        config: Config of the `SpmdTrainer` that ran; its `dir` is missing if `fit` was given none.
    """

    model: M = dataclasses.field(repr=False)
    history: History
    last: FitState
    best: FitState
    config: SpmdTrainer.Config = dataclasses.field(repr=False)


def _result(
    model: M, cfg: SpmdTrainer.Config, trainer: SpmdTrainer, watched: "_Watched"
) -> FitResult[M]:
    """Returns the result of a run that has ended, reading its directory."""
    history = History(
        train=_read_series(cfg.dir, "train_train"), validation=_read_series(cfg.dir, VALIDATION)
    )
    last_params = trainer.model_params_for_eval()
    # The last state is in memory; only another one is read from its checkpoint.
    last = best = FitState(trainer.step, _variables(trainer, last_params), trainer)
    checkpoints_dir = os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR)
    best_step = _best_step(checkpoints_dir, history.validation, watched)
    if best_step is not None and best_step != trainer.step:
        best_params = _restore_params(checkpoints_dir, trainer, best_step)
        best = FitState(best_step, _variables(trainer, best_params), trainer)
    return FitResult(model, history, last, best, cfg)


def _read_series(run_directory: str, writer_name: str) -> dict[str, np.ndarray]:
    """Returns the numbers that a writer has written: the steps, and a column for each name."""
    directory = os.path.join(run_directory, "summaries", writer_name)
    if not os.path.exists(directory):
        return {}
    values_by_step: dict[int, dict[str, float | list[Any]]] = {}
    for record in read_json_lines(directory):
        values: dict[str, float | list[Any]] = {}
        for path, value in record.get("values", {}).items():
            if isinstance(value, int | float):
                values[_column_name(path)] = value
        for path, array in record.get("arrays", {}).items():
            values[_column_name(path)] = array
        if values:
            values_by_step.setdefault(record["step"], {}).update(values)
    names: set[str] = set()
    for values in values_by_step.values():
        names.update(values)
    columns = {"step": np.array(list(values_by_step), int)}
    for name in sorted(names):
        if "/" in name:
            continue  # not of the model
        column = [values.get(name, np.nan) for values in values_by_step.values()]
        # A metric without a value at a step has NaN there, in the shape of the others.
        shape = np.broadcast_shapes(*(np.shape(x) for x in column))
        columns[name] = np.stack([np.broadcast_to(x, shape) for x in column])
    return columns


def _column_name(summary_path: str) -> str:
    if summary_path == "learner/optimizer/learning_rate":
        return "learning_rate"
    return summary_path.removeprefix("model/")


def _best_step(
    checkpoints_dir: str, validation: dict[str, np.ndarray], watched: "_Watched"
) -> int | None:
    """Returns the saved step with the best value, the last one of several."""
    if watched.metric not in validation:
        return None
    saved_steps = checkpointer.Checkpointer.checkpoint_steps(checkpoints_dir)
    sign = -1 if watched.mode == "max" else 1
    best_step = None
    lowest = math.inf
    values = (sign * validation[watched.metric]).tolist()
    for step, value in zip(validation["step"].tolist(), values, strict=True):
        if step in saved_steps and value <= lowest:
            best_step, lowest = step, value
    return best_step


def _variables(trainer: SpmdTrainer, params: PyTree) -> PyTree:
    if isinstance(trainer.model, Supervised):
        return params["model"]
    return params


def _restore_params(checkpoints_dir: str, trainer: SpmdTrainer, step: int) -> PyTree:
    """Returns the parameters for evaluation of a step that was saved."""
    # Only what evaluation needs is read: the average of the parameters, or else these.
    state = trainer.trainer_state
    has_average = "ema" in state.learner
    target = state._replace(prng_key={}, learner={})
    if has_average:
        target = state._replace(prng_key={}, model={}, learner={"ema": state.learner["ema"]})
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target
    )
    reader_config = state_builder.TensorStoreStateStorageBuilder.default_config().set(
        name="best",
        base_dir=checkpoints_dir,
        step=step,
        validation=index.CheckpointValidationType.CONTAINS_STATE,
    )
    with trainer.mesh():
        reader = reader_config.instantiate(parent=None)
        restored = reader(state_builder.Builder.State(0, target)).trainer_state
    if has_average:
        return restored.learner["ema"].ema
    return restored.model


NameOrFn = str | OutputFn
MetricOption = MetricName | LossName | OutputFn | Metric
Mode = Literal["min", "max"]

_ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
OPTIMIZERS: dict[str, Any] = {
    "adam": config_for_function(adam_optimizer).set(**_ADAM),
    "adamw": config_for_function(adamw_optimizer).set(**_ADAM, weight_decay=1e-4),
    "sgd": config_for_function(sgd_optimizer).set(decouple_weight_decay=False),
}
_BETTER: dict[str, Mode] = {
    "loss": "min",
    **dict.fromkeys([*LOSSES, "perplexity"], "min"),
    **dict.fromkeys(["accuracy", "auc", "f1", "precision", "recall"], "max"),
}
"""Whether less or more of a named metric is better."""
_TARGETS = ("y", "label", "labels", "target", "targets")
_LEARNING_RATE = 1e-3

_MAX_RECORDED_STEPS = 1000


_OTHER_NAMES = {
    "callback": "callbacks=[…]",
    "checkpoint_dir": "dir=…",
    "class_weights": "class_weight=…",
    "learning_rates": "learning_rate=…",
    "lr": "learning_rate=…",
    "max_epochs": "epochs=…",
    "max_steps": "steps=…",
    "num_epochs": "epochs=…",
    "num_steps": "steps=…",
    "n_epochs": "epochs=…",
    "loss_fn": "loss=…",
    "optim": "optimizer=…",
    "patience": "early_stopping=3, the number of evaluations to wait",
    "sample_weight": "a field row_weight of the data",
    "save_dir": "dir=…",
    "train_data": "data, the second argument",
    "val_data": "validation=…",
    "valid_data": "validation=…",
    "validation_data": "validation=…",
    "verbose": "progress=False for no display",
    "weight_decay": "an optimizer of optax, as optimizer=optax.adamw(1e-3, weight_decay=0.01)",
}
"""What other libraries call the arguments of `fit`."""


def _explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a call with an argument that the function does not have name the one that it means."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                hint = did_you_mean(name, parameters)
                if name in _OTHER_NAMES:
                    hint = f"Write {_OTHER_NAMES[name]}."
                raise FitError(f"fit has no argument {name!r}. {hint}")
        return function(*args, **kwargs)

    return call


@_explains_arguments
@compilation.compilation_cache(None)
def fit(
    model: M,
    data: Data,
    loss: LossName | OutputFn | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    validation: Data | None = None,
    validation_split: float | None = None,
    metrics: MetricOption | Sequence[MetricOption] | Mapping[str, MetricOption] = (),
    optimizer: OptimizerName | TransformationLike = "adam",
    learning_rate: float | Callable[[Any], Any] | InstantiableConfig[Any] | None = None,
    target: str | None = None,
    class_weight: Mapping[int, float] | Sequence[float] | None = None,
    transform: BatchTransform | None = None,
    early_stopping: int | evaler.EarlyStopping.Config | None = None,
    best: str | tuple[str, Mode] = "loss",
    precision: PrecisionName | Precision.Config | None = None,
    seed: int = 0,
    dir: str | None = None,
    fresh: bool = False,
    save_every: int | None = None,
    evaluate_every: int | None = None,
    progress: bool = True,
    callbacks: Sequence[Hook] = (),
) -> FitResult[M]:
    """Trains a model on data at hand.

    Args:
        model: A module of Linen, NNX or another library that `weft.interop` knows, the config of a
            hierarchy layer or of a class, or a layer of the hierarchy. A module of NNX starts with
            its values and is updated in place; others are initialized by `seed`.
        data: Arrays as a pair `(x, y)` or a dict of equally long arrays; a Grain dataset; or an
            iterable of batches, each such a pair or dict. A Grain dataset has batches too, or
            examples if `batch_size` is set. A pair is short for `{"x": x, "y": y}`. A field
            `row_weight` is the weight of each row in losses and metrics with a number per row.
        loss: "cross_entropy" (logits and integer labels), "binary_cross_entropy" (logits and
            probabilities), "mse", "mae" or "huber"; a function of the model's outputs and the batch
            that returns one number per row, a scalar or a `WeightedScalar`, or a pair of this and a
            dict of such numbers to report, `(loss, {"kl": kl})`; or None if the model is called
            with the batch, a dict, and returns `(loss, aux)`, where scalars in a dict `aux` are
            reported. With a loss, it is called with
            the fields of the batch except the target: an array if there is one, else a dict.
        epochs, steps: Number of passes over the data, or of batches.
        batch_size: Rows of a batch over all devices; for arrays 32 by default.
        validation: Data in one of the same forms, evaluated after each epoch, or with `steps` ten
            times, and at the end. Rows that fill up the last batch do not count.
        validation_split: Fraction of the rows of `data`, chosen by `seed`, to evaluate on instead
            of training on them.
        metrics: "accuracy", "auc", "confusion_matrix", "f1", "perplexity", "precision", "recall",
            names of losses, metrics such as `weft.metrics.F1Score("macro")`, or functions like
            `loss`: a scalar has to be a mean over rows, if not use `AllRows`. A dict names them.
        optimizer: "adam", "adamw", "sgd", an optimizer of optax, or the config of one.
        learning_rate: Rate of a named optimizer, 0.001 by default, or a schedule.
        target: Field of the targets; by default y, label, labels, target or targets.
        class_weight: Weight of the rows of each class, by class, in the loss and the metrics of
            training: a mean over rows with these weights. Labels are integers.
        transform: Function of a batch and a PRNG key that returns a batch of the same shapes, such
            as an augmentation. It is called within the compiled step, in training alone.
        early_stopping: Number of evaluations without a better value of `best` that do not yet end
            the run, or the config of an `EarlyStopping`; None runs all steps.
        best: Number of the evaluations by which `FitResult.best` is chosen: "loss" or the name of a
            metric; with "min" or "max" for one whose better direction is not known.
        precision: Policy for the dtypes in this run and in `FitState.predict`: "float32",
            "mixed_bfloat16", "bfloat16", "int8", "fp8", or a `Precision.Config`.
        seed: Seed of parameters, noise and the order of arrays.
        dir: Directory for checkpoints and the record of the run. A run whose directory has a
            checkpoint resumes. None keeps nothing on disk.
        fresh: Whether to move aside what an earlier run has left in `dir`, such as to `dir.1`.
        save_every, evaluate_every: Numbers of steps between checkpoints and between evaluations, in
            place of those of `validation`. The last step is saved and evaluated, too.
        progress: Whether to show the progress, see `SpmdTrainer.run`.
        callbacks: Hooks, called in this order at the steps of the run; see `weft.trainer.Hook`.

    Raises:
        FitError: If arguments contradict each other.
        InputDatasetError: If the data is empty, has NaN, or its arrays or labels do not fit.
        LossError: If a loss or metric is unknown, does not fit the outputs, or is such a scalar.
        RunDirError: If `dir` belongs to a run with other arguments or other data.
        HookError: If a callback is not a hook.

    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> result = fit(model, (x, 2 * x + 1), "mse", epochs=50, learning_rate=0.1, progress=False)
    >>> round(float(model.bias[0]), 1), len(result.history.train["loss"])
    (1.0, 100)
    """
    _check_counts(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        save_every=save_every,
        evaluate_every=evaluate_every,
    )
    if validation_split is not None:
        if validation is not None:
            raise FitError("fit got validation and validation_split; expected one of the two.")
        data, validation = split(data, held_out=validation_split, seed=seed)
    train = read_data(data, "data", batch_size)
    held_out = None
    if validation is not None:
        held_out = read_data(validation, "validation", batch_size)
    watched = _watched_metric(best, _metrics_by_name(metrics), loss, held_out)
    if class_weight is not None:
        train = _with_class_weight(train, class_weight, _target_name(target, train), loss)
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        seed=seed,
        model=_model_config(model, loss, _metrics_by_name(metrics), target, train),
        learner=Learner.default_config().set(optimizer=_optimizer(optimizer, learning_rate)),
        input=train.input_config(seed=seed),
        batch_transform=transform,
        precision=precision,
        mesh_shape=parallelism.mesh_shape_from_axes(data=-1),
        # The other axes are those that layouts of layers may name.
        mesh_axis_names=parallelism.MESH_AXIS_NAMES,
    )
    lengths = _Lengths(epochs, steps, save_every, evaluate_every, keeps_dir=dir is not None)
    _set_length(cfg, train, held_out, lengths, watched)
    if early_stopping is not None:
        cfg.early_stopping = _early_stopping(early_stopping, held_out, watched)
    _set_average(cfg, optimizer)
    if fresh and dir is not None:
        move_aside(dir)
    return _run(model, cfg, dir, progress, callbacks, watched)


class _Lengths(NamedTuple):
    """The arguments of `fit` on how long to train, and when to save and to evaluate."""

    epochs: int | None
    steps: int | None
    save_every: int | None
    evaluate_every: int | None
    keeps_dir: bool


class _Watched(NamedTuple):
    """Number of the evaluations by which the best state is chosen."""

    metric: str
    mode: Mode

    @property
    def path(self) -> policy.EvalMetric:
        """Its place among the summaries of the evaluations."""
        return policy.EvalMetric(VALIDATION, self.metric)


def _set_length(
    cfg: SpmdTrainer.Config,
    train: FitData,
    held_out: FitData | None,
    lengths: _Lengths,
    watched: _Watched,
) -> None:
    """Sets the number of steps, and when to evaluate, save and record; checks the model."""
    if lengths.steps is not None:
        steps = lengths.steps
        interval = math.ceil(steps / 10)
    elif lengths.epochs is not None and train.num_batches is not None:
        steps = train.num_steps(lengths.epochs)
        interval = train.num_batches
    else:
        raise FitError(
            f"fit got epochs={lengths.epochs}, but the number of batches of the data is unknown; "
            "set steps instead."
        )
    cfg.max_step = steps
    cfg.summary_writer = JsonLinesWriter.default_config().set(
        write_every_n_steps=math.ceil(steps / _MAX_RECORDED_STEPS)
    )
    counts_rows = _check_model(cfg, train, held_out)
    save_interval = lengths.save_every or lengths.evaluate_every or interval
    if held_out is not None:
        evaluate_interval = lengths.evaluate_every or interval
        _add_validation(cfg, held_out, evaluate_interval, counts_rows, watched)
    elif not lengths.keeps_dir:
        save_interval = steps  # no checkpoint but the last is of use
    cfg.checkpointer.save_policy = config_for_function(policy.every_n_steps_and_last_policy).set(
        n=save_interval, max_step=steps
    )


def _run(
    model: M,
    cfg: SpmdTrainer.Config,
    dir: str | None,
    progress: bool,
    callbacks: Sequence[Hook],
    watched: _Watched,
) -> FitResult[M]:
    if dir is None and jax.process_count() > 1:
        raise FitError("fit got dir=None; several processes need a directory that they share.")
    hooks = [check_hook(hook, f"fit: callbacks[{i}]") for i, hook in enumerate(callbacks)]
    with contextlib.ExitStack() as stack:
        display: bool | Display = progress
        if dir is None:
            cfg.dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-fit-"))
            if progress:
                display = make_display(error_console(), None)  # shows no directory
        else:
            cfg.dir = dir
        trainer = cfg.clone().instantiate(parent=None)  # the trainer sets fields of its config
        end = _EndReason()
        trainer.run(listener=[end, *hooks], progress=display)
        if trainer.trainer_state is None:
            raise FitError(f"fit was stopped by {end.reason} before the first step.")
        # Batches that can be repeated start again; an iterator may be too short.
        if end.reason == INPUT_ENDED:
            raise InputDatasetError(
                f"data ended after {trainer.step} of {cfg.max_step} steps; expected a batch for "
                "each. Pass an iterable that can be repeated, such as a list, or set fewer steps."
            )
        result = _result(model, cfg, trainer, watched)
    if isinstance(_layer(model), InMemory) and isinstance(model_of(model), NNXModel):
        result.last.update(model)
    if dir is None:
        cfg.dir = REQUIRED
    return result


def _check_counts(epochs: int | None, steps: int | None, **others: int | None) -> None:
    if (epochs is None) == (steps is None):
        raise FitError(
            f"fit got epochs={epochs} and steps={steps}; expected one of the two, such as epochs=10"
        )
    for name, value in {"epochs": epochs, "steps": steps, **others}.items():
        if value is not None and value < 1:
            raise FitError(f"fit got {name}={value}; expected 1 or more.")


class _EndReason(Hook):
    """Hook that keeps the reason why the run ended."""

    reason = ""

    def on_end(self, step: int, reason: str) -> None:
        self.reason = reason


def _model_config(
    model: object,
    loss: NameOrFn | None,
    metrics: dict[str, MetricLike],
    target: str | None,
    data: FitData,
) -> Module.Config:
    layer = _layer(model)
    if loss is not None:
        return Supervised.default_config().set(
            layer=layer, loss=loss, metrics=metrics, target=_target_name(target, data)
        )
    if metrics or target:
        argument = f"target={target!r}"
        if metrics:
            argument = f"metrics={list(metrics)}"
        raise FitError(
            f"fit got {argument} without a loss. A model that computes its own loss reports its "
            "metrics itself; leave them out, or set loss."
        )
    if isinstance(layer, Module.Config):
        return layer
    return LibraryModel.default_config().set(layer=layer)


def _target_name(target: str | None, data: FitData) -> str | None:
    """Returns the field of the targets: the one that was named, or the only one of a usual name."""
    usual_targets = [name for name in _TARGETS if name in data.fields]
    if not target and len(usual_targets) == 1:
        return usual_targets[0]
    return target or None


def _watched_metric(
    best: str | tuple[str, Mode],
    metrics: Mapping[str, MetricLike],
    loss: NameOrFn | None,
    held_out: FitData | None,
) -> _Watched:
    """Returns what chooses the best state; raises a FitError if it is not evaluated."""
    name, mode = best if isinstance(best, tuple) else (best, None)
    if name != "loss" and held_out is None:
        raise FitError(
            f"fit got best={best!r}, a number of the evaluations, and no validation data; pass "
            "validation=… or validation_split=0.1."
        )
    if name != "loss" and loss is not None and name not in metrics:
        raise FitError(
            f"fit got best={name!r}, which is neither 'loss' nor one of metrics. "
            f"{did_you_mean(name, ['loss', *metrics])}"
        )
    if mode is None:
        metric = metrics.get(name, name)
        known_name = metric_name(metric)
        if known_name not in _BETTER:
            raise FitError(
                f"fit got best={name!r}; say whether more is better: best=({name!r}, 'max') or "
                f"best=({name!r}, 'min')."
            )
        mode = _BETTER[known_name]
    if mode not in ("min", "max"):
        raise FitError(f"fit got best={best!r}; expected 'min' or 'max' as its direction.")
    return _Watched(name, mode)


def _early_stopping(
    early_stopping: int | evaler.EarlyStopping.Config, held_out: FitData | None, watched: _Watched
) -> evaler.EarlyStopping.Config:
    if held_out is None:
        raise FitError(
            "fit got early_stopping and no validation data; pass validation=… or "
            "validation_split=0.1."
        )
    if isinstance(early_stopping, evaler.EarlyStopping.Config):
        return early_stopping
    if isinstance(early_stopping, bool) or not isinstance(early_stopping, int):
        raise FitError(
            f"fit got early_stopping={early_stopping!r}; expected the number of evaluations "
            "without a better value that do not yet end the run, such as 3, or the config of an "
            "EarlyStopping."
        )
    return evaler.EarlyStopping.default_config().set(
        metric=watched.path, mode=watched.mode, patience=early_stopping
    )


def _with_class_weight(
    train: FitData,
    class_weight: Mapping[int, float] | Sequence[float],
    target: str | None,
    loss: NameOrFn | None,
) -> FitData:
    """Returns data whose rows have the weights of their classes; raises a FitError for others."""
    if loss is None or target is None:
        raise FitError(
            "fit got class_weight, which weights rows by the classes in the target; it needs a "
            "loss, and a target field such as y."
        )
    weights = class_weight
    if not isinstance(weights, Mapping):
        weights = dict(enumerate(weights))
    for label, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise FitError(
                f"fit got class_weight={weight} for the class {label}; expected numbers of 0 or "
                "more."
            )
    return train.with_row_weights(functools.partial(_weights_of_rows, target, dict(weights)))


def _weights_of_rows(target: str, class_weight: Mapping[int, float], fields: Fields) -> np.ndarray:
    labels = np.asarray(fields[target])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise FitError(
            f"fit got class_weight, and {target!r} is {labels.dtype}{list(labels.shape)}; expected "
            "one integer label per row."
        )
    missing = sorted({*np.unique(labels).tolist()} - {*class_weight})
    if missing:
        raise FitError(
            f"class_weight has no weight for the classes {missing[:8]}; give each class one."
        )
    table = np.zeros(max(class_weight) + 1, np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    return table[labels]


def _layer(model: object) -> Any:
    """Returns the config of a model, or the model as a value of a config."""
    if isinstance(model, Module):
        return model.config
    if isinstance(model, type | InstantiableConfig) or adapter_of(model).endswith("LinenModel"):
        return model
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return InMemory(model, f"an object of type {name}{_structure(model)}")


def _structure(model: object) -> str:
    """Returns a digest of an NNX object's attributes, with the shapes of its variables' values."""
    if not isinstance(model, nnx.Pytree):
        return ""
    graphdef, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), state)
    description = repr(nnx.merge(graphdef, shapes))
    description = re.sub(r" at 0x[0-9a-f]+", "", description)  # the same in another process
    digest = hashlib.sha256(description.encode()).hexdigest()
    return f" with structure {digest[:12]}"


def _metrics_by_name(
    metrics: MetricLike | Sequence[MetricLike] | Mapping[str, MetricLike],
) -> dict[str, MetricLike]:
    """Returns the metrics by name; for errors see `fit`."""
    metrics_by_name: dict[str, MetricLike] = {}
    if isinstance(metrics, Mapping):
        metrics_by_name.update(metrics)
    else:
        if isinstance(metrics, str) or not isinstance(metrics, Sequence):
            metrics = [metrics]
        for metric in metrics:
            name = metric_name(metric)
            if name in metrics_by_name:
                raise FitError(
                    f"fit got two metrics of the name {name!r}; name them: "
                    f"metrics={{{name!r}: …, {name + '_2'!r}: …}}."
                )
            metrics_by_name[name] = metric
    for metric in metrics_by_name.values():
        if not (isinstance(metric, str | Metric) or callable(metric)):
            raise FitError(
                f"fit got a metric of type {type(metric).__name__}; expected a name, a function of "
                "outputs and batch, or a metric of weft.metrics, such as weft.metrics.F1Score()."
            )
    return metrics_by_name


def _optimizer(
    optimizer: str | TransformationLike,
    learning_rate: float | Callable[[Any], Any] | InstantiableConfig[Any] | None,
) -> InstantiableConfig:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise FitError(
                f"there is no optimizer {optimizer!r}. {did_you_mean(optimizer, OPTIMIZERS)} "
                "Optimizers of optax can be passed as objects, such as optax.lion(1e-4)."
            )
        if learning_rate is None:
            learning_rate = _LEARNING_RATE
        return OPTIMIZERS[optimizer].clone(learning_rate=learning_rate)
    if learning_rate is not None:
        raise FitError(
            f"fit got learning_rate={learning_rate!r} and an optimizer that has its own; set it "
            "there, or name the optimizer."
        )
    if isinstance(optimizer, InstantiableConfig):
        return optimizer
    return config_for_function(as_partitioned).set(transformation=optimizer)


def _set_average(cfg: SpmdTrainer.Config, optimizer: str | TransformationLike) -> None:
    """Lets the learner keep the parameters that a schedule-free optimizer evaluates."""
    if isinstance(optimizer, str):
        return
    with jax.set_mesh(mesh.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names)):
        specs = build_model(cfg).create_parameter_specs_recursively()
    learner: Any = cfg.learner.clone(name="learner").instantiate(parent=None)
    if learner.is_schedule_free(specs):
        cfg.learner.ema.decay = SCHEDULE_FREE


def _check_model(cfg: SpmdTrainer.Config, train: FitData, held_out: FitData | None) -> bool:
    """Checks data against the model; returns whether rows can be left out of loss and metrics."""
    if not isinstance(cfg.model, Supervised.Config):
        return False
    is_per_row = False

    def predict(key: Tensor, batch: Fields) -> PyTree:
        nonlocal is_per_row
        state = layer.initialize_parameters_recursively(key)
        outputs, _ = functional(layer, key, state, (batch,), method="predict", is_training=False)
        is_per_row = layer.is_per_row(outputs, batch)
        return outputs

    batch_spec = cfg.input.clone(name="input").instantiate(parent=None).element_spec()
    with jax.set_mesh(mesh.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names)):
        layer: Any = build_model(cfg)
        outputs = jax.eval_shape(predict, jax.random.key(0), batch_spec)
    if held_out is not None:
        layer.check_means(_any_values(outputs), _first_rows(train, batch_spec))
    target = cfg.model.target
    if target is not None and hasattr(outputs, "shape"):
        has_axis_of_classes = len(outputs.shape) > len(batch_spec[target].shape)
        num_classes = outputs.shape[-1] if has_axis_of_classes else None
        target_range = _target_range(cfg.model, target, num_classes)
        if target_range is not None:
            train.check(target_range.check)
            if held_out is not None:
                held_out.check(target_range.check)
    return is_per_row


class _TargetRange(NamedTuple):
    """Range of the values of a target, from 0, and the reason."""

    target: str
    limit: int
    reason: str

    def check(self, name: str, fields: Fields) -> None:
        values = fields[self.target]
        if values.min() < 0 or values.max() > self.limit:
            raise InputDatasetError(
                f"{name}: {self.target!r} has values from {values.min()} to {values.max()}, and "
                f"{self.reason}; expected 0 to {self.limit}."
            )


def _target_range(
    cfg: Supervised.Config, target: str, num_classes: int | None
) -> _TargetRange | None:
    """Returns the range of targets by the loss and the metrics; None if any will do.

    `num_classes` is None if the outputs have no axis that the targets lack.
    """
    metrics = [cfg.loss, *cfg.metrics.values()]
    class_metrics = [metric_name(metric) for metric in metrics if compares_classes(metric)]
    if class_metrics and num_classes is not None:
        return _TargetRange(target, num_classes - 1, f"the model has {num_classes} outputs")
    if "binary_cross_entropy" in metrics:
        return _TargetRange(target, 1, "binary_cross_entropy takes probabilities")
    if class_metrics and class_metrics != ["accuracy"]:
        reason = f"{class_metrics[-1]} takes classes 0 and 1 or probabilities"
        return _TargetRange(target, 1, reason)
    return None


def _any_values(shapes: PyTree) -> PyTree:
    """Returns outputs of these shapes with values of no pattern, to try a metric on."""
    rng = np.random.default_rng(0)

    def values(x: jax.ShapeDtypeStruct) -> Tensor:
        numbers = rng.normal(size=x.shape)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            numbers = numbers > 0
        return jnp.asarray(numbers, x.dtype)

    return jax.tree.map(values, shapes)


def _first_rows(data: FitData, batch_spec: Mapping[str, PyTree]) -> Fields:
    """Returns the first rows of the data as a batch, repeated if there are too few."""

    def rows(x: np.ndarray, like: jax.ShapeDtypeStruct) -> Tensor:
        indices = np.arange(like.shape[0]) % len(x)
        return jnp.asarray(np.asarray(x)[indices], like.dtype)

    fields = {name: data.fields[name] for name in batch_spec}
    return jax.tree.map(rows, fields, dict(batch_spec))


def _add_validation(
    cfg: SpmdTrainer.Config, data: FitData, interval: int, counts_rows: bool, watched: _Watched
) -> None:
    if isinstance(data.values, Arrays) and not counts_rows:
        rows_of_last_batch = data.values.num_rows % (data.batch_size or 1)
        if rows_of_last_batch % jax.device_count():
            raise FitError(
                f"validation has {data.values.num_rows} rows: the last batch has "
                f"{rows_of_last_batch}, which do not divide over {jax.device_count()} devices, and "
                "cannot be filled up, because the loss is a scalar. Return one number per row, or "
                "choose a batch_size or a number of rows that divides."
            )
    elif isinstance(data.values, Batches) and data.values.is_iterator:
        raise FitError(
            "validation is an iterator, which comes once, and is evaluated several times; pass a "
            "list of its batches."
        )
    eval_policy = config_for_function(evaler.every_n_steps_policy)
    validation = evaler.SpmdEvaler.default_config().set(
        input=data.input_config(counts_rows=counts_rows),
        eval_policy=eval_policy.set(n=interval, max_step=cfg.max_step),
        summary_writer=JsonLinesWriter.default_config(),
    )
    cfg.evalers = {VALIDATION: validation}
    cfg.checkpointer.keep_best = policy.KeepBest.default_config().set(
        metric=watched.path, mode=watched.mode
    )
