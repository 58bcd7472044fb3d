import importlib

import pytest

from weft.cli.arguments import parse_arguments
from weft.errors import CommandLineError

COMMANDS = {
    "train": "train:run",
    "launch local -n 2 lm": "train:launch",
    "recipes": "arguments:list_recipes",
    "config show lm": "configs:show_or_diff",
    "config diff lm lm-moe": "configs:show_or_diff",
    "sample runs/lm": "sample:print_sample",
    "chat checkpoints/llama": "sample:chat",
    "inspect runs/lm": "inspect:run",
    "report runs/lm runs/wide": "inspect:write_report",
    "export runs/lm --to out": "trained_models:export",
    "tabulate lm": "tabulate:run",
    "check lm": "check:run",
    "lr-find lm": "lr_find:run",
    "sweep lm --over a=1,2": "sweep:run",
    "completion bash": "completion:print_script",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_the_function_that_runs_it(command):
    name = parse_arguments(command.split()).command
    assert name == f"weft.cli.{COMMANDS[command]}"
    module, _, function = name.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_overrides_may_follow_options():
    arguments = parse_arguments(["check", "lm", "a=1", "--mesh", "data=2", "b=2"])
    assert (arguments.overrides, arguments.mesh) == (["a=1", "b=2"], "data=2")
    arguments = parse_arguments(["train", "lm", "--mesh", "data=2", "b=2"])
    assert arguments.recipe_and_overrides == ["lm", "b=2"]


def test_unrecognized_arguments(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["recipes", "lm", "x=1"])
    assert "unrecognized arguments: x=1" in capsys.readouterr().err


def test_unknown_option_suggests_the_nearest():
    with pytest.raises(CommandLineError, match=r"unknown option --mash\. Did you mean '--mesh'"):
        parse_arguments(["check", "lm", "--mash", "data=2"])


@pytest.mark.parametrize("command", ["train lm", "check lm", "lr-find lm", "launch local -n 2 lm"])
def test_field_with_dashes_is_told_to_leave_them_out(command):
    with pytest.raises(CommandLineError, match=r"--max-step=3: leave out the dashes.* max_step=3"):
        parse_arguments([*command.split(), "--max-step=3"])
    with pytest.raises(CommandLineError, match=r"--max_step: leave out .* max_step=3"):
        parse_arguments([*command.split(), "--max_step", "3"])
    with pytest.raises(CommandLineError, match=r"--max_step: leave out .* max_step=VALUE"):
        parse_arguments([*command.split(), "--max_step"])


def test_field_of_a_job_with_dashes_is_told_its_option():
    with pytest.raises(CommandLineError, match=r"of the job, by --job max_tries=3\.$"):
        parse_arguments(["launch", "local", "-n", "2", "--max-tries", "3", "lm"])


def test_unknown_command_suggests_the_nearest():
    with pytest.raises(
        CommandLineError, match=r"unknown command 'inspct'\. Did you mean 'inspect'"
    ):
        parse_arguments(["inspct", "x"])
