"""The named trainer configs, the default one first.

A recipe is a function that makes the config of a trainer. Its module is imported when the config is
made, so that a list of the recipes costs nothing.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """A trainer config that has a name.

    Attributes:
        name: What people call it.
        summary: What it trains, in one line.
        function: Where the function stands that makes it, as `module:function`.
        preparation: Likewise, what makes ready what a run begins with; "" if it needs nothing.
    """

    name: str
    summary: str
    function: str
    preparation: str = ""

    def __call__(self, data_dir: str | None = None, **kwargs: Any) -> Any:
        """Makes a fresh config; see `weft.config.TrainerConfigFn`.

        Args:
            data_dir: Where the data lies.
            **kwargs: Further arguments of the recipe.
        """
        return _imported(self.function)(data_dir, **kwargs)

    def arguments(self) -> set[str]:
        """The names of the arguments of the recipe."""
        return set(inspect.signature(_imported(self.function)).parameters)

    def prepare(self, cfg: Any, train: Callable[[str, Any], Any]) -> bool:
        """Makes ready what a run begins with, such as a checkpoint that is trained first.

        Args:
            cfg: The config of the run.
            train: Trains a recipe by its name and config, and returns the trainer; None if it was
                asked to stop.

        Returns:
            Whether the run can begin.
        """
        return _imported(self.preparation)(cfg, train) if self.preparation else True


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


RECIPES = (
    Recipe(
        "lm",
        "a byte-level Transformer on the text of Python's standard library: minutes on two cores",
        "weft.recipes.lm:lm",
    ),
    Recipe(
        "lm-tiny",
        "the same, so small that a step takes milliseconds: to try things out",
        "weft.recipes.lm:lm_tiny",
    ),
    Recipe(
        "lm-moe",
        "the default recipe with a mixture of experts in each layer",
        "weft.recipes.lm_moe:lm_moe",
    ),
    Recipe(
        "lm-nnx",
        "the default recipe's model as a module of NNX, on the same data",
        "weft.recipes.lm_nnx:lm_nnx",
    ),
    Recipe(
        "digits",
        "a convolutional network of Linen with BatchNorm on scikit-learn's images: half a minute",
        "weft.recipes.digits:digits",
    ),
    Recipe(
        "lm-llama",
        "a small byte-level Llama: what lm-lora begins with",
        "weft.recipes.lm_lora:lm_llama",
    ),
    Recipe(
        "lm-lora",
        "low-rank adapters on an imported checkpoint: that of base=PATH, or of lm-llama",
        "weft.recipes.lm_lora:lm_lora",
        "weft.recipes.lm_lora:prepare",
    ),
)


def named_trainer_configs() -> dict[str, Recipe]:
    """The recipes by name, the default one first.

    >>> next(iter(named_trainer_configs()))
    'lm'
    """
    return {recipe.name: recipe for recipe in RECIPES}
