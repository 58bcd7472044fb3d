"""`weft.load`: the model of a run with its weights, from the directory of the run.

The config of the run says which model it was, and the checkpoints have the values. Only the parts
of the config that make the model are read, so that neither data nor an optimizer is needed, and
code runs under the same rule as for commands: a text names what is listed, and what a recipe has
defined if this user has signed the record of the run.
"""

import ast
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from weft.config import InMemory, apply_overrides, from_text
from weft.config.text_parser import read_value
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.errors import ConfigError, ModelLoadError
from weft.hierarchy import Module
from weft.interop.models import check_variables, model_of
from weft.interop.nnx import NNXModel
from weft.recipes import recorded_recipe
from weft.trainer import record_signature, run_dir
from weft.trainer.checkpointer.policy import KeepBest
from weft.trainer.model_layer import layer_of
from weft.trainer.saved_params import best_step, read_params
from weft.trainer.supervised import Supervised
from weft.trainer.trained_model import (
    ModelSource,
    TrainedModel,
    recorded_batch,
    trained_model,
)

logger = logging.getLogger(__name__)

M = TypeVar("M")
Step = int | Literal["best", "last"]


@overload
def load(
    dir: str | os.PathLike[str], model: M, *, step: Step = "last"
) -> TrainedModel[M]: ...
@overload
def load(
    dir: str | os.PathLike[str], model: None = None, *, step: Step = "last"
) -> TrainedModel[Any]: ...
def load(
    dir: str | os.PathLike[str],
    model: object = None,
    *,
    step: Step = "last",
) -> TrainedModel[Any]:
    """Loads the model of a run with its weights, without the data and the optimizer.

    Args:
        dir: Directory of a run of `weft.fit`, `weft train` or an `SpmdTrainer`.
        model: The untrained model, made as for the training. Needed if the config of the run cannot
            name it, such as an object of NNX that was passed to `fit`, which gets the weights.
        step: "last"; "best", that with the best value in an evaluation, as the run's config says;
            or the number of a step that was saved.

    Raises:
        ModelLoadError: If the directory has no run, its config cannot make the model, or no saved
            step is known to be the best.
        LayerVariablesError: If `model` has other variables than the run.
        CheckpointNotFoundError: If nothing was saved, or not this step.
        RecipeError: If the recipe of the run has moved.

    >>> import tempfile
    >>> import weft
    >>> from weft import linen as nn
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> runs = tempfile.mkdtemp()
    >>> _ = weft.fit(nn.Dense(1), (x, 2 * x), "mse", steps=200, learning_rate=0.1, dir=runs,
    ...     progress=False)
    >>> weft.load(runs).predict(np.ones((1, 1))).round(1)
    array([[2.]], dtype=float32)
    """
    directory = os.fspath(dir)
    if not os.path.isdir(directory):
        raise ModelLoadError(
            f"{directory!r} is not a directory. Name the directory of a run, its `dir`."
        )
    run_dir.check_places(directory)
    text = _config_text(directory)
    source = _model_source(directory, text, model)
    saved = read_params(directory, _number_of_step(step, directory, text))
    variables: Any = saved.params
    if isinstance(source.config, Supervised.Config):
        variables = variables.get("model", {})
    trained = trained_model(source, saved.step, variables)
    if isinstance(trained.model, Module):
        complete = _with_all_layers(trained.model, variables)
        return dataclasses.replace(trained, variables=complete)
    if model is not None and _is_object_of_nnx(model):
        trained.update(model)
        return dataclasses.replace(trained, model=model)
    return trained


def _is_object_of_nnx(model: object) -> bool:
    adapter = model_of(model)
    return isinstance(adapter, NNXModel) and isinstance(
        layer_of(model), InMemory
    )


