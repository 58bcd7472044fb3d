"""Someone tries settings of a recipe: completes the line, sweeps, mends a run, and uses the best.

Each command is a process of its own, and so is each run of the sweep.
"""

import json
import os
import signal
import time

import pytest

from tests.weft_process import PATIENCE_SECONDS, WEFT, finish, weft_processes

pytestmark = [pytest.mark.long]


def completed(python_server, folder, line):
    """Returns the words that a shell offers at the end of a line."""
    answer = folder / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    with python_server.start(*WEFT[1:], cwd=folder, env=asked) as process:
        process.communicate()
    return [word.strip() for word in answer.read_text(encoding="utf-8").split("\n")]


def table_rows(told):
    """Returns the words of each run's row in the table at the end."""
    lines = told.splitlines()
    (header,) = (index for index, line in enumerate(lines) if line.startswith("run "))
    return [line.split() for line in lines[header + 1 :] if line.startswith("00")]


def test_runs_are_compared_and_kept(tmp_path, python_server):
    words = ["sweep", "digits", "--over", "learning_rate=1e-2,1e-5", "--metric", "accuracy"]
    words += ["--best", "highest", "--jobs", "2", "batch_size=64", "steps=40"]
    sweep = tmp_path / "sweeps/digits"
    (sweep / "002/run.json").mkdir(parents=True)  # which no run can write
    with weft_processes(python_server, cwd=tmp_path) as start:
        assert "digits" in completed(python_server, tmp_path, "weft sweep d")
        assert "learning_rate=" in completed(python_server, tmp_path, "weft sweep digits lea")
        told = finish(start(*words), code=1)
        assert "002 learning_rate=1e-5\n  failed with exit code 2; the end of sweeps/dig" in told
        assert [row[0] for row in table_rows(told)] == ["001"]

        # The same sweep again runs what has failed, and nothing else; another one is refused.
        (sweep / "002/run.json").rmdir()
        told = finish(start(*words))
        rows = table_rows(told)
        assert [row[0] for row in rows] == ["001", "002"] and rows[0][1] == "(best)"
        assert float(rows[0][3]) > 0.8 > float(rows[1][2])
        page = (sweep / "comparison.html").read_text(encoding="utf-8")
        assert page.index("001 learning_rate=1e-2 (best)") < page.index("002 learning_rate=1e-5")
        record = json.loads((sweep / "001/run.json").read_text(encoding="utf-8"))
        assert len(record["starts"]) == 1
        assert "has another sweep" in finish(start(*words, "seed=3"), code=2)

        best = "sweeps/digits/001"
        assert best in completed(python_server, tmp_path, f"weft export {best[:-1]}")
        assert "digits.safetensors" in finish(start("export", best, "--to", "digits.safetensors"))


def test_a_signal_ends_the_runs(tmp_path, python_server):
    output = tmp_path / "sweeps/digits/001/output.txt"
    with weft_processes(python_server, cwd=tmp_path) as start:
        process = start("sweep", "digits", "--over", "batch_size=32,64", "steps=1000000")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (output.exists() and "step 1/" in output.read_text(encoding="utf-8")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert "start the same sweep again to continue it" in finish(process, code=143)
        assert "SIGTERM" in output.read_text(encoding="utf-8")
        assert not (tmp_path / "sweeps/digits/002").exists()
