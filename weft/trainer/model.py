"""Model of a trainer: a hierarchy layer, or a module of any library wrapped as one.

Its call takes a batch and returns a loss and auxiliary outputs:

    loss, aux = model(input_batch)

The trainer wraps a module of another library in a `LibraryModel` once the shapes of a batch are
known. Its parameters, state, keys and axis names are then those of a hierarchy layer.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import FunctionConfigBase
from weft.config.names import did_you_mean
from weft.errors import BatchFieldError, ModelCallError, ModelOutputError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module, nowrap
from weft.interop.hierarchy import InHierarchy
from weft.typing import Tensor


class LibraryModel(InHierarchy):
    """Layer that computes a loss from a batch with a module of any library.

    Values that the module sows into the collection `summaries` are reported, and so is the loss, as
    the mean over the rows of the batch, unless the module sows its own `loss`.
    """

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Computes the loss, a scalar, and the module's other outputs."""
        with explained(self, input_batch):
            loss, aux = checked_outputs(self, super().forward(input_batch))
        if "loss" not in self.get_invocation_context().get_summaries():
            fields = jax.tree.leaves(input_batch)
            rows = fields[0].shape[0] if fields else 1
            self.add_summary("loss", WeightedScalar(loss, rows))
        return loss, aux

    @property
    @nowrap
    def predicts(self) -> bool:
        """True if the module has a method `predict`."""
        return self._model.has_method("predict")

    def predict(self, input_batch: Mapping[str, Any]) -> Any:
        """Calls the module's `predict` method with a batch."""
        with explained(self, input_batch):
            return super().forward(input_batch, method="predict")

    def _make(self, key: Any) -> dict[str, Any]:
        with explained(self, self.config.inputs[0]):
            return super()._make(key)


def model_config(model: Any, batch: Callable[[], Any]) -> Any:
    """Returns the config of the layer to train.

    Args:
        model: the config of a hierarchy layer, which is returned unchanged, or of a class or
            function that makes a module of any library.
        batch: returns the shapes and dtypes of a batch; called for modules of other libraries only.
    """
    if isinstance(model, Module.Config) or _makes_a_layer(model):
        return model
    return LibraryModel.default_config().set(layer=model, inputs=(batch(),))


def _makes_a_layer(model: Any) -> bool:
    """Returns whether a config of a function makes a hierarchy layer."""
    # Linen modules have fields of these names too.
    return isinstance(model, FunctionConfigBase) and {"name", "parent"} <= set(model.keys())


def build_model(trainer_config: Any) -> BaseLayer:
    """Builds the model of a trainer config without the trainer, from its `model` and `input`."""

    def batch() -> Any:
        return trainer_config.input.set(name="input").instantiate(parent=None).element_spec()

    config = model_config(trainer_config.model, batch)
    return config.set(name="model").instantiate(parent=None)


def checked_outputs(model: Module, outputs: Any) -> tuple[Tensor, Any]:
    """Returns loss and auxiliary outputs; raises a ModelOutputError without a scalar loss."""
    expected = "expected a pair of the loss, a scalar, and anything else: `return loss, aux`."
    if not (isinstance(outputs, tuple) and len(outputs) == 2):
        raise ModelOutputError(f"{model.path()} returned {_described(outputs)}; {expected}")
    loss, aux = outputs
    if not hasattr(loss, "dtype") or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        wrong = f"{model.path()} returned {_described(loss)} as its loss; {expected}"
        is_unreduced = bool(getattr(loss, "shape", ()))
        raise ModelOutputError(wrong + " Take its mean: `loss.mean()`." if is_unreduced else wrong)
    return loss, aux


def _described(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return "None" if x is None else f"a {type(x).__name__}"


@contextlib.contextmanager
def explained(model: Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Raises a BatchFieldError or ModelCallError if a model needs other fields or arguments."""
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if type(error) is not KeyError or not isinstance(key, str) or key in batch:
            raise
        raise BatchFieldError(
            f"{model.path()} looked up {key!r}, but the batch has no such field; it has "
            f"{', '.join(map(repr, batch))}. {did_you_mean(key, batch)} Add the field to the "
            "input, or look up another in the model."
        ) from error
    except TypeError as error:
        missing = re.search(r"missing \d+ required .* arguments?: (.*)", str(error))
        if type(error) is not TypeError or missing is None:
            raise
        raise ModelCallError(
            f"{model.path()} requires more arguments than the batch: {missing[1]} is missing. It "
            "is called with one argument, a dict of the batch's fields, and with flags for "
            "training or evaluation if it takes them: `def __call__(self, input_batch)`."
        ) from error
