"""The README's commands are those that CI runs, and its programs print what it says they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(*languages: str) -> list[tuple[str, ...]]:
    """The texts of fenced blocks of these languages that follow each other."""
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    found = []
    for start in range(len(fences) - len(languages) + 1):
        run = fences[start : start + len(languages)]
        if tuple(language for language, _ in run) == languages:
            found.append(tuple(text for _, text in run))
    return found


PROGRAMS = blocks("python", "text")


def test_the_first_commands_are_the_ones_that_ci_runs():
    (console,) = blocks("console")[0]
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
    assert len(PROGRAMS) == len(blocks("python"))


@pytest.mark.parametrize(
    ("program", "printed"), PROGRAMS, ids=[f"program{n + 1}" for n in range(len(PROGRAMS))]
)
def test_a_program_prints_what_the_readme_says(program, printed, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed
