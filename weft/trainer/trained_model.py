"""Model with the values of a step, of a run that has ended or of a directory.

The model is called as in the run: by the layer that the trainer makes of it, in evaluation mode,
with the run's precision. What is needed besides the values is what such a layer follows from:

    layer of the trainer = model of the config + shapes of a batch + precision
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from weft import errors
from weft.config import InMemory
from weft.core import flat_dict
from weft.hierarchy import Module, functional
from weft.hierarchy.module import get_public_method
from weft.input import Input
from weft.interop.models import model_of
from weft.interop.nnx import NNXModel
from weft.serialization.untrusted import is_possible_shape
from weft.trainer.model import LibraryModel, makes_a_layer, model_config
from weft.trainer.precision import Precision
from weft.trainer.supervised import Supervised, no_method_error
from weft.typing import PyTree, Tensor, has_shape_dtype

M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Parts from which the trainer makes its layer.

    Attributes:
        config: Field `model` of the trainer's config.
        batch: Shapes of a batch; None if they are unknown, and follow from the inputs.
        precision: Field `precision` of the trainer's config.
    """

    config: Any
    batch: PyTree | None
    precision: str | Precision.Config | None

    @property
    def layer(self) -> Any:
        """The user's model: a module, or the config of one."""
        layer = self.config
        if isinstance(layer, Supervised.Config | LibraryModel.Config):
            layer = layer.layer
        if isinstance(layer, InMemory):
            return layer.value
        return layer

    def with_layer(self, layer: object) -> "ModelSource":
        """Returns the same with another model in the place of the user's."""
        cfg = self.config
        if isinstance(cfg, Supervised.Config | LibraryModel.Config):
            cfg = cfg.clone(layer=layer)
        elif isinstance(layer, Module.Config):
            cfg = layer
        else:
            cfg = LibraryModel.default_config().set(layer=layer)
        return dataclasses.replace(self, config=cfg)

    def make_layer(self, inputs: Sequence[PyTree]) -> Any:
        """Returns the trainer's layer; `inputs` of the model are used if no batch is known."""
        cfg = model_config(
            self.config, lambda: self._batch_spec(inputs), self.precision
        )
        return cfg.set(name="model").instantiate(parent=None)

    def _batch_spec(self, inputs: Sequence[PyTree]) -> PyTree:
        if self.batch is not None:
            return self.batch
        spec = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                jax.numpy.shape(x), jax.numpy.result_type(x)
            ),
            inputs[0],
        )
        if not isinstance(self.config, Supervised.Config):
            return spec
        # The field of the inputs may have any name but that of the target.
        target = self.config.target
        if target is None:
            return {"inputs": spec}
        return {f"inputs of {target}": spec, target: spec}


