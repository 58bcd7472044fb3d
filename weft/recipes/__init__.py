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
from typing import Any, NamedTuple

from weft.errors import RecipeError, UnknownConfigError, did_you_mean
from weft.recipes.recipe import Recipe
from weft.serialization.untrusted import (
    WINDOWS_PATH,
    check_local_path,
    is_windows_path,
)

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """Recipe of Weft: the module that defines it, and a summary."""

    module: str
    summary: str
    preparation: str = ""


_ENTRIES = {
    "lm": _Entry(
        "lm",
        "a byte-level Transformer on the text of Python's standard library: minutes on two cores",
    ),
    "lm-tiny": _Entry(
        "lm", "the same with steps of milliseconds: to try things out"
    ),
    "lm-moe": _Entry(
        "lm", "the default recipe with a mixture of experts in each layer"
    ),
    "lm-1b": _Entry(
        "lm_large",
        "a Llama-like model of 1 billion parameters on a corpus of yours: data_dir=FOLDER",
    ),
    "lm-8b": _Entry("lm_large", "the same with 8 billion parameters"),
    "lm-70b": _Entry("lm_large", "the same with 70 billion parameters"),
    "lm-nnx": _Entry(
        "lm_nnx",
        "the default recipe's model as an NNX module, on the same data",
    ),
    "digits": _Entry(
        "digits",
        "a Linen convolutional network with BatchNorm on scikit-learn's digits: half a minute",
    ),
    "lm-llama": _Entry(
        "lm_lora", "a small byte-level Llama: the base of lm-lora"
    ),
    "lm-lora": _Entry(
        "lm_lora",
        "low-rank adapters on an imported checkpoint: base=PATH, or that of lm-llama",
        "weft.recipes.lm_lora:prepare",
    ),
    "sft": _Entry(
        "sft",
        "fine-tuning of an imported checkpoint on conversations: base=FOLDER data=chat.jsonl",
    ),
    "dpo": _Entry(
        "dpo",
        "preference optimization on pairs of answers: base=FOLDER data=preferences.jsonl",
    ),
    "grpo": _Entry(
        "grpo",
        "tuning by a reward of the model's answers: base=FOLDER data=prompts.jsonl "
        "reward=file.py:function",
    ),
}


def _weft_recipe(name: str, entry: _Entry) -> Recipe:
    function = f"weft.recipes.{entry.module}:{name.replace('-', '_')}"
    return Recipe(name, entry.summary, function, entry.preparation)


RECIPES = tuple(_weft_recipe(name, entry) for name, entry in _ENTRIES.items())


def named_trainer_configs() -> dict[str, Recipe]:
    """Returns the recipes of Weft and of installed packages by name, the default one first.

    >>> next(iter(named_trainer_configs()))
    'lm'
    """
    recipes = {recipe.name: recipe for recipe in RECIPES}
    for point in importlib.metadata.entry_points(group="weft.recipes"):
        # No package can replace a recipe of Weft.
        if point.name not in _ENTRIES:
            function = f"{point.module}:{point.attr}"
            recipes[point.name] = Recipe(
                point.name, f"from {point.module}", function
            )
    return recipes


def find_recipe(word: str) -> Recipe:
    """Returns the recipe that a command line names.

    Args:
        word: A name of `named_trainer_configs`, `path/to/file.py:function`, or
            `package.module:function`, where the module is installed or in the current directory.

    Raises:
        PathNotLocalError: if it is a URL, as of copies of checkpoints, or begins with `~`.
        RecipeError: if a file or module cannot have such a name.
        UnknownConfigError: if there is no recipe of this name.
    """
    recipes = named_trainer_configs()
    if word in recipes:
        return recipes[word]
    module, _, function = word.rpartition(":")
    if is_windows_path(word) and not os.path.exists(module):
        raise UnknownConfigError(f"{word!r} {WINDOWS_PATH}")
    if module.endswith(".py"):
        return _recipe_in_file(word, module, function)
    if word.endswith(".py"):
        raise RecipeError(
            f"name the function of the file that makes the config, such as {word}:recipe."
        )
    if "/" in word:
        check_local_path(word, "path")
        raise UnknownConfigError(
            f"there is no file or directory {word!r}, and no such recipe."
        )
    if (
        not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module)
        or not function.isidentifier()
    ):
        raise UnknownConfigError(
            f"unknown recipe {word!r}. {did_you_mean(word, recipes)}"
        )
    file = _module_file(Path.cwd(), module)
    if file is None and _module_file(Path.cwd(), module.partition(".")[0]):
        # A file that does not exist, in a package of this directory: the error will name it.
        file = Path.cwd().joinpath(*module.split(".")).with_suffix(".py")
    return Recipe(word, "", f"{module}:{function}", file=str(file or ""))


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
        logger.warning(
            "%s has changed since the run was started; its present code is used",
            path,
        )
    return recipe


def _module_file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _recipe_in_file(word: str, file: str, function: str) -> Recipe:
    path = Path(os.path.abspath(file))
    # The module's name begins with its outermost package, as in imports of its neighbors.
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
