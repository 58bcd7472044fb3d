"""The model of a trainer: a layer of the hierarchy, or a module of any library as one.

Whatever it is written in, its call takes a batch and returns a loss and anything else:

    loss, aux = model(input_batch)

A module of another library becomes a `LibraryModel` as soon as the trainer knows what a batch looks
like. Its parameters, state, keys and the names of its axes are then those of a hierarchy layer, so
the trainer has one way for all.
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
    """A module of any library that makes a loss from a batch.

    What it sows into a collection `summaries` is reported. The loss is as well, as the mean over
    the rows of the batch, unless the module sows a `loss` of its own.
    """

    def forward(self, input_batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Computes the loss.

        Args:
            input_batch: A batch of examples, as the input gives it.

        Returns:
            The loss, a scalar, and whatever else the module returns.
        """
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
        """Whether the module has a method `predict`."""
        return self._model.has_method("predict")

    def predict(self, input_batch: Mapping[str, Any]) -> Any:
        """What the module's own method `predict` makes of a batch.

        Args:
            input_batch: A batch of examples.
        """
        with explained(self, input_batch):
            return super().forward(input_batch, method="predict")

    def _make(self, key: Any) -> dict[str, Any]:
        with explained(self, self.config.inputs[0]):
            return super()._make(key)


def model_config(model: Any, batch: Callable[[], Any]) -> Any:
    """The config of the layer that a trainer trains.

    Args:
        model: the config of a layer of the hierarchy, which stays what it is, or of a class or
            function that makes a module of any library.
        batch: gives the shapes and dtypes of a batch; called for modules of other libraries.
    """
    if isinstance(model, Module.Config) or _makes_a_layer(model):
        return model
    return LibraryModel.default_config().set(layer=model, inputs=(batch(),))


def _makes_a_layer(model: Any) -> bool:
    """Whether a config of a function makes a layer of the hierarchy, in the place it is given."""
    # The fields of a Linen module have these names as well.
    return isinstance(model, FunctionConfigBase) and {"name", "parent"} <= set(model.keys())


def build_model(trainer_config: Any) -> BaseLayer:
    """The model of a trainer without the trainer.

    Args:
        trainer_config: its `model` and `input` are looked at.
    """

    def batch() -> Any:
        return trainer_config.input.set(name="input").instantiate(parent=None).element_spec()

    config = model_config(trainer_config.model, batch)
    return config.set(name="model").instantiate(parent=None)


def checked_outputs(model: Module, outputs: Any) -> tuple[Tensor, Any]:
    """The loss and what else a model returned.

    Args:
        model: for the error.
        outputs: of its call.

    Raises:
        ModelOutputError: if there is no loss, or it is no scalar of floating-point numbers.
    """
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
    """Says in words what it means if a model does not find in the batch what it needs.

    Args:
        model: whose call is in the block.
        batch: what it is called with.

    Raises:
        BatchFieldError: if it looks up a field that the batch does not have.
        ModelCallError: if it is to be called with more than the batch.
    """
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if type(error) is not KeyError or not isinstance(key, str) or key in batch:
            raise
        raise BatchFieldError(
            f"{model.path()} looked up {key!r}, and the batch has no such field; it has "
            f"{', '.join(map(repr, batch))}. {did_you_mean(key, batch)} Let the input give it, or "
            "the model look up another."
        ) from error
    except TypeError as error:
        missing = re.search(r"missing \d+ required .* arguments?: (.*)", str(error))
        if type(error) is not TypeError or missing is None:
            raise
        raise ModelCallError(
            f"{model.path()} is to be called with more than the batch: {missing[1]} is missing. It "
            "is given one argument, a dict of the fields of the batch, beside those that say "
            "whether it is called in training: `def __call__(self, input_batch)`."
        ) from error
