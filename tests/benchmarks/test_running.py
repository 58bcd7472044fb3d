"""Questions as they are asked: in a process, in a repository, with a file per question."""

import io
import json
import re
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.frame import results, table
from tests.python_server import Python, PythonServer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long

QUICK = '''
"""Is one number
less than another?

Only to try out the frame.
"""
from benchmarks.harness import Curve, counted, row
def run():
    fast = row("a call, Weft / raw", ([{ratio}] * 15, [1e-3] * 15, [1e-3] * 15), at_most=1.0,
               why="The floor is {ratio}.")
    peer = row("a call, Flax NNX / raw", ([9.0] * 15, [9e-3] * 15, [1e-3] * 15), at_most=None)
    lines = {{"Weft": [(10, 1.0), (1000, 2.0)], "raw": [(10, 0.5), (1000, 0.7)]}}
    curve = Curve("calls_by_leaves", "Calls", "leaves", "µs", lines, ["Weft: linear"])
    return [fast, peer, {more} curve]
'''
FAILING = '''
"""Does it run?"""
def run():
    raise ValueError("the two sides differ")
'''

LEAVING = '''
"""Is anything there?"""
import sys
from benchmarks.harness import counted
def run():
    there = sys.modules.setdefault("left", [])
    there.append(1)
    return [counted(f"{__name__}, left", len(there) - 1, at_most=0)]
'''

WAITING = '''
"""Does it end?"""
import time
def run():
    print("WAITING", flush=True)
    time.sleep(600)
'''


