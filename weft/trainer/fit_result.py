"""Result of `fit`: the history of a run, and its last and best states."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from weft.config import ConfigBase
from weft.errors import FitError
from weft.hierarchy.module import functional
from weft.interop.models import model_of
from weft.interop.nnx import NNXModel
from weft.trainer.checkpointer.checkpointer import Checkpointer
from weft.trainer.checkpointer.index import CheckpointValidationType
from weft.trainer.run_dir import CHECKPOINTS_DIR
from weft.trainer.state import with_shardings
from weft.trainer.state_builder import Builder, TensorStoreStateStorageBuilder
from weft.trainer.summary_writer.files import read_json_lines
from weft.trainer.supervised import Supervised
from weft.trainer.train_step import TrainerState
from weft.trainer.trainer import SpmdTrainer
from weft.traverse_util import flatten_dict, unflatten_dict

M = TypeVar("M")
VALIDATION = "validation"
_RENAMED = {"learner/optimizer/learning_rate": "learning_rate"}


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
            key, state = jax.random.key(0), {"model": variables}
            return functional(model, key, state, (inputs,), method="call_model", is_training=False)[
                0
            ]

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
        values = {paths.get(p, p): x for p, x in flatten_dict(self.variables).items()}
        updated, *_ = adapter.merge_values(unflatten_dict(values), {}, False)
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


def fit_result(model: M, cfg: Any, trainer: SpmdTrainer) -> FitResult[M]:
    """Returns the result of a run that has ended, reading its directory."""
    summaries = os.path.join(cfg.dir, "summaries")
    history = History(*(_series(os.path.join(summaries, x)) for x in ("train_train", VALIDATION)))
    last = FitState(trainer.step, _variables(trainer, trainer.trainer_state), trainer)
    step = _best_step(cfg, history)
    best = last
    if step not in (None, trainer.step):
        best = FitState(step, _variables(trainer, _read(cfg, trainer, step)), trainer)
    return FitResult(model, history, last, best, cfg)


def _series(directory: str) -> dict[str, np.ndarray]:
    if not os.path.exists(directory):
        return {}
    by_step: dict[int, dict[str, float]] = {}
    for record in read_json_lines(directory):
        values = {_RENAMED.get(k, k.removeprefix("model/")): v for k, v in _numbers(record)}
        if values:
            by_step.setdefault(record["step"], {}).update(values)
    names = {name for values in by_step.values() for name in values if "/" not in name}
    columns = {
        name: np.array([values.get(name, np.nan) for values in by_step.values()])
        for name in sorted(names)
    }
    return {"step": np.array(list(by_step), int), **columns}


def _numbers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(k, v) for k, v in record.get("values", {}).items() if isinstance(v, int | float)]


def _best_step(cfg: ConfigBase, history: History) -> int | None:
    losses = history.validation.get("loss")
    if losses is None:
        return None
    saved = Checkpointer.checkpoint_steps(os.path.join(cfg.dir, CHECKPOINTS_DIR))
    known = dict(zip(history.validation["step"].tolist(), losses.tolist(), strict=True))
    best = min(((known[step], -step) for step in saved if step in known), default=None)
    return None if best is None else -best[1]


def _variables(trainer: SpmdTrainer, state: TrainerState) -> Any:
    is_inside = isinstance(trainer.model, Supervised)
    return state.model["model"] if is_inside else state.model


def _read(cfg: ConfigBase, trainer: SpmdTrainer, step: int) -> TrainerState:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trainer.trainer_state)
    layouts = jax.tree.map(lambda x: x.sharding, trainer.trainer_state)
    wanted = with_shardings(shapes, layouts)._replace(prng_key={}, learner={})
    reader = TensorStoreStateStorageBuilder.default_config().set(
        name="best",
        base_dir=os.path.join(cfg.dir, CHECKPOINTS_DIR),
        step=step,
        validation=CheckpointValidationType.CONTAINS_STATE,
    )
    with trainer.mesh():
        return reader.instantiate(parent=None)(Builder.State(0, wanted)).trainer_state
