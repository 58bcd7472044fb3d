"""`weft sweep`: the settings that it tries, and a sweep of real runs."""

import json
import os
import signal
import time

import pytest

from tests.weft_process import PATIENCE_SECONDS, finish, weft_processes
from weft.cli import main
from weft.cli.sweep import Choice, Range, parse_axis, settings_to_try
from weft.errors import CommandLineError


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("width=32,64", Choice("width", ["32", "64"])),
        ("sizes=[1, 2], [3]", Choice("sizes", ["[1, 2]", "[3]"])),
        ("name='a,b',c", Choice("name", ["'a,b'", "c"])),
        ("rate=uniform(0, 0.5)", Range("rate", 0.0, 0.5, is_log=False)),
        ("rate=log(1e-4,1e-1)", Range("rate", 1e-4, 1e-1, is_log=True)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_values_of_a_field(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width", r"'width' is not of the form FIELD=VALUE,VALUE"),
        ("=1", r"is not of the form"),
        ("rate=log(0, 1)", r"a lower and a higher number above 0; got 0 and 1"),
        ("rate=uniform(2, 1)", r"a lower and a higher number; got 2 and 1"),
        ("rate=uniform(2)", r"expected two numbers, as in uniform\("),
        ("rate=log(open('x'), 1)", r"expected two numbers, as in log\("),
    ],
)
def test_values_that_are_wrong(text, message):
    with pytest.raises(CommandLineError, match=message):
        parse_axis(text)


def test_all_combinations():
    axes = [Choice("a", ["1", "2"]), Choice("b", ["x", "y"])]
    tried = [(settings["a"], settings["b"]) for settings in settings_to_try(axes, None, 0)]
    assert tried == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]


def test_random_settings_differ_and_depend_on_the_seed():
    axes = [Range("rate", 1e-4, 1.0, is_log=True), Choice("b", ["x", "y"])]
    settings = settings_to_try(axes, 200, seed=3)
    rates = sorted(float(setting["rate"]) for setting in settings)
    assert len(settings) == 200 and rates[0] >= 1e-4 and rates[-1] <= 1.0
    # Half of the numbers are below the geometric mean of the bounds.
    assert 80 < sum(rate < 1e-2 for rate in rates) < 120
    assert settings == settings_to_try(axes, 200, seed=3) != settings_to_try(axes, 200, seed=4)
    assert len(settings_to_try([Choice("b", ["x", "y"])], 10, seed=0)) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to sweep: name values of a field"),
        (
            ["--over", "learning_rate=log(1e-3, 1)"],
            "add --samples 20 to draw from it, or list its values",
        ),
        (["--over", "width=1", "--over", "width=2"], "--over width=… is given twice"),
        (["--over", "widht=1,2"], "unknown field 'widht'"),
        (["--over", "width=1,2", "--samples", "0"], "--samples 0: expected 1 or more"),
        (["--over", "width=1,2", "--jobs", "0"], "--jobs 0: expected 1 or more"),
    ],
)
def test_sweeps_that_cannot_be_run(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "digits", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_runs_are_compared_and_kept(tmp_path, python_server):
    words = ["sweep", "digits", "--over", "learning_rate=1e-2,1e-5,1e-3", "--metric", "accuracy"]
    words += ["--best", "highest", "--jobs", "2", "batch_size=64", "steps=40"]
    sweep = tmp_path / "sweeps/digits"
    (sweep / "003/run.json").mkdir(parents=True)  # which no run can write
    with weft_processes(python_server, cwd=tmp_path) as start:
        told = finish(start(*words), code=1)
        assert "003 learning_rate=1e-3\n  failed with exit code 2; the end of sweeps/dig" in told
        rows = [line.split() for line in told.splitlines() if line.startswith(" 00")]
        assert [row[0] for row in rows] == ["001", "002"] and rows[0][1] == "(best)"
        assert float(rows[0][3]) > 0.8 > float(rows[1][2])
        page = (sweep / "comparison.html").read_text(encoding="utf-8")
        assert page.index("001 learning_rate=1e-2 (best)") < page.index("002 learning_rate=1e-5")

        # The same sweep again runs what has failed, and nothing else; another one is refused.
        (sweep / "003/run.json").rmdir()
        assert "\n 003 " in finish(start(*words))
        record = json.loads((sweep / "001/run.json").read_text(encoding="utf-8"))
        assert len(record["starts"]) == 1
        assert "has another sweep" in finish(start(*words, "seed=3"), code=2)


@pytest.mark.long
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