# As `python -m benchmarks` does.
RUN_BENCHMARKS = """
import runpy
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


class Repository:
    """A copy of the frame with questions of its own."""

    def __init__(self, root: Path, server: PythonServer):
        self.root, self.folder, self.server = root, root / "benchmarks", server
        shutil.copytree(
            ROOT / "benchmarks" / "frame",
            self.folder / "frame",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name in ("__init__.py", "__main__.py", "harness.py"):
            shutil.copy(ROOT / "benchmarks" / name, self.folder)
        (root / "docs").mkdir()
        self.page = root / "docs" / "performance-results.md"
        for page in ("performance.md", self.page.name):
            shutil.copy(ROOT / "docs" / page, root / "docs")

    def question(self, name: str, text: str, **values: object) -> None:
        text = text.format(**values) if values else text
        (self.folder / f"{name}.py").write_text(text.lstrip(), encoding="utf-8")

    def git(self, *words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *who, *words], cwd=self.root, check=True, capture_output=True)

    def start(self, *words: str) -> Python:
        env = {"COLUMNS": "160", "PYTHONPATH": str(ROOT)}
        program = "-c", RUN_BENCHMARKS, *words
        return self.server.start(*program, cwd=self.root, env=env, stderr=subprocess.PIPE)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def results(self) -> dict:
        return json.loads((self.folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two_runs(python_server, tmp_path_factory):
    """Returns a repository in which all was asked twice, and committed between; both runs."""
    repository = Repository(tmp_path_factory.mktemp("repository"), python_server)
    gone = 'counted("traces", 1, at_most=1),'
    repository.question("quick", QUICK, ratio=0.5, more=gone)
    repository.question("failing", FAILING)
    repository.question("kept", QUICK.replace("calls_by_leaves", "kept"), ratio=0.9, more="")
    first = repository.run()
    repository.git("init", "-q")
    repository.git("add", ".")
    repository.git("commit", "-q", "-m", "first")
    repository.question("quick", QUICK, ratio=1.5, more="")
    return repository, first, repository.run("qui")


def test_failure_is_reported_last_and_others_continue(two_runs):
    repository, first, _ = two_runs
    assert first.returncode == 1
    table, end = first.stdout.split("failing failed; what was measured of it before is kept:")
    assert "a call, Weft / raw" in table
    assert "ValueError: the two sides differ" in end and 'failing.py", line 3' in end
    assert set(repository.results()) == {"quick", "kept"}


def test_table_shows_environment_and_target_status(two_runs):
    _, first, _ = two_runs
    assert re.search(r"^Weft .*, JAX .*, Python 3\.", first.stdout, re.MULTILINE)
    lines = [" ".join(line.split()) for line in first.stdout.splitlines()]
    assert "a call, Weft / raw 0.5 0.5 … 0.5 15 ≤ 1 met 1 ms against 1 ms" in lines
    assert "a call, Flax NNX / raw 9 9 … 9 15 9 ms against 1 ms" in lines
    assert "traces 1 counted ≤ 1 met" in lines
    assert "5 lines: 3 met, 0 missed, 2 without a target." in lines
    assert "Calls:" in lines and "Weft: linear" in lines


def test_run_reports_changes_since_last_commit(two_runs):
    _, first, second = two_runs
    assert "Nothing of this was committed before." in first.stdout
    assert second.returncode == 0, second.stderr
    lines = second.stdout.splitlines()
    assert "Compared with the last commit: 1 of 2 lines moved beyond noise." in lines
    assert "worse: a call, Weft / raw: 0.5 (0.5 … 0.5) -> 1.5 (1.5 … 1.5)" in lines
    assert "gone: traces" in lines


def test_missed_target_is_explained_below(two_runs):
    _, _, second = two_runs
    assert "explained [1]" in second.stdout and "[1] The floor is 1.5." in second.stdout
    assert "2 lines: 0 met, 1 explained, 0 missed" in second.stdout


def test_unselected_results_are_kept_and_stale_dropped(two_runs):
    repository, _, _ = two_runs
    results = repository.results()
    assert [row["question"] for row in results["kept"]["rows"]] == [
        "a call, Weft / raw",
        "a call, Flax NNX / raw",
    ]
    assert "traces" not in str(results["quick"])


def test_page_shows_the_results_and_their_plots(two_runs):
    repository, _, _ = two_runs
    text = repository.page.read_text(encoding="utf-8")
    assert "| a call, Weft / raw | 1.5 | 1.5 … 1.5 | 15 | ≤ 1 | explained [1] |" in text
    assert "### quick\n\nIs one number less than another?\n" in text
    assert "Nothing was measured yet" not in text
    for name in ("overview", "calls_by_leaves", "kept"):
        assert f"](performance/{name}.svg)" in text
        image = (repository.root / "docs" / "performance" / f"{name}.svg").read_text("utf-8")
        assert ET.fromstring(image).tag.endswith("svg") and len(image) > 5000
        assert "prefers-color-scheme:dark" in image and "#1b6ca8;--" in image


def test_page_is_rewritten_without_measuring(two_runs):
    repository, _, _ = two_runs
    text, before = repository.page.read_text(encoding="utf-8"), repository.results()
    (repository.root / "docs" / "performance" / "kept.svg").unlink()
    shutil.copy(ROOT / "docs" / "performance-results.md", repository.page)
    assert repository.run("--page").returncode == 0
    assert repository.page.read_text(encoding="utf-8") == text
    assert repository.results() == before
    assert (repository.root / "docs" / "performance" / "kept.svg").exists()


def test_unknown_question_lists_available_ones(two_runs):
    repository, _, _ = two_runs
    done = repository.run("quick", "slow", "kpet")
    assert done.returncode == 2
    assert done.stdout.split("\n") == [
        "There is no question slow.",
        "There is no question kpet. Is it kept?",
        "There are, and a part of a name is enough:",
        *("failing", "kept", "quick", ""),
    ]


def test_run_ends_with_written_files_and_missed_targets(two_runs):
    repository, _, _ = two_runs
    repository.question("quick", QUICK.replace("why=", "note="), ratio=1.5, more="")
    lines = repository.run("quick").stdout.splitlines()
    assert lines[-4] == (
        "Written: benchmarks/results.json, docs/performance.md, docs/performance-results.md, "
        "and 3 plots in docs/performance/."
    )
    assert lines[-2].startswith("2 lines: 0 met, 1 missed,")
    assert lines[-1] == "missed: a call, Weft / raw: 1.5, target ≤ 1"


@pytest.mark.parametrize("columns", [80, 200])
def test_table_fits_the_terminal(two_runs, columns):
    repository, _, _ = two_runs
    answers = {"quick": results.parse(json.dumps(repository.results()))["quick"]}
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(table.rich_table(answers, columns))
    lines = console.export_text().splitlines()
    row = next(line for line in lines if "Weft / raw" in line)
    assert max(map(len, lines)) <= columns and "≤ 1" in row
    assert ("1 ms against 1 ms" in row) == (columns == 200)


def test_questions_run_isolated_from_each_other(two_runs):
    repository, _, _ = two_runs
    for name in ("left_1", "left_2"):
        repository.question(name, LEAVING)
    assert "2 lines: 2 met" in repository.run("left").stdout


def test_interrupted_run_keeps_and_shows_results(two_runs):
    repository, _, _ = two_runs
    before = repository.results()
    repository.question("long", WAITING)
    repository.question("a_first", QUICK.replace("calls_by_leaves", "first"), ratio=0.7, more="")
    process = repository.start("a_first", "long")
    shown = ""
    for line in process.stdout:
        shown += line
        if "WAITING" in line:
            break
    process.send_signal(signal.SIGINT)
    shown += process.communicate(timeout=60)[0]
    assert process.returncode == 130, shown
    assert "Stopped in long; what was answered before it is kept." in shown
    assert "a call, Weft / raw" in shown and "1 met" in shown
    assert repository.results().keys() == before.keys() | {"a_first"}
