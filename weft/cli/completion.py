"""Completion of `weft` commands in a shell, by argcomplete: `weft completion bash`.

The script that the shell reads calls `weft` with the line typed so far. Commands and options come
from the parser; recipes, their arguments, fields of configs and directories of runs from here.
"""

import argparse
import glob
import os
from collections.abc import Iterator

import argcomplete
from argcomplete.shell_integration import shellcode

from weft.errors import WeftError
from weft.recipes import named_trainer_configs
from weft.recipes.recipe import Recipe

_RUN_FILES = ("config.txt", "run.json")


def print_script(arguments: argparse.Namespace) -> int:
    """Prints what the shell has to read."""
    print(shellcode(["weft"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and ends the process, if that is what `weft` was called for."""
    for action in _all_actions(parser):
        if action.dest in ("recipe", "recipe_and_overrides", "overrides"):
            action.completer = _recipe_words  # pyright: ignore[reportAttributeAccessIssue]
        elif action.dest in ("dir", "dirs"):
            action.completer = _run_directories  # pyright: ignore[reportAttributeAccessIssue]
    argcomplete.autocomplete(parser)


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _all_actions(command)


def _run_directories(prefix: str, **kwargs: object) -> list[str]:
    """Returns the directories of runs that begin with a prefix, and those that lead to others."""
    found = []
    for path in sorted(glob.glob(f"{glob.escape(prefix)}*/")):
        is_run = any(
            os.path.exists(os.path.join(path, name)) for name in _RUN_FILES
        )
        found.append(path.rstrip("/") if is_run else path)
    return found


def _recipe_words(
    prefix: str, parsed_args: argparse.Namespace, **kwargs: object
) -> list[str]:
    """Returns recipes, or what may be set in the one that the line names."""
    words: list[str] = []
    for name in ("recipe", "recipe_and_overrides"):
        value = getattr(parsed_args, name, None) or []
        words += [value] if isinstance(value, str) else value
    names = [word for word in words if "=" not in word and word != prefix]
    field, equals, value = prefix.partition("=")
    if equals:
        return (
            [f"{field}={path}" for path in _run_directories(value)]
            if field == "dir"
            else []
        )
    if not names:
        files = sorted(glob.glob(f"{glob.escape(prefix)}*.py"))
        return [*named_trainer_configs(), *_run_directories(prefix), *files]
    recipe = named_trainer_configs().get(names[0])
    if recipe is None:
        return []  # a file of one's own is not run by a press of the tab key
    try:
        return _fields(recipe, prefix)
    except WeftError:
        return []


def _fields(recipe: Recipe, prefix: str) -> list[str]:
    """Returns the arguments of a recipe, or the fields of its config below the last dot."""
    if "." not in prefix:
        return [f"{name}=" for name in ("dir", *recipe.arguments())] + [
            "model.",
            "learner.",
        ]
    from weft.cli import configs  # imports JAX
    from weft.config import ConfigBase

    parent, _, _ = prefix.rpartition(".")
    config = configs.load_config(recipe.name).get_recursively(parent)
    if not isinstance(config, ConfigBase):
        return []
    names = []
    for name, value in config.items():
        end = "." if isinstance(value, ConfigBase) else "="
        names.append(f"{parent}.{name}{end}")
    return names
