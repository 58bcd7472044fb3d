"""`weft sweep`: the settings that it tries; tests/journeys/test_sweep.py has real runs."""

import io

import pytest
from rich.console import Console

from weft.cli import main, sweep
from weft.cli.sweep import Choice, Range, Trial, parse_axis, settings_to_try
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


OTHER = "learner.optimizer.inner.learning_rate.decay_steps"


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (100, ["run", "width", "data_dir", "decay_steps", "rate", "lowest", "loss", "step"]),
        (90, ["run", "width", "data_dir", "rate", "lowest", "loss", "step"]),
        (80, ["run", "width", "data_dir", "rate", "lowest", "loss"]),
        (60, ["run", "width", "data_dir", "lowest", "loss"]),
        (26, ["run", "lowest", "loss"]),
    ],
)
def test_table_fits_a_terminal_and_splits_no_number(width, header, monkeypatch):
    trials = []
    for number in (1, 2, 3):
        settings = {
            "model.width": f"{1024 * number}",
            "data_dir": f"data/of-{'long' * number}-names-of-folders",
            OTHER: "100000000",
            "rate": f"0.0{number}234567890123456",
        }
        trials.append(Trial(f"sweeps/lm/00{number}", settings, best=(0.12345, 123_456 * number)))
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("weft.cli.sweep.display.table_console", lambda: console)
    sweep._print_table(trials, "lowest loss")
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == header
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert all("0.1235" in line for line in lines[1:])
    if "rate" in header:
        assert "1024" in lines[1] and "0.01234567890123456" in lines[1]
        assert "data/of-long-names-…" in lines[1]
    if "step" in header:
        assert "123,456" in lines[1]
