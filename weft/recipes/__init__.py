"""Named trainer configs, the default one first.

A recipe is a function that makes a trainer's config. Its module is imported only when the config is
made. Installed packages add recipes as entry points of the group `weft.recipes`, and a command line
may name a function in any file or module.
"""

import importlib.metadata
import keyword
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import RecipeError, UnknownConfigError, did_you_mean
from weft.recipes.recipe import Recipe

logger = logging.getLogger(__name__)

# Of each, the module and a summary.
_RECIPES = {
    "lm": (
        "lm",
        "a byte-level Transformer on the text of Python's standard library: minutes on two cores",
    ),
    "lm-tiny": ("lm", "the same with steps of milliseconds: to try things out"),
    "lm-moe": ("lm", "the default recipe with a mixture of experts in each layer"),
    "lm-nnx": ("lm_nnx", "the default recipe's model as an NNX module, on the same data"),
    "digits": (
        "digits",
        "a Linen convolutional network with BatchNorm on scikit-learn's digits: half a minute",
    ),
    "lm-llama": ("lm_lora", "a small byte-level Llama: the base of lm-lora"),
    "lm-lora": (
        "lm_lora",
        "low-rank adapters on an imported checkpoint: base=PATH, or that of lm-llama",
    ),
}
_PREPARATIONS = {"lm-lora": "weft.recipes.lm_lora:prepare"}
RECIPES = tuple(
    Recipe(
        name,
        summary,
        f"weft.recipes.{module}:{name.replace('-', '_')}",
        _PREPARATIONS.get(name, ""),
    )
    for name, (module, summary) in _RECIPES.items()
)


def named_trainer_configs() -> dict[str, Recipe]:
    """Returns the recipes of Weft and of installed packages by name, the default one first.

    >>> next(iter(named_trainer_configs()))
    'lm'
    """
    installed = {
        point.name: Recipe(point.name, f"from {point.module}", f"{point.module}:{point.attr}")
        for point in importlib.metadata.entry_points(group="weft.recipes")
    }
    weft = {recipe.name: recipe for recipe in RECIPES}
    return weft | {name: x for name, x in installed.items() if name not in weft}


def find_recipe(word: str) -> Recipe:
    """Returns the recipe that a command line names.

    Args:
        word: A name of `named_trainer_configs`, `path/to/file.py:function`, or
            `package.module:function`, where the module is installed or in the current directory.

    Raises:
        RecipeError: if a file or module cannot have such a name.
        UnknownConfigError: if there is no recipe of this name.
    """
    named = named_trainer_configs()
    if word in named:
        return named[word]
    place, _, function = word.rpartition(":")
    if place.endswith(".py"):
        return _in_file(word, place, function)
    if word.endswith(".py"):
        raise RecipeError(
            f"name the function of the file that makes the config, such as {word}:recipe."
        )
    if "/" in word:
        raise UnknownConfigError(f"there is no file or directory {word!r}, and no such recipe.")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place) or not function.isidentifier():
        raise UnknownConfigError(f"unknown recipe {word!r}. {did_you_mean(word, named)}")
    here = _module_file(Path.cwd(), place)
    if here is None and _module_file(Path.cwd(), place.partition(".")[0]):
        here = Path.cwd().joinpath(*place.split(".")).with_suffix(".py")  # which does not exist
    return Recipe(word, "", f"{place}:{function}", file=str(here or ""))


def recorded_recipe(record: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a run from its record, see `Recipe.record`, which must be trustworthy.

    Warns if the code has changed since.

    Raises RecipeError if the file is not there any longer.
    """
    recipe = Recipe(record["name"], "", record["function"], file=record["file"])
    file, function = recipe.file, recipe.function.partition(":")[2]
    if file and not os.path.isfile(file):
        raise RecipeError(
            f"the run was made by the recipe {recipe.name}, but there is no file {file}. If it has "
            f"moved, name it: --recipe path/to/{os.path.basename(file)}:{function}"
        )
    for path in recipe.changed_files(record):
        logger.warning("%s has changed since the run was started; its present code is used", path)
    return recipe


def _module_file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _in_file(word: str, place: str, function: str) -> Recipe:
    path = Path(os.path.abspath(place))
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise RecipeError(
                f"{word}: Python cannot import a module named {name!r}. Rename the file."
            )
    module = ".".join(name for name in names if name != "__init__")
    return Recipe(word, "", f"{module}:{function}", file=str(path))
