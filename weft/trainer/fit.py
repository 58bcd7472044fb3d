"""Training of a model on data at hand in one call.

`fit` builds the config of an `SpmdTrainer` and runs it. `FitResult.config` is that config, to go on
with where the arguments do not suffice.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import grain
import jax
import jax.numpy as jnp
import numpy as np

from weft import nnx
from weft.config import REQUIRED, ConfigBase, InMemory, InstantiableConfig, config_for_function
from weft.core import flat_dict
from weft.errors import FitError, InputDatasetError, did_you_mean
from weft.hierarchy import Module, functional
from weft.input import ArrayInput, Arrays, Batches, Input, IterableInput, in_memory
from weft.input.grain import DispatchConfig, per_feed_batch, shard_dataset
from weft.interop.models import adapter_of, model_of
from weft.interop.nnx import NNXModel
from weft.metrics import Metric
from weft.report.display import make_display
from weft.report.recorder import error_console
from weft.trainer import compilation, evaler, mesh, parallelism, run_dir, state_builder, train_step
from weft.trainer.checkpointer import checkpointer, index, policy
from weft.trainer.hooks import INPUT_ENDED, Hook, check_hook
from weft.trainer.learner import Learner
from weft.trainer.model import LibraryModel, build_model
from weft.trainer.optimizers.algorithms import adam_optimizer, adamw_optimizer, sgd_optimizer
from weft.trainer.optimizers.base import TransformationLike, as_partitioned
from weft.trainer.optimizers.transformations import SCHEDULE_FREE
from weft.trainer.precision import Precision
from weft.trainer.summary_writer.files import JsonLinesWriter, read_json_lines
from weft.trainer.supervised import (
    ROW_WEIGHT,
    MetricLike,
    OutputFn,
    Supervised,
    compares_classes,
    metric_name,
)
from weft.trainer.trainer import SpmdTrainer

_BATCH_SIZE = 32
_FORMS = (
    "a pair of arrays (x, y), a dict of arrays, a Grain dataset, or an iterable of batches, each a "
    "pair or a dict"
)
_RENAMED = {"learner/optimizer/learning_rate": "learning_rate"}
VALIDATION = "validation"
M = TypeVar("M")
_Check = Callable[[str, dict[str, Any]], None]
"""Function that raises an error for arrays that do not fit; the text names them."""


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
        parts = {"train": self.train, "validation": self.validation}
        shown = (f"{k}={len(x['step'])} × ({', '.join(x)})" for k, x in parts.items() if x)
        return f"History({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class FitState:
    """State of a model after a step.

    Attributes:
        variables: Collections by name for Linen and NNX; the parameters of a hierarchy layer.
    """

    step: int
    variables: dict[str, Any] = dataclasses.field(repr=False)
    _trainer: SpmdTrainer = dataclasses.field(repr=False)

    def predict(self, inputs: Any) -> Any:
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
    def _predict(self) -> Any:
        def predict(variables: Any, inputs: Any) -> Any:
            model: Any = self._trainer.model
            call = {"method": "call_model", "is_training": False}
            return functional(model, jax.random.key(0), {"model": variables}, (inputs,), **call)[0]

        return jax.jit(predict)

    def update(self, model: Any) -> None:
        """Sets the variables of an NNX module to the values of this state.

        Raises LayerVariablesError if it is not a module with these variables.
        """
        adapter: Any = model_of(model)
        if not isinstance(adapter, NNXModel):
            raise FitError(
                f"update changes a module of NNX, but got a {type(model).__name__}; call the model "
                "with the `variables` of this state."
            )
        nnx = adapter.nnx
        paths = {tuple(map(str, path)): path for path in adapter.collections(model)}
        values = {paths.get(p, p): x for p, x in flat_dict.flatten_dict(self.variables).items()}
        updated, *_ = adapter.merge_values(flat_dict.unflatten_dict(values), {}, False)
        nnx.update(model, nnx.state(updated, lambda path, x: not isinstance(x, nnx.RngState)))


@dataclasses.dataclass(frozen=True)
class FitResult(Generic[M]):
    """Result of `fit`.

    Attributes:
        model: The model that was given. A module of NNX has the values of the last step.
        last: State after the last step.
        best: State with the smallest loss on the validation data; without any, the last one.
        config: Config of the `SpmdTrainer` that ran; its `dir` is missing if `fit` was given none.
    """

    model: M = dataclasses.field(repr=False)
    history: History
    last: FitState
    best: FitState
    config: SpmdTrainer.Config = dataclasses.field(repr=False)


def _result(model: M, cfg: Any, trainer: SpmdTrainer) -> FitResult[M]:
    """Returns the result of a run that has ended, reading its directory."""
    summaries = os.path.join(cfg.dir, "summaries")
    history = History(*(_series(os.path.join(summaries, x)) for x in ("train_train", VALIDATION)))
    last = FitState(trainer.step, _variables(trainer, trainer.model_params_for_eval()), trainer)
    step = _best_step(cfg, history)
    best = last
    if step not in (None, trainer.step):
        best = FitState(step, _variables(trainer, _read(cfg, trainer, step)), trainer)
    return FitResult(model, history, last, best, cfg)


def _series(directory: str) -> dict[str, np.ndarray]:
    if not os.path.exists(directory):
        return {}
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_json_lines(directory):
        reported: dict[str, Any] = record.get("values", {})
        values: dict[str, Any] = {
            _RENAMED.get(path, path.removeprefix("model/")): value
            for path, value in reported.items()
            if isinstance(value, int | float)
        }
        arrays: dict[str, Any] = record.get("arrays", {})
        for path, array in arrays.items():
            values[path.removeprefix("model/")] = array
        if values:
            by_step.setdefault(record["step"], {}).update(values)
    names = {name for values in by_step.values() for name in values if "/" not in name}
    columns: dict[str, np.ndarray] = {"step": np.array(list(by_step), int)}
    for name in sorted(names):
        column = [values.get(name, np.nan) for values in by_step.values()]
        # A metric without a value at a step has NaN there, in the shape of the others.
        shape = np.broadcast_shapes(*(np.shape(x) for x in column))
        columns[name] = np.stack([np.broadcast_to(x, shape) for x in column])
    return columns


def _best_step(cfg: ConfigBase, history: History) -> int | None:
    losses = history.validation.get("loss")
    if losses is None:
        return None
    saved = checkpointer.Checkpointer.checkpoint_steps(
        os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR)
    )
    known = dict(zip(history.validation["step"].tolist(), losses.tolist(), strict=True))
    best = min(((known[step], -step) for step in saved if step in known), default=None)
    return None if best is None else -best[1]


def _variables(trainer: SpmdTrainer, params: Any) -> Any:
    return params["model"] if isinstance(trainer.model, Supervised) else params


def _read(cfg: ConfigBase, trainer: SpmdTrainer, step: int) -> Any:
    """Returns the parameters for evaluation of a step that was saved."""
    averages = {k: x for k, x in trainer.trainer_state.learner.items() if k == "ema"}
    kept = {} if averages else trainer.trainer_state.model
    model, learner = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (kept, averages)
    )
    wanted = train_step.TrainerState(prng_key={}, model=model, learner=learner)
    reader = state_builder.TensorStoreStateStorageBuilder.default_config().set(
        name="best",
        base_dir=os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR),
        step=step,
        validation=index.CheckpointValidationType.CONTAINS_STATE,
    )
    with trainer.mesh():
        read = reader.instantiate(parent=None)(state_builder.Builder.State(0, wanted)).trainer_state
    return read.learner["ema"].ema if averages else read.model


@dataclasses.dataclass
class _Data:
    """Data that `fit` was given.

    Attributes:
        name: The argument of `fit`.
        values: The data, with fields by name.
        batch_size: Rows of a batch of arrays; None if the data has batches.
        num_batches: Number of batches of a pass; None if unknown.
        checks: What each batch has to pass; for arrays `check` checks all at once.
    """

    name: str
    values: Arrays | Batches
    batch_size: int | None
    num_batches: int | None
    checks: list[_Check]

    @property
    def fields(self) -> dict[str, Any]:
        """The arrays, or those of the first batch."""
        return self.values.value if isinstance(self.values, Arrays) else self.values.first

    def check(self, fn: _Check) -> None:
        """Checks the arrays, or the first batch now and the others when they are read."""
        self.checks.append(fn)
        fn(self.name, self.fields)

    def input_config(self, *, seed: int = 0, counts_rows: bool = False) -> Input.Config:
        """Returns the config of an input; `seed` is for the order of arrays in training.

        With `counts_rows`, rows that fill up the last batch of arrays have weight 0.
        """
        if isinstance(self.values, Batches):
            return IterableInput.default_config().set(batches=self.values)
        assert self.batch_size is not None, "arrays have one"
        arrays, padding = self.values, None
        if counts_rows:
            ones = np.ones(arrays.num_rows, np.float32)
            arrays, padding = Arrays({ROW_WEIGHT: ones, **arrays.value}), {ROW_WEIGHT: 0.0}
        return ArrayInput.default_config().set(
            arrays=arrays, global_batch_size=self.batch_size, seed=seed, padding=padding
        )


def _read_data(data: Any, name: str, batch_size: int | None) -> _Data:
    """Returns the data that `fit` was given as `name`; for errors see `fit`."""
    checks: list[_Check] = []
    if isinstance(data, Arrays | Mapping) or type(data) is tuple:
        arrays = data if isinstance(data, Arrays) else Arrays(_fields(data, name))
        size = batch_size or min(_BATCH_SIZE, arrays.num_rows)
        found = _Data(name, arrays, size, math.ceil(arrays.num_rows / size), checks)
    elif isinstance(data, grain.MapDataset | grain.IterDataset):
        if batch_size is not None:
            part = DispatchConfig(jax.process_index(), jax.process_count())
            data = data if jax.process_count() == 1 else shard_dataset(data, part)
            data = per_feed_batch(data, global_batch_size=batch_size, dispatch_config=part)
        batches = Batches(data.map(lambda batch: _batch(batch, name, checks)))
        found = _Data(name, batches, None, _length(data), checks)
    elif isinstance(data, Iterable) and not isinstance(data, str):
        if batch_size is not None:
            raise FitError(
                f"fit got batch_size={batch_size}, but {name} is a {type(data).__name__}, an "
                "iterable of batches, which have their sizes; leave batch_size out."
            )
        mapped = map if isinstance(data, Iterator) else _Mapped
        batches = Batches(mapped(lambda batch: _batch(batch, name, checks), data))
        found = _Data(name, batches, None, _length(data), checks)
    else:
        raise FitError(f"{name} is a {type(data).__name__}; expected {_FORMS}.")
    found.check(_check_finite)
    return found


def _length(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") else None


class _Mapped:
    """The results of a function for the items of an iterable, each time that it is iterated."""

    def __init__(self, fn: Callable[[Any], Any], data: Iterable[Any]):
        self._fn, self._data = fn, data

    def __iter__(self) -> Iterator[Any]:
        return map(self._fn, self._data)


def _fields(data: Any, name: str) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    if type(data) is not tuple or len(data) != 2:
        what = f"tuple of {len(data)}" if isinstance(data, tuple) else type(data).__name__
        raise InputDatasetError(
            f"{name} is a {what}; expected a pair (x, y) or a dict of arrays. All arrays together "
            "are a tuple, (x, y), not a list, which has batches."
        )
    return {"x": data[0], "y": data[1]}


def _batch(batch: Any, name: str, checks: list[_Check]) -> dict[str, Any]:
    fields = in_memory.checked_arrays(_fields(batch, f"a batch of {name}"))
    for check in checks:
        check(f"a batch of {name}", fields)
    return jax.tree.map(lambda x: x.astype(in_memory.batch_dtype(x), copy=False), fields)


def _check_finite(name: str, fields: dict[str, Any]) -> None:
    counts = np.asarray(fields.get(ROW_WEIGHT, True)) != 0
    for field, x in in_memory.named_leaves(fields).items():
        if np.issubdtype(x.dtype, np.inexact) and not np.isfinite(x).all():
            rows = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
            if field != ROW_WEIGHT and counts.shape in ((), rows.shape):
                rows &= counts
            if rows.any():
                raise InputDatasetError(
                    f"{name}: {field!r} has NaN or infinite numbers, the first in row "
                    f"{int(np.argmax(rows))}; drop or replace these rows."
                )
        if field == ROW_WEIGHT and (np.ndim(x) != 1 or np.min(x, initial=0) < 0):
            raise InputDatasetError(
                f"{name}: {field!r} has shape {np.shape(x)} and numbers from {np.min(x)}; expected "
                "the weight of each row, 0 or more. Or rename the field."
            )


NameOrFn = str | OutputFn
Data = Arrays | Mapping[str, Any] | Iterable[Any]
"""Arrays, a pair of them, a Grain dataset or batches."""

_ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
OPTIMIZERS: dict[str, Any] = {
    "adam": config_for_function(adam_optimizer).set(**_ADAM),
    "adamw": config_for_function(adamw_optimizer).set(**_ADAM, weight_decay=1e-4),
    "sgd": config_for_function(sgd_optimizer).set(decouple_weight_decay=False),
}
_TARGETS = ("y", "label", "labels", "target", "targets")
_LEARNING_RATE = 1e-3
_MESH: dict[str, Any] = {
    "mesh_shape": parallelism.mesh_shape_from_axes(data=-1),
    # The other axes are those that layouts of layers may name.
    "mesh_axis_names": parallelism.MESH_AXIS_NAMES,
}
_MAX_RECORDED_STEPS = 1000


@compilation.compilation_cache(None)
def fit(
    model: M,
    data: Data,
    loss: NameOrFn | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    validation: Data | None = None,
    metrics: MetricLike | Sequence[MetricLike] | Mapping[str, MetricLike] = (),
    optimizer: str | TransformationLike = "adam",
    learning_rate: float | Callable[[Any], Any] | InstantiableConfig[Any] | None = None,
    target: str | None = None,
    precision: str | Precision.Config | None = None,
    seed: int = 0,
    dir: str | None = None,
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
            that returns one number per row, a scalar or a `WeightedScalar`; or None if the model is
            called with the batch, a dict, and returns `(loss, aux)`. With a loss, it is called with
            the fields of the batch except the target: an array if there is one, else a dict.
        epochs, steps: Number of passes over the data, or of batches.
        batch_size: Rows of a batch over all devices; for arrays 32 by default.
        validation: Data in one of the same forms, evaluated after each epoch, or with `steps` ten
            times, and at the end. Rows that fill up the last batch do not count.
        metrics: "accuracy", "auc", "confusion_matrix", "f1", "perplexity", "precision", "recall",
            names of losses, metrics such as `weft.metrics.F1Score("macro")`, or functions like
            `loss`: a scalar has to be a mean over rows, if not use `AllRows`. A dict names them.
        optimizer: "adam", "adamw", "sgd", an optimizer of optax, or the config of one.
        learning_rate: Rate of a named optimizer, 0.001 by default, or a schedule.
        target: Field of the targets; by default y, label, labels, target or targets.
        precision: Policy for the dtypes in this run and in `FitState.predict`: "float32",
            "mixed_bfloat16", "bfloat16", "int8", "fp8", or a `Precision.Config`.
        seed: Seed of parameters, noise and the order of arrays.
        dir: Directory for checkpoints and the record of the run. A run whose directory has a
            checkpoint resumes. None keeps nothing on disk.
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
    _check_counts(epochs=epochs, steps=steps, batch_size=batch_size)
    train = _read_data(data, "data", batch_size)
    held_out = None if validation is None else _read_data(validation, "validation", batch_size)
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        seed=seed,
        model=_model_config(model, loss, _metrics(metrics), target, train),
        learner=Learner.default_config().set(optimizer=_optimizer(optimizer, learning_rate)),
        input=train.input_config(seed=seed),
        precision=precision,
        **_MESH,
    )
    _set_length(cfg, train, held_out, epochs, steps, is_kept=dir is not None)
    _set_average(cfg, optimizer)
    return _run(model, cfg, dir, progress, callbacks)


def _set_length(
    cfg: SpmdTrainer.Config,
    train: _Data,
    held_out: _Data | None,
    epochs: int | None,
    steps: int | None,
    *,
    is_kept: bool,
) -> None:
    """Sets the number of steps, and when to evaluate, save and record; checks the model."""
    per_epoch = train.num_batches
    if epochs is not None and per_epoch is None:
        raise FitError(
            f"fit got epochs={epochs}, but the number of batches of the data is unknown; set steps "
            "instead."
        )
    cfg.max_step = steps = steps or _steps(train, epochs or 1)
    cfg.summary_writer = JsonLinesWriter.default_config().set(
        write_every_n_steps=math.ceil(steps / _MAX_RECORDED_STEPS)
    )
    counts_rows = _check_model(cfg, train, held_out)
    every = per_epoch if epochs and per_epoch else math.ceil(steps / 10)
    if held_out is not None:
        _add_validation(cfg, held_out, every, counts_rows)
    elif not is_kept:
        every = steps  # no checkpoint but the last is of use
    cfg.checkpointer.save_policy = config_for_function(policy.every_n_steps_and_last_policy).set(
        n=every, max_step=steps
    )


def _run(
    model: M, cfg: SpmdTrainer.Config, dir: str | None, progress: bool, callbacks: Sequence[Hook]
) -> FitResult[M]:
    if dir is None and jax.process_count() > 1:
        raise FitError("fit got dir=None; several processes need a directory that they share.")
    hooks = [check_hook(hook, f"fit: callbacks[{i}]") for i, hook in enumerate(callbacks)]
    with contextlib.ExitStack() as stack:
        cfg.dir = dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-fit-"))
        trainer = cfg.clone().instantiate(parent=None)
        end = _End()
        display = make_display(error_console(), dir) if progress and dir is None else progress
        trainer.run(listener=[end, *hooks], progress=display)
        if trainer.trainer_state is None:
            raise FitError(f"fit was stopped by {end.reason} before the first step.")
        if end.reason == INPUT_ENDED:
            raise InputDatasetError(
                f"data ended after {trainer.step} of {cfg.max_step} steps; expected a batch for "
                "each. Pass an iterable that can be repeated, such as a list, or set fewer steps."
            )
        result = _result(model, cfg, trainer)
    if isinstance(_layer(model), InMemory) and isinstance(model_of(model), NNXModel):
        result.last.update(model)
    if dir is None:
        cfg.dir = REQUIRED
    return result


def _check_counts(*, epochs: int | None, steps: int | None, batch_size: int | None) -> None:
    if (epochs is None) == (steps is None):
        raise FitError(
            f"fit got epochs={epochs} and steps={steps}; expected one of the two, such as epochs=10"
        )
    for name, value in {"epochs": epochs, "steps": steps, "batch_size": batch_size}.items():
        if value is not None and value < 1:
            raise FitError(f"fit got {name}={value}; expected 1 or more.")


class _End(Hook):
    """Hook that keeps the reason why the run ended."""

    reason = ""

    def on_end(self, step: int, reason: str) -> None:
        self.reason = reason


def _steps(train: _Data, epochs: int) -> int:
    if isinstance(train.values, Arrays):  # a batch may have rows of two passes
        return math.ceil(epochs * train.values.num_rows / (train.batch_size or 1))
    return epochs * (train.num_batches or 1)


def _model_config(
    model: Any,
    loss: NameOrFn | None,
    metrics: dict[str, MetricLike],
    target: str | None,
    data: _Data,
) -> Any:
    layer = _layer(model)
    if loss is not None:
        cfg = Supervised.default_config().set(layer=layer, loss=loss, metrics=metrics)
        found = [name for name in _TARGETS if name in data.fields]
        return cfg.set(target=target or (found[0] if len(found) == 1 else None))
    if metrics or target:
        given = f"metrics={list(metrics)}" if metrics else f"target={target!r}"
        raise FitError(
            f"fit got {given} without a loss. A model that computes its own loss reports its "
            "metrics itself; leave them out, or set loss."
        )
    if isinstance(layer, Module.Config):
        return layer
    return LibraryModel.default_config().set(layer=layer)


def _layer(model: Any) -> Any:
    if isinstance(model, Module):
        return model.config
    if isinstance(model, type | InstantiableConfig) or adapter_of(model).endswith("LinenModel"):
        return model
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return InMemory(model, f"an object of type {name}{_structure(model)}")


def _structure(model: Any) -> str:
    """Returns a digest of an NNX object's attributes, with the shapes of its variables' values."""
    if not isinstance(model, nnx.Pytree):
        return ""
    graphdef, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), state)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(nnx.merge(graphdef, shapes)))
    return f" with structure {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _metrics(
    metrics: MetricLike | Sequence[MetricLike] | Mapping[str, MetricLike],
) -> dict[str, MetricLike]:
    """Returns the metrics by name; for errors see `fit`."""
    if isinstance(metrics, Mapping):
        by_name = dict(metrics)
    else:
        by_name = {}
        several: Any = metrics
        if isinstance(metrics, str) or not isinstance(metrics, Sequence):
            several = [metrics]
        for metric in several:
            name = metric_name(metric)
            if name in by_name:
                raise FitError(
                    f"fit got two metrics of the name {name!r}; name them: "
                    f"metrics={{{name!r}: …, {name + '_2'!r}: …}}."
                )
            by_name[name] = metric
    for metric in by_name.values():
        if not (isinstance(metric, str | Metric) or callable(metric)):
            raise FitError(
                f"fit got a metric of type {type(metric).__name__}; expected a name, a function of "
                "outputs and batch, or a metric of weft.metrics, such as weft.metrics.F1Score()."
            )
    return by_name


def _optimizer(optimizer: Any, learning_rate: Any) -> InstantiableConfig:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise FitError(
                f"there is no optimizer {optimizer!r}. {did_you_mean(optimizer, OPTIMIZERS)} "
                "Optimizers of optax can be passed as objects, such as optax.lion(1e-4)."
            )
        rate = _LEARNING_RATE if learning_rate is None else learning_rate
        return OPTIMIZERS[optimizer].clone(learning_rate=rate)
    if learning_rate is not None:
        raise FitError(
            f"fit got learning_rate={learning_rate!r} and an optimizer that has its own; set it "
            "there, or name the optimizer."
        )
    if isinstance(optimizer, InstantiableConfig):
        return optimizer
    return config_for_function(as_partitioned).set(transformation=optimizer)


def _set_average(cfg: SpmdTrainer.Config, optimizer: object) -> None:
    """Lets the learner keep the parameters that a schedule-free optimizer evaluates."""
    if isinstance(optimizer, str):
        return
    with jax.set_mesh(mesh.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names)):
        specs = build_model(cfg).create_parameter_specs_recursively()
    learner: Any = cfg.learner.clone(name="learner").instantiate(parent=None)
    if learner.is_schedule_free(specs):
        cfg.learner.ema.decay = SCHEDULE_FREE


def _check_model(cfg: Any, train: _Data, held_out: _Data | None) -> bool:
    """Checks data against the model; returns whether rows can be left out of loss and metrics."""
    if not isinstance(cfg.model, Supervised.Config):
        return False
    found: list[Any] = []

    def outputs_of(key: Any, batch: Any) -> Any:
        state = layer.initialize_parameters_recursively(key)
        call = {"method": "predict", "is_training": False}
        outputs, _ = functional(layer, key, state, (batch,), **call)
        found.append(layer.is_per_row(outputs, batch))
        return outputs

    spec = cfg.input.clone(name="input").instantiate(parent=None).element_spec()
    with jax.set_mesh(mesh.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names)):
        layer: Any = build_model(cfg)
        outputs = jax.eval_shape(outputs_of, jax.random.key(0), spec)
    if held_out is not None:
        layer.check_means(_any_values(outputs), _first_rows(train, spec))
    target, compared = cfg.model.target, [cfg.model.loss, *cfg.model.metrics.values()]
    of_classes = [metric_name(x) for x in compared if compares_classes(x)]
    if target is not None and hasattr(outputs, "shape"):
        is_label = len(outputs.shape) > len(spec[target].shape)
        if of_classes and is_label:
            limit, what = outputs.shape[-1] - 1, f"the model has {outputs.shape[-1]} outputs"
        elif "binary_cross_entropy" in compared:
            limit, what = 1, "binary_cross_entropy takes probabilities"
        elif of_classes and of_classes != ["accuracy"]:
            limit, what = 1, f"{of_classes[-1]} takes classes 0 and 1 or probabilities"
        else:
            return found[-1]
        for data in filter(None, (train, held_out)):
            data.check(functools.partial(_check_range, target, limit, what))
    return found[-1]


def _any_values(spec: Any) -> Any:
    """Returns outputs of these shapes with values of no pattern, to try a metric on."""
    rng = np.random.default_rng(0)

    def values(x: jax.ShapeDtypeStruct) -> Any:
        numbers = rng.normal(size=x.shape)
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.asarray(numbers if is_float else numbers > 0, x.dtype)

    return jax.tree.map(values, spec)


def _first_rows(data: _Data, spec: Any) -> Any:
    """Returns the first rows of the data as a batch, repeated if there are too few."""

    def rows(x: np.ndarray, like: jax.ShapeDtypeStruct) -> Any:
        index = np.arange(like.shape[0]) % len(x)
        return jnp.asarray(np.asarray(x)[index], like.dtype)

    return jax.tree.map(rows, {name: data.fields[name] for name in spec}, dict(spec))


def _check_range(target: str, limit: int, what: str, name: str, fields: dict[str, Any]) -> None:
    values = fields[target]
    if values.min() < 0 or values.max() > limit:
        raise InputDatasetError(
            f"{name}: {target!r} has values from {values.min()} to {values.max()}, and {what}; "
            f"expected 0 to {limit}."
        )


def _add_validation(cfg: Any, data: _Data, every: int, counts_rows: bool) -> None:
    if isinstance(data.values, Arrays) and not counts_rows:
        last = data.values.num_rows % (data.batch_size or 1)
        if last % jax.device_count():
            raise FitError(
                f"validation has {data.values.num_rows} rows: the last batch has {last}, which do "
                f"not divide over {jax.device_count()} devices, and cannot be filled up, because "
                "the loss is a scalar. Return one number per row, or choose a "
                "batch_size or a number of rows that divides."
            )
    elif isinstance(data.values, Batches) and data.values.is_iterator:
        raise FitError(
            "validation is an iterator, which comes once, and is evaluated several times; pass a "
            "list of its batches."
        )
    cfg.evalers = {
        VALIDATION: evaler.SpmdEvaler.default_config().set(
            input=data.input_config(counts_rows=counts_rows),
            eval_policy=config_for_function(evaler.every_n_steps_policy).set(
                n=every, max_step=cfg.max_step
            ),
            summary_writer=JsonLinesWriter.default_config(),
        )
    }
    cfg.checkpointer.keep_best = policy.KeepBest.default_config().set(
        metric=policy.EvalMetric(VALIDATION, "loss"), mode="min"
    )
