"""The README's commands are those that CI runs, and its programs print what it says they print."""

import os
import subprocess
import sys

import pytest

from tests.pages import ROOT, blocks, programs

README = ROOT / "README.md"
PROGRAMS = programs(README)


def test_the_first_commands_are_the_ones_that_ci_runs():
    console = next(block.text for block in blocks(README) if block.language == "console")
    commands = [
        line.removeprefix("$ ").split("#")[0].strip()
        for line in console.splitlines()
        if line.startswith("$ ")
    ]
    assert commands == ["make train", "make test"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for command in commands:
        assert any(line.startswith(command) for line in ci), f".ci/run does not run `{command}`"


def test_every_program_says_what_it_prints():
    assert PROGRAMS
    assert all(program.printed for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program{n + 1}" for n in range(len(PROGRAMS))])
def test_a_program_prints_what_the_readme_says(program, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program.block.text, encoding="utf-8")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == program.printed
