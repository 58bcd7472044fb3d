"""The README's commands are those that CI runs, and its programs print what it says they print."""

import re
import shlex

import pytest

from tests.pages import ROOT, blocks, programs, run_in_order
from weft.cli import main
from weft.cli.arguments import parse_arguments
from weft.recipes import RECIPES, find_recipe

pytestmark = pytest.mark.usefixtures("one_device")

README = ROOT / "README.md"
PROGRAMS = programs(README)


def commands(block):
    lines = [line for line in block.text.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines]


def test_first_commands_are_the_ones_that_ci_runs():
    first, *_ = (commands(block) for block in blocks(README) if block.language == "console")
    assert first == ["make train", "make test"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for command in first:
        assert any(line.startswith(command) for line in ci), f".ci/run does not run `{command}`"


@pytest.mark.long
def test_other_commands_run_in_order(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    _, *rest = (commands(block) for block in blocks(README) if block.language == "console")
    for command in (command for block in rest for command in block):
        program, *words = shlex.split(command)
        assert program == "weft"
        arguments = parse_arguments(words)
        if words[0] in ("check", "lr-find", "sample"):  # tests/cli runs them on the same recipe
            recipe, *_ = getattr(arguments, "recipe_and_overrides", ["lm-tiny"])
            assert find_recipe(recipe) in RECIPES
            continue
        assert main(words) == 0, f"{command}: {capfd.readouterr()}"


def test_every_recipe_and_every_page_about_training_is_named():
    text = README.read_text(encoding="utf-8")
    assert [r.name for r in RECIPES if f"| `{r.name}` |" not in text] == []
    for page in re.findall(r"`([\w-]+\.md)`", text.partition("The pages in `docs/`")[2]):
        assert (ROOT / page).exists() or (ROOT / "docs" / page).exists(), page


def test_every_program_has_expected_output():
    assert PROGRAMS
    assert all(program.printed for program in PROGRAMS)


def test_program_output_matches_readme(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for said, printed in run_in_order(README, monkeypatch):
        assert printed == said
