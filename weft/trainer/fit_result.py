"""Result of `fit`: the history of the run, and the model after its last and its best step."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
)

import jax.numpy as jnp
import numpy as np

from weft import functional
from weft.config import InstantiableConfig
from weft.errors import FitError
from weft.hierarchy import Module
from weft.interop.models import model_of
from weft.interop.nnx import NNXModel
from weft.report import plots
from weft.trainer.checkpointer.policy import EvalMetric, KeepBest
from weft.trainer.model import LibraryModel
from weft.trainer.saved_params import best_step, read_params
from weft.trainer.summary_writer.files import read_json_lines
from weft.trainer.supervised import Supervised
from weft.trainer.trained_model import ModelSource, TrainedModel, trained_model
from weft.trainer.trainer import SpmdTrainer
from weft.typing import PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALIDATION = "validation"
"""Name of the evaler of `fit`."""
Mode = Literal["min", "max"]
M = TypeVar("M")


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
        for name, columns in {
            "train": self.train,
            "validation": self.validation,
        }.items():
            if columns:
                parts.append(
                    f"{name}={len(columns['step'])} × ({', '.join(columns)})"
                )
        return f"History({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class FitResult(Generic[M]):
    """Result of `fit`.

    Attributes:
        model: The model that was given. A module of NNX has the values of the last step.
        history: Losses and metrics by step, of the training and of the evaluations.
        last: State after the last step.
        best: State with the smallest loss on the validation data, or the best value of the argument
            `best`; without validation data, the last one.
        config: Config of the `SpmdTrainer` that ran; its `dir` is missing if `fit` was given none.
    """

    model: M = dataclasses.field(repr=False)
    history: History
    last: TrainedModel[M]
    best: TrainedModel[M]
    config: SpmdTrainer.Config = dataclasses.field(repr=False)

    def plot(self) -> "Figure":
        """Draws the history: loss, metrics and learning rate by step, in a panel each.

        A notebook shows the figure; elsewhere, `result.plot().savefig("history.png")` writes it.

        Raises:
            MissingExtraError: if Matplotlib is not installed.
        """
        return plots.history_figure(self.history.train, self.history.validation)

    def confusion_matrix(
        self,
        data: tuple[PyTree, np.ndarray] | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> "Figure":
        """Draws how often each class is taken for each other one, by the best state.

        Args:
            data: inputs of the model and the labels of their rows, of shape (rows,). If None, the
                evaluation of the best state, which needs the metric `"confusion_matrix"`.
            names: names of the classes; their numbers if None.

        Raises:
            FitError: if there is neither data nor an evaluation with the metric, or the model's
                outputs are not scores of classes, of shape (rows, classes).
            ArgumentValueError: if there are not as many names as classes.
            MissingExtraError: if Matplotlib is not installed.
        """
        if data is None:
            matrix = self._evaluated_confusion_matrix()
        else:
            inputs, labels = data
            matrix = _confusion_matrix(self.best.predict(inputs), labels)
        return plots.confusion_figure(matrix, names)

    def _evaluated_confusion_matrix(self) -> np.ndarray:
        matrices = self.history.validation.get("confusion_matrix")
        if matrices is None:
            raise FitError(
                "there is no confusion matrix of the validation data: pass inputs and labels, "
                'or call fit with metrics=[..., "confusion_matrix"].'
            )
        steps = self.history.validation["step"]
        # The best step may come from before a change of the metrics; the newest is the last row.
        rows = np.flatnonzero(steps == self.best.step)
        row = rows[-1] if len(rows) else -1
        return matrices[row]


def _confusion_matrix(scores: PyTree, labels: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores)
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise FitError(
            f"a confusion matrix is of a model whose outputs are scores of classes, of shape "
            f"(rows, classes); these have the shape {scores.shape}."
        )
    matrix = functional.confusion_matrix(
        jnp.asarray(labels),
        jnp.asarray(scores.argmax(axis=-1)),
        num_classes=scores.shape[1],
    )
    return np.asarray(matrix)


class Watched(NamedTuple):
    """Number of the evaluations by which the best state is chosen."""

    metric: str
    mode: Mode

    @property
    def path(self) -> EvalMetric:
        """Its place among the summaries of the evaluations."""
        return EvalMetric(VALIDATION, self.metric)

    @property
    def keep_best(self) -> KeepBest.Config:
        """The rule of a checkpointer that keeps the best state."""
        return KeepBest.default_config().set(metric=self.path, mode=self.mode)


def result_of(
    model: M, cfg: SpmdTrainer.Config, trainer: SpmdTrainer, watched: Watched
) -> FitResult[M]:
    """Returns the result of a run that has ended, reading its directory."""
    history = History(
        train=_read_series(cfg.dir, "train_train"),
        validation=_read_series(cfg.dir, VALIDATION),
    )
    last_params = trainer.model_params_for_eval()
    # The last state is in memory; only another one is read from its checkpoint.
    last = _model_of_step(trainer, trainer.step, last_params)
    if _is_updated_in_place(model):
        last.update(model)
        last = dataclasses.replace(last, model=model)
    last = best = _with_value(last, watched, history)
    step = None
    if cfg.checkpointer.keep_best is not None:
        step = best_step(cfg.dir, watched.keep_best)
    if step is not None and step != trainer.step:
        best_params = read_params(cfg.dir, step, like=last_params).params
        best = _model_of_step(trainer, step, best_params)
        best = _with_value(best, watched, history)
    return FitResult(model, history, last, best, cfg)


def _with_value(
    trained: TrainedModel[Any], watched: Watched, history: History
) -> TrainedModel[Any]:
    """Returns the same with the number by which the best step is chosen."""
    values = history.validation.get(watched.metric)
    if values is None:
        return trained
    rows = np.flatnonzero(history.validation["step"] == trained.step)
    value = float(values[rows[-1]]) if len(rows) else None
    return dataclasses.replace(trained, metric=watched.metric, value=value)


def _model_of_step(
    trainer: SpmdTrainer, step: int, params: PyTree
) -> TrainedModel[Any]:
    layer, cfg = trainer.model, trainer.config
    batch = None
    if isinstance(layer, Supervised):
        batch = layer.config.batch_spec
        params = params["model"]
    elif isinstance(layer, LibraryModel):
        (batch,) = layer.config.inputs
    source = ModelSource(cfg.model, batch, cfg.precision)
    return trained_model(source, step, params)


def _is_updated_in_place(model: object) -> bool:
    if isinstance(model, type | InstantiableConfig | Module):
        return False
    return isinstance(model_of(model), NNXModel)


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
        column = [
            values.get(name, np.nan) for values in values_by_step.values()
        ]
        # A metric without a value at a step has NaN there, in the shape of the others.
        shape = np.broadcast_shapes(*(np.shape(x) for x in column))
        columns[name] = np.stack([np.broadcast_to(x, shape) for x in column])
    return columns


def _column_name(summary_path: str) -> str:
    if summary_path == "learner/optimizer/learning_rate":
        return "learning_rate"
    return summary_path.removeprefix("model/")
