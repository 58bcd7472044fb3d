"""The named trainer configs, the default one first.

A recipe is a function that makes the config of a trainer. Its module is imported when the config is
made, so that a list of the recipes costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.config import TrainerConfigFn


class Recipe(NamedTuple):
    """A trainer config that has a name.

    Attributes:
        name: What people call it.
        summary: What it trains, in one line.
        function: Where the function stands that makes it, as `module:function`.
    """

    name: str
    summary: str
    function: str

    def __call__(self, data_dir: str | None = None) -> Any:
        """Makes a fresh config; see `weft.config.TrainerConfigFn`."""
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(module), function)(data_dir)


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
)


def named_trainer_configs() -> "dict[str, TrainerConfigFn]":
    """The recipes by name, the default one first.

    >>> next(iter(named_trainer_configs()))
    'lm'
    """
    return {recipe.name: recipe for recipe in RECIPES}
