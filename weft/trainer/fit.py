"""Training of a model on data at hand in one call.

`fit` builds the config of an `SpmdTrainer` and runs it. `FitResult.config` is that config, to go on
with where the arguments do not suffice; `weft.trainer.fit_result` reads the result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import (
    REQUIRED,
    InstantiableConfig,
    config_for_function,
)
from weft.errors import FitError, InputDatasetError, did_you_mean
from weft.hierarchy import Module, functional
from weft.input import Arrays, Batches, split
from weft.metrics import Metric
from weft.report.display import Display, make_display
from weft.report.recorder import error_console
from weft.trainer import (
    compilation,
    evaler,
    mesh,
    parallelism,
)
from weft.trainer.checkpointer import policy
from weft.trainer.fit_data import Data, Fields, FitData, read_data
from weft.trainer.fit_result import (
    VALIDATION,
    FitResult,
    Mode,
    Watched,
    result_of,
)
from weft.trainer.hooks import (
    INPUT_ENDED,
    Hook,
    RunningTrainer,
    check_hook,
)
from weft.trainer.learner import Learner
from weft.trainer.model import LibraryModel, build_model
from weft.trainer.model_layer import layer_of
from weft.trainer.model_record import model_record
from weft.trainer.optimizers.algorithms import (
    adam_optimizer,
    adamw_optimizer,
    sgd_optimizer,
)
from weft.trainer.optimizers.base import TransformationLike, as_partitioned
from weft.trainer.optimizers.transformations import SCHEDULE_FREE
from weft.trainer.precision import Precision
from weft.trainer.run_lock import move_aside
from weft.trainer.state_builder import ImportedWeightsBuilder
from weft.trainer.summary_writer.files import JsonLinesWriter
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
from weft.typing import (
    LossName,
    MetricName,
    OptimizerName,
    PrecisionName,
    PyTree,
    Tensor,
)

M = TypeVar("M")
logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


NameOrFn = str | OutputFn
MetricOption = MetricName | LossName | OutputFn | Metric

_ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
OPTIMIZERS: dict[str, Any] = {
    "adam": config_for_function(adam_optimizer).set(**_ADAM),
    "adamw": config_for_function(adamw_optimizer).set(
        **_ADAM, weight_decay=1e-4
    ),
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
    "overwrite": "fresh=True",
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
    metrics: MetricOption
    | Sequence[MetricOption]
    | Mapping[str, MetricOption] = (),
    optimizer: OptimizerName | TransformationLike = "adam",
    learning_rate: float
    | Callable[[Any], Any]
    | InstantiableConfig[Any]
    | None = None,
    target: str | None = None,
    class_weight: Mapping[int, float] | Sequence[float] | None = None,
    transform: BatchTransform | None = None,
    early_stopping: int | evaler.EarlyStopping.Config | None = None,
    best: str | tuple[str, Mode] = "loss",
    precision: PrecisionName | Precision.Config | None = None,
    seed: int = 0,
    base: str | None = None,
    dir: str | None = None,
    fresh: bool = False,
    resume: bool = False,
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
            metric. The best is the largest "accuracy", "auc", "f1", "precision" or "recall", and
            the smallest loss or "perplexity", also under a name of your own: `best="macro_f1"` with
            `metrics={"macro_f1": F1Score("macro")}`. For other metrics, such as functions, pass
            `("mine", "max")` or `("mine", "min")`.
        precision: Policy for the dtypes in this run and in `TrainedModel.predict`: "float32",
            "mixed_bfloat16", "bfloat16", "int8", "fp8", or a `Precision.Config`.
        seed: Seed of parameters, noise and the order of arrays.
        base: Folder of a Hugging Face checkpoint, or a file of `weft export`, that has the initial
            parameters of a model that computes its own loss, such as that of
            `huggingface_model_config(base)`.
        dir: Directory for checkpoints and the record of the run. A run whose directory has a
            checkpoint resumes. None keeps nothing on disk.
        fresh: Whether to move aside what an earlier run has left in `dir`, such as to `dir.1`.
        resume: Whether to continue a run in `dir` also if the model, the loss, the optimizer, their
            code or the data have changed since, which is an error otherwise.
        save_every, evaluate_every: Numbers of steps between checkpoints and between evaluations, in
            place of those of `validation`. The last step is saved and evaluated, too.
        progress: Whether to show the progress, see `SpmdTrainer.run`.
        callbacks: Hooks, called in this order at the steps of the run; see `weft.trainer.Hook`.

    A model may draw random numbers, in training and in evaluation: a module of Linen from a stream
    of any name, `self.make_rng("noise")`; a module of NNX from those of its `Rngs`, seeded by the
    run; a layer of the hierarchy from `self.prng_key`. Streams of different names are independent,
    and each step has other numbers, which follow from `seed`. `predict` draws the same ones each
    time. Initial parameters of Linen are of the stream "params".

    Raises:
        FitError: If arguments contradict each other.
        WeightsReadError: If there is no checkpoint at `base`.
        WeightsMismatchError: If its parameters are not those of the model.
        InputDatasetError: If the data is empty, has NaN, or its arrays or labels do not fit.
        LossError: If a loss or metric is unknown, does not fit the outputs, or is such a scalar.
        RunDirError: If `dir` belongs to a run with other arguments, code or data.
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
    if fresh and resume:
        raise FitError(
            "fit got fresh=True, which starts a run again, and resume=True, which continues it; "
            "expected one of the two."
        )
    if validation_split is not None:
        if validation is not None:
            raise FitError(
                "fit got validation and validation_split; expected one of the two."
            )
        data, validation = split(data, held_out=validation_split, seed=seed)
    if base is not None and loss is not None:
        raise FitError(
            "fit got a base and a loss. A model of a checkpoint computes its own loss; leave loss "
            "out."
        )
    train = read_data(data, "data", batch_size)
    held_out = None
    if validation is not None:
        held_out = read_data(validation, "validation", batch_size)
    watched = _watched_metric(best, _metrics_by_name(metrics), loss, held_out)
    if class_weight is not None:
        train = _with_class_weight(
            train, class_weight, _target_name(target, train), loss
        )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        seed=seed,
        model=_model_config(
            model, loss, _metrics_by_name(metrics), target, train
        ),
        learner=Learner.default_config().set(
            optimizer=_optimizer(optimizer, learning_rate)
        ),
        input=train.input_config(seed=seed),
        batch_transform=transform,
        precision=precision,
        mesh_shape=parallelism.mesh_shape_from_axes(data=-1),
        # The other axes are those that layouts of layers may name.
        mesh_axis_names=parallelism.MESH_AXIS_NAMES,
    )
    lengths = _Lengths(
        epochs, steps, save_every, evaluate_every, keeps_dir=dir is not None
    )
    _set_length(cfg, train, held_out, lengths, watched)
    if early_stopping is not None:
        cfg.early_stopping = _early_stopping(early_stopping, held_out, watched)
    _set_average(cfg, optimizer)
    if base is not None:
        cfg.init_state_builder = ImportedWeightsBuilder.default_config().set(
            path=base
        )
    if fresh and dir is not None:
        move_aside(dir)
    return run_to_result(model, cfg, dir, progress, callbacks, watched, resume)


class _Lengths(NamedTuple):
    """The arguments of `fit` on how long to train, and when to save and to evaluate."""

    epochs: int | None
    steps: int | None
    save_every: int | None
    evaluate_every: int | None
    keeps_dir: bool


def _set_length(
    cfg: SpmdTrainer.Config,
    train: FitData,
    held_out: FitData | None,
    lengths: _Lengths,
    watched: Watched,
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
    cfg.checkpointer.save_policy = config_for_function(
        policy.every_n_steps_policy  # the trainer saves the last step, too
    ).set(n=save_interval)


def run_to_result(
    model: M,
    cfg: SpmdTrainer.Config,
    dir: str | None,
    progress: bool,
    callbacks: Sequence[Hook],
    watched: Watched,
    resume: bool,
) -> FitResult[M]:
    """Runs a config that trains a model; for the arguments and errors see `fit`."""
    if dir is None and jax.process_count() > 1:
        raise FitError(
            "fit got dir=None; several processes need a directory that they share."
        )
    hooks = [
        check_hook(hook, f"fit: callbacks[{i}]")
        for i, hook in enumerate(callbacks)
    ]
    with contextlib.ExitStack() as stack:
        display: bool | Display = progress
        if dir is None:
            cfg.dir = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="weft-fit-")
            )
            if progress:
                display = make_display(
                    error_console(), None
                )  # shows no directory
        else:
            cfg.dir = dir
        trainer = cfg.clone().instantiate(
            parent=None
        )  # the trainer sets fields of its config
        end = _EndReason()
        trainer.run(
            listener=[end, *hooks],
            progress=display,
            recipe=model_record(layer_of(model)),
            resume=resume,
        )
        if trainer.trainer_state is None:
            raise FitError(
                f"fit was stopped by {end.reason} before the first step."
            )
        if trainer.step == end.resumed_from and not progress:
            logger.warning(
                "Nothing was trained: the run in %r had finished at step %d already. Set more "
                "epochs or steps, or fresh=True to start again.",
                dir,
                trainer.step,
            )
        # Batches that can be repeated start again; an iterator may be too short.
        if end.reason == INPUT_ENDED:
            raise InputDatasetError(
                f"data ended after {trainer.step} of {cfg.max_step} steps; expected a batch for "
                "each. Pass an iterable that can be repeated, such as a list, or set fewer steps."
            )
        result = result_of(model, cfg, trainer, watched)
    if dir is None:
        cfg.dir = REQUIRED
    return result


def _check_counts(
    epochs: int | None, steps: int | None, **others: int | None
) -> None:
    if (epochs is None) == (steps is None):
        raise FitError(
            f"fit got epochs={epochs} and steps={steps}; expected one of the two, such as epochs=10"
        )
    for name, value in {"epochs": epochs, "steps": steps, **others}.items():
        if value is not None and value < 1:
            raise FitError(f"fit got {name}={value}; expected 1 or more.")


class _EndReason(Hook):
    """Hook that keeps the reason why the run ended, and the step at which it was resumed."""

    reason = ""
    resumed_from: int | None = None

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        self.resumed_from = resumed_from

    def on_end(self, step: int, reason: str) -> None:
        self.reason = reason


def _model_config(
    model: object,
    loss: NameOrFn | None,
    metrics: dict[str, MetricLike],
    target: str | None,
    data: FitData,
) -> Module.Config:
    layer = layer_of(model)
    if loss is not None:
        return Supervised.default_config().set(
            layer=layer,
            loss=loss,
            metrics=metrics,
            target=_target_name(target, data),
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
) -> Watched:
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
                f"best=({name!r}, 'min'). This is known of {', '.join(sorted(_BETTER))}."
            )
        mode = _BETTER[known_name]
    if mode not in ("min", "max"):
        raise FitError(
            f"fit got best={best!r}; expected 'min' or 'max' as its direction."
        )
    return Watched(name, mode)


def _early_stopping(
    early_stopping: int | evaler.EarlyStopping.Config,
    held_out: FitData | None,
    watched: Watched,
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
    return train.with_row_weights(
        functools.partial(_weights_of_rows, target, dict(weights))
    )


def _weights_of_rows(
    target: str, class_weight: Mapping[int, float], fields: Fields
) -> np.ndarray:
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
    learning_rate: float
    | Callable[[Any], Any]
    | InstantiableConfig[Any]
    | None,
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


def _set_average(
    cfg: SpmdTrainer.Config, optimizer: str | TransformationLike
) -> None:
    """Lets the learner keep the parameters that a schedule-free optimizer evaluates."""
    if isinstance(optimizer, str):
        return
    with jax.set_mesh(mesh.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names)):
        specs = build_model(cfg).create_parameter_specs_recursively()
    learner: Any = cfg.learner.clone(name="learner").instantiate(parent=None)
    if learner.is_schedule_free(specs):
        cfg.learner.ema.decay = SCHEDULE_FREE


def _check_model(
    cfg: SpmdTrainer.Config, train: FitData, held_out: FitData | None
) -> bool:
    """Checks data against the model; returns whether rows can be left out of loss and metrics."""
    if not isinstance(cfg.model, Supervised.Config):
        return False
    is_per_row = False

    def predict(key: Tensor, batch: Fields) -> PyTree:
        nonlocal is_per_row
        state = layer.initialize_parameters_recursively(key)
        outputs, _ = functional(
            layer, key, state, (batch,), method="predict", is_training=False
        )
        is_per_row = layer.is_per_row(outputs, batch)
        return outputs

    batch_spec = (
        cfg.input.clone(name="input").instantiate(parent=None).element_spec()
    )
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
    class_metrics = [
        metric_name(metric) for metric in metrics if compares_classes(metric)
    ]
    if class_metrics and num_classes is not None:
        return _TargetRange(
            target, num_classes - 1, f"the model has {num_classes} outputs"
        )
    if "binary_cross_entropy" in metrics:
        return _TargetRange(
            target, 1, "binary_cross_entropy takes probabilities"
        )
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
    cfg: SpmdTrainer.Config,
    data: FitData,
    interval: int,
    counts_rows: bool,
    watched: Watched,
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
        eval_policy=eval_policy.set(n=interval, max_step=REQUIRED),
        summary_writer=JsonLinesWriter.default_config(),
    )
    cfg.evalers = {VALIDATION: validation}
    cfg.set_recursively("checkpointer.keep_best", value=watched.keep_best)
