"""The README's commands are those that CI runs, and its programs print what it says they print."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.flags import xla_flags
from tests.pages import ROOT, blocks, programs
from weft.cli import main
from weft.recipes import RECIPES

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
def test_other_commands_run_in_order(tmp_path, monkeypatch, capfd, request):
    monkeypatch.chdir(tmp_path)
    _, *rest = (commands(block) for block in blocks(README) if block.language == "console")
    for command in (command for block in rest for command in block):
        program, *words = shlex.split(command)
        assert program == "weft"
        if words[0] == "check":
            request.getfixturevalue("all_devices")
        assert main(words) == 0, f"{command}: {capfd.readouterr()}"


def test_every_recipe_and_every_page_about_training_is_named():
    text = README.read_text(encoding="utf-8")
    assert [r.name for r in RECIPES if f"| `{r.name}` |" not in text] == []
    for page in re.findall(r"`([\w-]+\.md)`", text.partition("The pages in `docs/`")[2]):
        assert (ROOT / page).exists() or (ROOT / "docs" / page).exists(), page


def test_every_program_has_expected_output():
    assert PROGRAMS
    assert all(program.printed for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program{n + 1}" for n in range(len(PROGRAMS))])
def test_program_output_matches_readme(program, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program.block.text, encoding="utf-8")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": xla_flags(), "PYTHONPATH": search},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == program.printed
