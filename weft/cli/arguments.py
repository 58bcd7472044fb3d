"""The arguments of every command. Nothing here is slow to import."""

import argparse
from collections.abc import Sequence
from typing import Any

import weft
from weft.errors import CommandLineError

_RECIPE = "a recipe (see `weft recipes`), the text of a config, or the directory of a run"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments of a command.

    Args:
        argv: Without the name of the program.

    Returns:
        The arguments; `command` is the module that has a `run` for them.

    Raises:
        CommandLineError: for an unknown command.
        SystemExit: from argparse, which has printed what was wrong, or the help that was asked for.
    """
    parser, commands = _build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        from weft.config.names import did_you_mean

        raise CommandLineError(
            f"unknown command {argv[0]!r}. {did_you_mean(argv[0], commands.choices)}"
        )
    return parser.parse_args(argv)


def _build_parser() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(prog="weft", description="Trains JAX models.")
    parser.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    _add_recipes(commands)
    _add_config(commands)
    _add_sample(commands)
    _add_inspect(commands)
    _add_tabulate(commands)
    return parser, commands


def _add(commands: Any, name: str, module: str, summary: str, **kwargs: Any) -> Any:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **kwargs,
    )
    parser.set_defaults(command=f"weft.cli.{module}")
    return parser


def _add_overrides(parser: Any) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="path.to.field=value",
        help="sets a field of the config by its dotted path",
    )


def _add_train(commands: Any) -> None:
    train = _add(
        commands,
        "train",
        "train",
        "train a recipe, or go on with a run",
        usage="weft train [-h] [RECIPE] [path.to.field=value ...]",
        epilog="Examples:\n"
        "  weft train\n"
        "  weft train lm dir=runs/wide model.decoder.dim=256 max_step=2000 seed=1\n\n"
        "A run whose directory holds a checkpoint goes on from there.",
    )
    train.add_argument(
        "recipe_and_overrides",
        nargs="*",
        metavar="RECIPE path.to.field=value",
        help=f"{_RECIPE}; the first recipe by default. Then fields of its config to set, such as "
        "dir=runs/name, max_step=1000, seed=1",
    )


def _add_recipes(commands: Any) -> None:
    _add(commands, "recipes", "recipes", "list the recipes, the default one first")


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="show a config, or compare two")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    show = _add(actions, "show", "config", "print a config as text that Weft can read back")
    show.set_defaults(action="show")
    show.add_argument("recipe", metavar="RECIPE", help=_RECIPE)
    _add_overrides(show)
    show.add_argument(
        "--defaults", action="store_true", help="print the fields that have their defaults, too"
    )
    show.add_argument(
        "--origin", action="store_true", help="say after each field which line has set it"
    )
    diff = _add(
        actions,
        "diff",
        "config",
        "print what differs between two configs; exit code 1 if anything does",
    )
    diff.set_defaults(action="diff")
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help=_RECIPE)


def _add_sample(commands: Any) -> None:
    sample = _add(commands, "sample", "sample", "generate text from a trained run")
    sample.add_argument("dir", metavar="DIR", help="the directory of a run")
    sample.add_argument("--prompt", default="", help="what the text begins with")
    sample.add_argument("--tokens", type=int, default=256, help="how many to add (%(default)s)")
    sample.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 for the likeliest token each time, 1 for the model's own odds (%(default)s)",
    )
    sample.add_argument("--seed", type=int, default=0, help="another text for another number")


def _add_inspect(commands: Any) -> None:
    inspect = _add(
        commands, "inspect", "inspect", "print what a run's checkpoints hold, without loading them"
    )
    inspect.add_argument("dir", metavar="DIR", help="the directory of a run")


def _add_tabulate(commands: Any) -> None:
    tabulate = _add(
        commands, "tabulate", "tabulate", "print the model as a table, without making its arrays"
    )
    tabulate.add_argument("recipe", metavar="RECIPE", help=_RECIPE)
    _add_overrides(tabulate)
