"""Model of a trainer: a hierarchy layer, or a module of any library wrapped as one.

Its call takes a batch and returns a loss and auxiliary outputs:

    loss, aux = model(input_batch)

The trainer wraps a module of another library in a `LibraryModel` once the shapes of a batch are
known. Its parameters, state, keys and axis names are then those of a hierarchy layer. For mixed
precision, the dtype of the computation is one for all parameters, or one per parameter.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft import functional, hierarchy
from weft.config import (
    REQUIRED,
    ConfigBase,
    FunctionConfigBase,
    InstantiableConfig,
)
from weft.errors import (
    BatchFieldError,
    ModelCallError,
    ModelOutputError,
    TrainDtypeError,
    WeftError,
    did_you_mean,
)
from weft.hierarchy.metrics import LossOfRows
from weft.interop.hierarchy import InHierarchy
from weft.trainer.optimizers.base import tree_paths
from weft.trainer.precision import Precision, as_precision
from weft.trainer.supervised import Supervised
from weft.typing import (
    DType,
    Nested,
    NestedTensor,
    PyTree,
    T,
    Tensor,
    has_shape_dtype,
)


class LibraryModel(InHierarchy):
    """Layer that computes a loss from a batch with a module of any library.

    Values that the module sows into the collection `summaries` are reported, and so is the loss,
    with the weight that the module returns it with or else as the mean over the rows of the batch,
    unless the module sows its own `loss`. So are scalars by name in its auxiliary outputs.
    """

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Computes the loss, a scalar, and the module's other outputs."""
        with explain_call_errors(self, input_batch):
            outputs = super().forward(input_batch)
            loss, aux = check_outputs(self, outputs)
        summaries = self.get_invocation_context().get_summaries()
        fields = jax.tree.leaves(input_batch)
        rows = fields[0].shape[0] if fields else 1
        if "loss" not in summaries:
            summary = with_returned_loss({}, outputs).get(
                "loss", LossOfRows(loss, rows)
            )
            self.add_summary("loss", summary)
        if isinstance(aux, Mapping):
            for name, value in aux.items():
                is_number = hasattr(value, "dtype") and not jnp.shape(value)
                if (
                    isinstance(name, str)
                    and is_number
                    and name not in summaries
                ):
                    self.add_summary(
                        name, hierarchy.WeightedScalar(value, rows)
                    )
        return loss, aux

    def apply_model(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        method: str | None,
    ) -> PyTree:
        """Returns what the module, or a public method of it, returns for any arguments."""
        return super().forward(*args, method=method, **kwargs)

    @property
    def predicts(self) -> bool:
        """True if the module has a method `predict`."""
        return self._model.has_method("predict")

    def predict(self, input_batch: Mapping[str, PyTree]) -> PyTree:
        """Calls the module's `predict` method with a batch."""
        with explain_call_errors(self, input_batch):
            return super().forward(input_batch, method="predict")

    def _make(self, key: Tensor) -> dict[str, Any]:
        with explain_call_errors(self, self.config.inputs[0]):
            return super()._make(key)


def model_config(
    model: InstantiableConfig,
    batch: Callable[[], PyTree],
    precision: str | Precision.Config | None = None,
) -> Any:
    """Returns the config of the layer to train.

    `model` is the config of a hierarchy layer, or of a class or function that makes a module of any
    library; the latter, a `Supervised` and a `LibraryModel` get the shapes that `batch` returns.
    `precision` sets the dtypes of parameters and computation.
    """
    config = _layer_config(model, batch)
    if precision is None:
        return config
    return as_precision(precision).model_config(config)


def _layer_config(
    model: InstantiableConfig, batch: Callable[[], PyTree]
) -> InstantiableConfig:
    if isinstance(model, Supervised.Config):
        return model.clone(batch_spec=batch())
    if isinstance(model, LibraryModel.Config) and model.inputs is REQUIRED:
        return model.clone(inputs=(batch(),))
    if isinstance(model, hierarchy.Module.Config) or makes_a_layer(model):
        return model
    return LibraryModel.default_config().set(layer=model, inputs=(batch(),))