def _with_all_layers(layer: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a layer, with an entry for layers that have none."""
    specs = layer.create_parameter_specs_recursively()
    values = flatten_dict(variables)
    check_variables(type(layer).__name__, flatten_dict(specs), values)
    return unflatten_dict(
        {
            path: values.get(path, spec)
            for path, spec in flatten_dict(specs, keep_empty_nodes=True).items()
        }
    )


def _config_text(directory: str) -> str:
    try:
        return run_dir.read_config(directory)
    except FileNotFoundError:
        raise ModelLoadError(
            f"{directory!r} has no run in it: there is no {run_dir.CONFIG_FILE}. Name the "
            "directory of a run, its `dir`."
        ) from None


def _number_of_step(step: Step, directory: str, text: str) -> int | None:
    """Returns the number of a step; None for the last one."""
    if step == "last":
        return None
    if step == "best":
        return _best_step(directory, text)
    if isinstance(step, bool) or not isinstance(step, int):
        raise ModelLoadError(
            f"step={step!r}; expected 'last', 'best' or the number of a step."
        )
    return step


def best_step_of_run(directory: str) -> int:
    """Returns the saved step of a run with the best value in an evaluation, as its config says.

    Raises ModelLoadError if the config does not say which is best, or none was evaluated.
    """
    return _best_step(directory, _config_text(directory))


def _best_step(directory: str, text: str) -> int:
    """Returns the saved step with the best value, by the rule that the config keeps it by."""
    checkpointer = _keywords(_keywords(text).get("checkpointer", ""))
    keep_best: Any = read_value(
        checkpointer.get("keep_best", "None"),
        allow=("weft.trainer.EvalMetric",),
        source=run_dir.CONFIG_FILE,
    )
    if not isinstance(keep_best, KeepBest.Config):
        raise ModelLoadError(
            f"the run in {directory!r} does not say which step is best: its checkpointer has no "
            "keep_best, which weft.fit sets if there is validation data. Take the last step."
        )
    step = best_step(directory, keep_best)
    if step is None:
        raise ModelLoadError(
            f"no saved step of the run in {directory!r} has a value of "
            f"{keep_best.metric.metric_name!r} of {keep_best.metric.evaler_name!r}. Evaluate and "
            "save at the same steps, or take the last step."
        )
    return step


def _keywords(text: str) -> dict[str, str]:
    try:
        return run_dir.keyword_texts(text)
    except ValueError as error:
        raise ModelLoadError(
            f"the {run_dir.CONFIG_FILE} of the run cannot be read: {error}"
        ) from None


# The model.

_WRAPPERS = (
    "weft.trainer.Supervised.Config(",
    "weft.trainer.LibraryModel.Config(",
)


def _model_source(directory: str, text: str, model: object) -> ModelSource:
    fields = _keywords(text)
    expression = _expression(fields.get("model", "None"))
    is_wrapped = ast.unparse(expression).startswith(_WRAPPERS)
    layer: ast.expr | None = expression
    if is_wrapped and isinstance(expression, ast.Call):
        # Of a loss, which may be any function, nothing is needed.
        layer = _without(expression, "loss", "metrics", "batch_spec").get(
            "layer"
        )
        if model is not None:
            _without(expression, "layer")
    description = _unreadable_text(layer)
    if model is not None:
        _warn_of_other_model(description, model)
        if not is_wrapped:
            expression = _expression("weft.trainer.LibraryModel.Config()")
    elif description is not None:
        raise ModelLoadError(
            f"the model of the run in {directory!r} is {description}, which only a program can "
            f"make. Make it as for the training, and pass it: weft.load({directory!r}, model)"
        )
    model_text = ast.unparse(_WithoutInitializers().visit(expression))
    precision = fields.get("precision", "None")
    part = f"weft.trainer.SpmdTrainer.Config(model={model_text}, precision={precision})"
    cfg = _read_part(directory, text, part)
    model_cfg: Any = cfg.model
    if isinstance(model_cfg, Supervised.Config):
        model_cfg = model_cfg.clone(loss=_no_loss, metrics={})
    source = ModelSource(model_cfg, _batch(directory), cfg.precision)
    if model is None:
        return source
    return source.with_layer(layer_of(model))


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ModelLoadError(
            f"the {run_dir.CONFIG_FILE} of the run cannot be read: {error}"
        ) from None


def _without(call: ast.Call, *names: str) -> dict[str, ast.expr]:
    """Removes keywords from a call; returns the values of all that it had."""
    values: dict[str, ast.expr] = {}
    for keyword in list(call.keywords):
        values[str(keyword.arg)] = keyword.value
        if keyword.arg in names:
            call.keywords.remove(keyword)
    return values


def _unreadable_text(node: ast.expr | None) -> str | None:
    """Returns the description of a value that has no text, or of an object of a class without."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Call):
        return _unreadable_text(node.func)
    is_unreadable = (
        isinstance(node.func, ast.Name) and node.func.id == "unreadable"
    )
    if not is_unreadable or not node.args:
        return None
    return str(getattr(node.args[0], "value", ""))


class _WithoutInitializers(ast.NodeTransformer):
    """Removes initializers without a text: the values that they would make are not used."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        for keyword in list(node.keywords):
            is_initializer = (keyword.arg or "").endswith(
                ("init", "initializer")
            )
            if is_initializer and _unreadable_text(keyword.value) is not None:
                node.keywords.remove(keyword)
        return node


def _no_loss(outputs: object, batch: object) -> object:
    del outputs, batch
    raise ModelLoadError("a model that was loaded has no loss.")


def _warn_of_other_model(trained: str | None, model: object) -> None:
    """Warns if an object is not described as that of the training was."""
    layer = layer_of(model)
    if trained is None or not isinstance(layer, InMemory):
        return
    if trained != layer.description:
        logger.warning(
            "The model that was trained is %s, and the one to load into is %s: their variables "
            "are the same, but other attributes may differ.",
            trained,
            layer.description,
        )


def _batch(directory: str) -> Any:
    """Returns the shapes of a batch of the run; None if it did not record them."""
    records = run_dir.surviving_record(directory).get("batch")
    if records is None:
        return None
    try:
        return recorded_batch(records)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the batch in {run_dir.RECORD_FILE} of {directory!r} is damaged: {error}"
        ) from None


def _read_part(directory: str, text: str, part: str) -> Any:
    """Reads a part of the text of a config, with the recipe that made it where it needs one.

    The recipe makes the config again if the part has values without a name, such as lambdas.
    """
    source = os.path.join(directory, run_dir.CONFIG_FILE)
    try:
        return from_text(part, source=source)
    except ConfigError as error:
        problem = error
    advice = f"Or pass the model, untrained: weft.load({directory!r}, model)"
    record = run_dir.surviving_record(directory).get("recipe")
    if record is None:
        raise ModelLoadError(f"{problem}\n{advice}") from None
    if not record_signature.is_signed(record, text):
        raise ModelLoadError(
            f"{problem}\nThe run was made by {record.get('name')}, but not by you on this machine, "
            "or its files have been changed, so its code is not imported. If you trust it, pass "
            f"the model: weft.load({directory!r}, model)"
        ) from None
    if record["function"].startswith("__main__:"):
        packages: Sequence[str] = ("__main__",)
    else:
        recipe = recorded_recipe(record)
        packages = recipe.packages()
    try:
        return from_text(part, source=source, allow=packages)
    except ConfigError as error:
        if record["words"] is None:
            raise ModelLoadError(f"{error}\n{advice}") from None
        problem = error
    config, overrides = recipe.config(record["words"])
    config = apply_overrides(config, overrides, allow=packages)
    changes = run_dir.changes_of_run(directory, config.set(dir=directory))
    if changes:
        raise ModelLoadError(
            f"{problem}\n{recipe.name} cannot replace the text, because it makes another config "
            f"now:\n" + "\n".join(f"  {change}" for change in changes)
        )
    return config
