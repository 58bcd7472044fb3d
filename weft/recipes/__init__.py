"""Named trainer configs, the default one first.

A recipe is a function that makes a trainer's config. Its module is imported only when the config is
made.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """Named trainer config.

    Attributes:
        summary: Description in one line.
        function: The function that makes the config, as `module:function`.
        preparation: Function in the same form that prepares a run's initial state; "" for none.
    """

    name: str
    summary: str
    function: str
    preparation: str = ""

    def __call__(self, data_dir: str | None = None, **kwargs: Any) -> Any:
        """Makes a fresh config; see `weft.config.TrainerConfigFn`."""
        return _imported(self.function)(data_dir, **kwargs)

    def arguments(self) -> set[str]:
        """Returns the names of the recipe's arguments."""
        return set(inspect.signature(_imported(self.function)).parameters)

    def prepare(self, cfg: Any, train: Callable[[str, Any], Any]) -> bool:
        """Prepares the initial state of a run, such as a checkpoint that is trained first.

        Args:
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
        "the same with steps of milliseconds: to try things out",
        "weft.recipes.lm:lm_tiny",
    ),
    Recipe(
        "lm-moe",
        "the default recipe with a mixture of experts in each layer",
        "weft.recipes.lm:lm_moe",
    ),
    Recipe(
        "lm-nnx",
        "the default recipe's model as an NNX module, on the same data",
        "weft.recipes.lm_nnx:lm_nnx",
    ),
    Recipe(
        "digits",
        "a Linen convolutional network with BatchNorm on scikit-learn's digits: half a minute",
        "weft.recipes.digits:digits",
    ),
    Recipe(
        "lm-llama", "a small byte-level Llama: the base of lm-lora", "weft.recipes.lm_lora:lm_llama"
    ),
    Recipe(
        "lm-lora",
        "low-rank adapters on an imported checkpoint: base=PATH, or that of lm-llama",
        "weft.recipes.lm_lora:lm_lora",
        "weft.recipes.lm_lora:prepare",
    ),
)


def named_trainer_configs() -> dict[str, Recipe]:
    """Returns the recipes by name, the default one first.

    >>> next(iter(named_trainer_configs()))
    'lm'
    """
    return {recipe.name: recipe for recipe in RECIPES}