def makes_a_layer(model: object) -> bool:
    """Returns whether a config is that of a function that makes a layer of the hierarchy."""
    # Linen modules have fields of these names too.
    return isinstance(model, FunctionConfigBase) and {"name", "parent"} <= set(
        model.keys()
    )


def trained_model_config(trainer_config: ConfigBase) -> Any:
    """Returns the config of the layer that a trainer config trains."""

    def batch_spec() -> PyTree:
        input_ = trainer_config.input.clone(name="input").instantiate(
            parent=None
        )
        return input_.element_spec()

    return model_config(
        trainer_config.model, batch_spec, trainer_config.precision
    )


def build_model(trainer_config: ConfigBase) -> hierarchy.BaseLayer:
    """Builds the model of a trainer config without the trainer, from its `model` and `input`."""
    cfg = trained_model_config(trainer_config)
    return cfg.set(name="model").instantiate(parent=None)


def check_outputs(
    model: hierarchy.Module, outputs: PyTree
) -> tuple[Tensor, PyTree]:
    """Returns the loss in at least float32 and auxiliary outputs.

    The loss may be a `WeightedScalar`, whose mean it then is.

    Raises a ModelOutputError without a scalar loss.
    """
    expected = "expected a pair of the loss, a scalar, and anything else: `return loss, aux`."
    if not (isinstance(outputs, tuple) and len(outputs) == 2):
        raise ModelOutputError(
            f"{model.path()} returned {_describe_value(outputs)}; {expected}"
        )
    loss, aux = outputs
    if isinstance(loss, hierarchy.WeightedScalar):
        loss = jnp.asarray(loss.mean)
    if (
        not hasattr(loss, "dtype")
        or loss.shape
        or not jnp.issubdtype(loss.dtype, jnp.floating)
    ):
        message = f"{model.path()} returned {_describe_value(loss)} as its loss; {expected}"
        if getattr(loss, "shape", ()):
            message += " Take its mean: `loss.mean()`."
        raise ModelOutputError(message)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)), aux


def with_returned_loss(
    summaries: Mapping[str, Any], outputs: PyTree
) -> dict[str, Any]:
    """Returns a model's summaries, with the loss if it is only returned, as a `WeightedScalar`."""
    summaries = dict(summaries)
    if "loss" not in summaries and isinstance(outputs, tuple) and outputs:
        loss = outputs[0]
        if isinstance(loss, hierarchy.WeightedScalar):
            loss.validate()
            summaries["loss"] = loss
    return summaries


def _describe_value(x: object) -> str:
    if has_shape_dtype(x):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    if x is None:
        return "None"
    return f"a {type(x).__name__}"


@contextlib.contextmanager
def explain_call_errors(
    model: hierarchy.Module, batch: Mapping[str, Any]
) -> Iterator[None]:
    """Raises a BatchFieldError or ModelCallError if a model needs other fields or arguments.

    Errors that are not Weft's get a note that says what the model was called with.
    """
    try:
        yield
    except WeftError:
        raise
    except KeyError as error:
        key = None
        if type(error) is KeyError and error.args:
            key = error.args[0]
        if not isinstance(key, str) or key in batch:
            raise  # not a field of the batch
        raise BatchFieldError(
            f"{model.path()} looked up {key!r}, but the batch has no such field; it has "
            f"{', '.join(map(repr, batch))}. {did_you_mean(key, batch)} Add the field to the "
            "input, or look up another in the model."
        ) from error
    except TypeError as error:
        missing = re.search(
            r"missing \d+ required .* arguments?: (.*)", str(error)
        )
        if type(error) is not TypeError or missing is None:
            error.add_note(_called_with(model, batch))
            raise
        argument = missing[1]
        raise ModelCallError(
            f"{model.path()} requires more arguments than the batch: {argument} is missing. It "
            "is called with one argument, a dict of the batch's fields, and with flags for "
            "training or evaluation if it takes them: `def __call__(self, input_batch)`."
        ) from error
    except Exception as error:
        error.add_note(_called_with(model, batch))
        raise