@dataclasses.dataclass(frozen=True)
class TrainedModel(Generic[M]):
    """Model with the values of a step of its training.

    Attributes:
        model: The model. A module of NNX has these values; a module of Linen or a layer of the
            hierarchy is called with `variables`.
        step: The step.
        variables: Collections by name for Linen and NNX; the parameters of a hierarchy layer.
        metric: Number of the evaluations by which the best step is chosen, such as "loss"; None
            without evaluations.
        value: Its value in the evaluation at this step; None if there was none.
    """

    model: M = dataclasses.field(repr=False)
    step: int
    variables: dict[str, Any] = dataclasses.field(repr=False)
    _source: ModelSource = dataclasses.field(repr=False, kw_only=True)
    metric: str | None = None
    value: float | None = None

    def __repr__(self) -> str:
        text = f"step={self.step}"
        if self.metric is not None and self.value is not None:
            text += f", {self.metric}={self.value:.4g}"
        return f"{type(self).__name__}({text})"

    def predict(self, inputs: PyTree) -> PyTree:
        """Returns the model's outputs for its inputs as NumPy arrays, in evaluation mode.

        A model that computes its own loss is called by its method `predict`, with a batch.

        Raises LayerMethodError if such a model has no such method; use `apply`.
        """
        return jax.device_get(self._predict(self.variables, inputs))

    @functools.cached_property
    def _predict(self) -> Callable[[PyTree, PyTree], PyTree]:
        def predict(variables: PyTree, inputs: PyTree) -> PyTree:
            layer = self._source.make_layer((inputs,))
            if isinstance(layer, Supervised):
                return _call(layer, variables, (inputs,), "call_model")
            has_method = get_public_method(layer, "predict") is not None
            if isinstance(layer, LibraryModel):
                has_method = layer.predicts
            if not has_method:
                raise errors.LayerMethodError(
                    "predict is for models that were given a loss, or have a method `predict` of "
                    "a batch; this one computes its own loss, and has none. Call it with a batch: "
                    "apply(batch)."
                )
            return _call(layer, variables, (inputs,), "predict")

        return jax.jit(predict)

    def apply(
        self,
        *args: Any,
        method: str | None = None,
        prng_key: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the model, or one of its methods, in evaluation mode.

        The result is a pure function of the arguments, for `jax.jit`, `jax.grad` and the like.

        Args:
            method: Name of a public method; None for a call of the model itself.
            prng_key: Key for what the call draws; None for the key of seed 0.

        Raises LayerMethodError if the model has no such method.
        """
        layer = self._source.make_layer(args)
        if isinstance(layer, Supervised | LibraryModel):
            inputs = {"args": args, "kwargs": kwargs, "method": method}
            return _call(layer, self.variables, inputs, "apply_model", prng_key)
        function = get_public_method(layer, method or "forward")
        if function is None:
            raise no_method_error(layer, method)
        inputs = inspect.signature(function).bind(*args, **kwargs).arguments
        return _call(
            layer, self.variables, inputs, method or "forward", prng_key
        )

    def layer(self, *inputs: PyTree) -> Module:
        """Returns the trainer's layer of the model, which is called with batches.

        Args:
            *inputs: A batch, or its shapes; used if the training has recorded none.
        """
        return self._source.make_layer(inputs)

    def update(self, model: object) -> None:
        """Sets the variables of an NNX module to the values of this state.

        Raises LayerVariablesError if it is not a module with these variables.
        """
        adapter: Any = model_of(model)
        if not isinstance(adapter, NNXModel):
            raise errors.FitError(
                f"update changes a module of NNX, but got a {type(model).__name__}; call the model "
                "with the `variables` of this state."
            )
        put_values(adapter, model, self.variables)


def _call(
    layer: Module,
    variables: PyTree,
    inputs: Any,
    method: str,
    prng_key: Tensor | None = None,
) -> Any:
    if prng_key is None:
        prng_key = jax.random.key(0)
    state = variables
    if isinstance(layer, Supervised):
        state = {"model": variables}
    outputs, _ = functional(
        layer, prng_key, state, inputs, method=method, is_training=False
    )
    return outputs


def trained_model(
    source: ModelSource, step: int, variables: Mapping[str, Any]
) -> TrainedModel[Any]:
    """Returns a model with these values; one of NNX is a new module."""
    layer = source.layer
    if isinstance(layer, Module.Config) or makes_a_layer(layer):
        model = layer.clone(name="model").instantiate(parent=None)
    else:
        adapter = model_of(layer)
        model = getattr(adapter, "module", layer)
        if isinstance(adapter, NNXModel):
            model = adapter.make({"default": jax.random.key(0)})
            put_values(adapter, model, variables)
    return TrainedModel(model, step, dict(variables), _source=source)


def put_values(
    adapter: NNXModel, module: Any, variables: Mapping[str, Any]
) -> None:
    """Sets the variables of an NNX module; raises LayerVariablesError if they are others."""
    nnx: Any = adapter.nnx  # Weft's or Flax's
    # Variables of a run have paths of texts; those of a module may have indices.
    model_paths = {
        tuple(map(str, path)): path for path in adapter.collections(module)
    }
    values: dict[Any, Any] = {}
    for path, value in flat_dict.flatten_dict(variables).items():
        values[model_paths.get(path, path)] = value
    updated, *_ = adapter.merge_values(
        flat_dict.unflatten_dict(values), {}, False
    )
    nnx.update(
        module,
        nnx.state(updated, lambda path, x: not isinstance(x, nnx.RngState)),
    )


def batch_record(layer: object, data: Input) -> list[dict[str, Any]] | None:
    """Returns the shapes of the batch that a trainer's layer was made for, as JSON values.

    None for a layer that does not depend on it if a config can name the data, and for a batch other
    than nested dicts.
    """
    # Grain, which they import, takes half a second.
    from weft.input import ArrayInput, IterableInput

    batch: Any = None
    if isinstance(layer, Supervised):
        batch = layer.config.batch_spec
    elif isinstance(layer, LibraryModel):
        (batch,) = layer.config.inputs
    elif isinstance(data, ArrayInput | IterableInput):
        batch = data.element_spec()
    if not isinstance(batch, Mapping):
        return None
    records: list[dict[str, Any]] = []
    for path, x in flat_dict.flatten_dict(batch).items():
        if not has_shape_dtype(x):
            return None
        record = {
            "path": list(path),
            "shape": list(x.shape),
            "dtype": str(x.dtype),
        }
        records.append(record)
    return records


def recorded_batch(records: Sequence[Mapping[str, Any]]) -> PyTree:
    """Inverts `batch_record`; raises a ValueError for a shape or dtype that no array has."""
    batch: dict[tuple[str, ...], Any] = {}
    for record in records:
        dtype = jax.numpy.dtype(record["dtype"])
        if not is_possible_shape(record["shape"], dtype.itemsize):
            raise ValueError(f"no array has the shape {record['shape']}")
        batch[tuple(record["path"])] = jax.ShapeDtypeStruct(
            tuple(record["shape"]), dtype
        )
    return flat_dict.unflatten_dict(batch)
