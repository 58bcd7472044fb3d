import pytest

from weft.cli.arguments import parse_arguments
from weft.errors import CommandLineError


@pytest.mark.parametrize("command", ["train", "recipes", "sample", "inspect", "tabulate"])
def test_each_command_names_the_module_that_runs_it(command):
    words = {"sample": ["runs/lm"], "inspect": ["runs/lm"], "tabulate": ["lm"]}.get(command, [])
    assert parse_arguments([command, *words]).command == f"weft.cli.{command}"


def test_the_words_of_train_are_left_to_it():
    arguments = parse_arguments(["train", "lm", "max_step=3", "dir=x"])
    assert arguments.recipe_and_overrides == ["lm", "max_step=3", "dir=x"]


def test_an_unknown_command_is_answered_with_the_nearest():
    with pytest.raises(
        CommandLineError, match=r"unknown command 'inspct'\. Did you mean 'inspect'"
    ):
        parse_arguments(["inspct", "x"])