def _called_with(model: hierarchy.Module, batch: Mapping[str, Any]) -> str:
    return f"{model.path()} was called with a batch, a dict of {', '.join(map(str, batch))}."


PerParamDType = Callable[[NestedTensor], Nested[DType | None]]
"""Function from parameters to their dtypes in the forward pass; None keeps a dtype."""


def per_param_train_dtype_by_path(
    default_dtype: DType | None = jnp.bfloat16,
    *,
    update_rules: Sequence[tuple[str, DType | None]] = (),
) -> PerParamDType:
    """Returns dtypes by regular expressions on parameters' paths, for a trainer's `train_dtype`.

    Args:
        default_dtype: For parameters without a rule, and floats in a batch; None keeps their own.
        update_rules: Pairs of a pattern, which must match the whole path, such as "decoder/emb/.*",
            and a dtype, or None for the parameter's own; the first match counts.

    Raises TrainDtypeError when called, if a rule matches no parameter.

    >>> dtypes = per_param_train_dtype_by_path("bfloat16", update_rules=[(".*/scale", None)])
    >>> dtypes({"norm": {"scale": jnp.ones(2)}, "linear": {"weight": jnp.ones(2)}})
    {'linear': {'weight': 'bfloat16'}, 'norm': {'scale': None}}
    """
    rules = tuple((pattern, dtype) for pattern, dtype in update_rules)
    return _DtypesByPath(default_dtype, rules)


@dataclasses.dataclass(frozen=True)
class _DtypesByPath:
    default_dtype: DType | None
    rules: tuple[tuple[str, DType | None], ...]

    def __call__(self, params: NestedTensor) -> Nested[DType | None]:
        tree = tree_paths(params)
        paths = jax.tree.leaves(tree)
        for pattern, _ in self.rules:
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise TrainDtypeError(
                    f"the rule {pattern!r} of train_dtype matches the whole path of no parameter. "
                    f"{did_you_mean(pattern, paths)}"
                )
        return jax.tree.map(self._dtype_of, tree)

    def _dtype_of(self, path: str) -> DType | None:
        for pattern, dtype in self.rules:
            if re.fullmatch(pattern, path):
                return dtype
        return self.default_dtype


def cast_floats(in_tree: T, to_dtype: DType | None) -> T:
    """Casts floating-point arrays and `TensorSpec`s to a dtype; None leaves all unchanged."""
    if to_dtype is None:
        return in_tree

    def cast(x: Tensor | hierarchy.TensorSpec) -> Tensor | hierarchy.TensorSpec:
        if not isinstance(x, hierarchy.TensorSpec):
            return functional.cast_floats(x, to_dtype)
        if x.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
            return dataclasses.replace(x, dtype=to_dtype)
        return x

    return jax.tree.map(cast, in_tree)


def cast_floats_per_param(
    in_tree: T, per_param_dtype: Nested[DType | None]
) -> T:
    """Casts each floating-point array to its own dtype; None leaves it unchanged."""
    return jax.tree.map(
        lambda dtype, x: cast_floats(x, dtype),
        per_param_dtype,
        in_tree,
        is_leaf=lambda x: x is None,
    )


def cast_for_forward(
    params: NestedTensor, batch: T, train_dtype: DType | PerParamDType | None
) -> tuple[NestedTensor, T]:
    """Casts parameters and a batch to one dtype, to one per parameter, or not at all."""
    # Scalar types of JAX and NumPy are classes.
    if not callable(train_dtype) or isinstance(train_dtype, type):
        return cast_floats((params, batch), train_dtype)
    cast_params = cast_floats_per_param(params, train_dtype(params))
    batch_dtype = getattr(train_dtype, "default_dtype", None)
    return cast_params, cast_floats(batch, batch_dtype)
