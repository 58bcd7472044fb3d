"""`weft sweep`: one run for each of several settings of a recipe, compared in one table.

    sweeps/digits/sweep.json        the recipe and the settings
    sweeps/digits/001/              the directory of the first run, with its output in output.txt
    sweeps/digits/comparison.html   the page that compares the runs, the best one first

Each run is a process of `weft train`. A sweep that was interrupted continues when it is started
again: runs that have ended are kept, the others resume.
"""

import argparse
import ast
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weft import cli
from weft.cli import configs, train
from weft.distributed.watchdog import handle_stop_signals
from weft.errors import (
    CommandLineError,
    FileRefusedError,
    RunDirError,
    did_you_mean,
)
from weft.launch.processes import end_with_parent, last_lines
from weft.report import display
from weft.report.charts import Point, finite
from weft.report.page import render_comparison
from weft.report.results import Results, named, read_results
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_local_path, printable
from weft.trainer import has_ended, run_dir

RECORD_FILE = "sweep.json"
COMPARISON_FILE = "comparison.html"
OUTPUT_FILE = "output.txt"
_POLL_SECONDS = 0.1
_LONGEST_VALUE = 20
_DISTRIBUTIONS = ("uniform", "log")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Values of a field to try, as the texts of overrides."""

    field: str
    values: Sequence[str]

    def draw(self, rng: random.Random) -> str:
        """Returns one of the values."""
        return rng.choice(self.values)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers to draw for a field; with `is_log`, uniformly in the logarithm."""

    field: str
    low: float
    high: float
    is_log: bool

    def draw(self, rng: random.Random) -> str:
        """Returns a number with three significant digits."""
        if self.is_log:
            number = math.exp(
                rng.uniform(math.log(self.low), math.log(self.high))
            )
        else:
            number = rng.uniform(self.low, self.high)
        return f"{number:.3g}"


@dataclasses.dataclass
class Trial:
    """A run of a sweep.

    Attributes:
        settings: the text of each varied field.
        best: the best value of the metric, and its step; None if the run has none.
    """

    directory: str
    settings: Mapping[str, str]
    best: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The number of the trial and its settings."""
        settings = " ".join(
            f"{field}={value}" for field, value in self.settings.items()
        )
        return f"{os.path.basename(self.directory)} {settings}"


def parse_axis(text: str) -> Choice | Range:
    """Reads the text of `--over`.

    >>> parse_axis("learning_rate=1e-3,3e-4")
    Choice(field='learning_rate', values=['1e-3', '3e-4'])
    >>> parse_axis("dropout=uniform(0, 0.5)")
    Range(field='dropout', low=0.0, high=0.5, is_log=False)

    Raises CommandLineError for a text of another form.
    """
    field, equals, values = text.partition("=")
    field, values = field.strip(), values.strip()
    if not (field and equals and values):
        raise CommandLineError(
            f"--over {text!r} is not of the form FIELD=VALUE,VALUE or FIELD=log(LOW, HIGH); write, "
            "for example, --over learning_rate=1e-3,3e-4."
        )
    name, parenthesis, arguments = values.partition("(")
    if not (parenthesis and name in _DISTRIBUTIONS):
        return Choice(field, _split_at_commas(values))
    try:
        low, high = ast.literal_eval(f"({arguments}")
        low, high = float(low), float(high)
    except (SyntaxError, TypeError, ValueError):
        raise CommandLineError(
            f"--over {text!r}: expected two numbers, as in {name}(1e-4, 1e-1)."
        ) from None
    lowest = 0.0 if name == "log" else -math.inf
    if not lowest < low < high < math.inf:
        above = " above 0" if name == "log" else ""
        raise CommandLineError(
            f"--over {text!r}: expected a lower and a higher number{above}; got {low:g} and "
            f"{high:g}."
        )
    return Range(field, low, high, is_log=name == "log")


def _split_at_commas(text: str) -> list[str]:
    """Splits values at commas that are in no brackets and no quotes."""
    values, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            values.append(text[start:position].strip())
            start = position + 1
    values.append(text[start:].strip())
    return values


def settings_to_try(
    axes: Sequence[Choice | Range], num_samples: int | None, seed: int
) -> list[dict[str, str]]:
    """Returns the settings of each run: all combinations, or random ones that differ.

    Raises CommandLineError if two axes have one field, or a range has no number of samples.
    """
    fields = [axis.field for axis in axes]
    for field in fields:
        if fields.count(field) > 1:
            raise CommandLineError(
                f"--over {field}=… is given twice; write its values in one."
            )
    if num_samples is None:
        values_by_field = []
        for axis in axes:
            if isinstance(axis, Range):
                raise CommandLineError(
                    f"--over {axis.field} is a range: add --samples 20 to draw from it, "
                    "or list its values."
                )
            values_by_field.append(axis.values)
        combinations = itertools.product(*values_by_field)
        return [
            dict(zip(fields, values, strict=True)) for values in combinations
        ]
    if num_samples < 1:
        raise CommandLineError(f"--samples {num_samples}: expected 1 or more.")
    rng = random.Random(seed)
    distinct: dict[tuple[str, ...], None] = {}
    # Few choices have fewer combinations than samples.
    for _ in range(100 * num_samples):
        if len(distinct) < num_samples:
            distinct[tuple(axis.draw(rng) for axis in axes)] = None
    return [dict(zip(fields, values, strict=True)) for values in distinct]


def run(arguments: argparse.Namespace) -> int:
    """Runs the sweep; returns 0 if all runs have ended, 1 if one failed, or that of a signal."""
    cli.continue_without_output()
    recipe, overrides = train.split_arguments(arguments.recipe_and_overrides)
    if not arguments.over:
        raise CommandLineError(
            "there is nothing to sweep: name values of a field, such as "
            "--over learning_rate=1e-3,3e-4."
        )
    if arguments.jobs < 1:
        raise CommandLineError(f"--jobs {arguments.jobs}: expected 1 or more.")
    axes = [parse_axis(text) for text in arguments.over]
    settings = settings_to_try(axes, arguments.samples, arguments.seed)
    directory = arguments.dir or os.path.join("sweeps", train.job_name(recipe))
    width = max(3, len(str(len(settings))))
    trials = []
    for number, fields in enumerate(settings, start=1):
        trials.append(
            Trial(os.path.join(directory, f"{number:0{width}}"), fields)
        )
    commands = []
    for trial in trials:
        words = [
            *overrides,
            *(f"{field}={value}" for field, value in trial.settings.items()),
        ]
        words.append(f"dir={trial.directory}")
        configs.load_run(
            recipe, words, **arguments.trust
        )  # raises for a setting that is wrong
        options = train.options_for_texts(arguments)
        commands.append([*train.THIS_WEFT, "train", *options, recipe, *words])
    _check_record(
        directory,
        {"recipe": recipe, "overrides": overrides, "settings": settings},
    )
    _check_folders(directory, trials)
    print(
        printable(
            f"{len(trials)} runs of {recipe} in {directory}, {arguments.jobs} at a time"
        )
    )
    processes = _Processes(arguments.jobs)
    num_failed = 0
    for trial, code in processes.run(trials, commands):
        num_failed += code != 0
        _find_best(trial, arguments.metric, arguments.best)
        _print_end(trial, code, arguments.metric)
    _compare(directory, trials, arguments.metric, arguments.best)
    if processes.stopped_by is not None:
        print("stopped; start the same sweep again to continue it")
        return 128 + processes.stopped_by
    return 1 if num_failed else 0


def _check_record(directory: str, record: Mapping[str, object]) -> None:
    """Writes what a sweep runs, or compares it with what the directory has.

    Raises CommandLineError if the directory is that of another sweep.
    """
    check_local_path(directory, "--dir")
    os.makedirs(directory, exist_ok=True)
    folder = Directory(directory)
    if not folder.has_file(RECORD_FILE):
        folder.write(RECORD_FILE, json.dumps(record, indent=1))
        return
    try:
        earlier_record = folder.read_json(RECORD_FILE)
    except ValueError:
        earlier_record = None
    if earlier_record != record:
        raise CommandLineError(
            f"{directory!r} has another sweep: see {RECORD_FILE} there. Choose another directory "
            f"with --dir {directory}-2, or remove this one."
        )


def _check_folders(directory: str, trials: Sequence[Trial]) -> None:
    """Refuses links in place of the directories of runs: they may lead anywhere."""
    folder = Directory(directory)
    for trial in trials:
        folder.has_folder(os.path.basename(trial.directory))


class _Processes:
    """Starts processes, a few at a time, and stops them when this process is asked to stop."""

    def __init__(self, num_at_a_time: int):
        self._num_at_a_time = num_at_a_time
        self._running: dict[subprocess.Popen[bytes], Trial] = {}
        self.stopped_by: signal.Signals | None = None

    def run(
        self, trials: Sequence[Trial], commands: Sequence[Sequence[str]]
    ) -> Iterator[tuple[Trial, int]]:
        """Yields each trial that has ended, with its exit code."""
        waiting = list(zip(trials, commands, strict=True))
        with handle_stop_signals(self._on_signal), self._ended_at_exit():
            while self._running or (waiting and self.stopped_by is None):
                while waiting and self.stopped_by is None:
                    trial, command = waiting[0]
                    if _has_ended(trial):
                        waiting.pop(0)
                        yield trial, 0
                    elif len(self._running) < self._num_at_a_time:
                        waiting.pop(0)
                        self._start(trial, command)
                    else:
                        break
                time.sleep(_POLL_SECONDS)
                for process in [
                    x for x in self._running if x.poll() is not None
                ]:
                    yield self._running.pop(process), process.returncode

    @contextlib.contextmanager
    def _ended_at_exit(self) -> Iterator[None]:
        try:
            yield
        finally:
            for process in self._running:
                process.terminate()

    def _start(self, trial: Trial, command: Sequence[str]) -> None:
        os.makedirs(trial.directory, exist_ok=True)
        with Directory(trial.directory).open_to_append(OUTPUT_FILE) as output:
            process = subprocess.Popen(
                end_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches it once, through this process
            )
        self._running[process] = trial

    def _on_signal(self, number: signal.Signals) -> None:
        self.stopped_by = number
        for process in self._running:
            process.send_signal(signal.SIGTERM)


def _has_ended(trial: Trial) -> bool:
    if not os.path.isdir(trial.directory):
        return False
    try:
        end = run_dir.read_record(trial.directory).get("end")
    except (RunDirError, FileRefusedError):
        return False  # its run says what is wrong with it
    return end is not None and has_ended(end["reason"])


def _results(trial: Trial) -> Results | None:
    """Returns the results of a trial; None if it has not got so far."""
    if not os.path.isdir(trial.directory):
        return None
    try:
        return read_results(trial.directory)
    except (RunDirError, FileRefusedError):
        return None


# Results.


def _find_best(trial: Trial, metric: str, direction: str) -> None:
    """Sets the best value of a metric among a trial's evaluations, or else in its training."""
    results = _results(trial)
    points = metric_points(results, metric) if results is not None else []
    if points:
        choose = max if direction == "highest" else min
        step, value = choose(points, key=lambda point: point[1])
        trial.best = value, step


def metric_points(results: Results, metric: str) -> Sequence[Point]:
    """Returns the finite steps and values of a metric: of the first evaler that has it."""
    for curves in results.evalers.values():
        points = finite(named(curves, metric) or [])
        if points:
            return points
    return results.train(metric)


def _metric_names(trials: Sequence[Trial]) -> set[str]:
    names = set()
    for trial in trials:
        results = _results(trial)
        if results is not None:
            for curves in results.curves.values():
                names.update(path.rpartition("/")[2] for path in curves)
    return names


def _print_end(trial: Trial, code: int, metric: str) -> None:
    line = trial.name
    if trial.best is not None:
        value, step = trial.best
        line += f"  {metric} {value:.4g} at step {step:,.0f}"
    display.print_words(display.table_console(), line)
    if code != 0:
        output = os.path.join(trial.directory, OUTPUT_FILE)
        print(
            printable(f"  failed with exit code {code}; the end of {output}:")
        )
        for output_line in last_lines(output)[-5:]:
            print(printable(f"    {output_line}"))


def _compare(
    directory: str, trials: Sequence[Trial], metric: str, direction: str
) -> None:
    """Prints the table of the trials, the best one first, and writes the page."""
    sign = -1 if direction == "highest" else 1
    ranked = sorted(
        (trial for trial in trials if trial.best is not None),
        key=lambda trial: sign * trial.best[0] if trial.best else math.inf,
    )
    if not ranked:
        hint = did_you_mean(metric, _metric_names(trials))
        print(printable(f"no run has a value of --metric {metric}. {hint}"))
        return
    results = []
    for rank, trial in enumerate(ranked):
        result = read_results(trial.directory)
        result.name = trial.name + _mark(rank)
        results.append(result)
    _print_table(ranked, f"{direction} {metric}")
    Directory(directory).write(COMPARISON_FILE, render_comparison(results))
    print(printable(f"compared in {Path(directory, COMPARISON_FILE)}"))


def _mark(rank: int) -> str:
    return " (best)" if rank == 0 else ""


def _print_table(ranked: Sequence[Trial], metric_header: str) -> None:
    """Prints the trials; a narrow terminal has no columns of fields that vary least."""
    fields = list(ranked[0].settings)
    header_of_field = _short_names(fields)
    numbers_of_values = {}
    for field in fields:
        values = {trial.settings[field] for trial in ranked}
        numbers_of_values[field] = len(values)
    headers = [header_of_field[field] for field in fields]
    headers += [metric_header, "step"]
    table = display.tree_table("run", headers, numbers=headers)
    for rank, trial in enumerate(ranked):
        assert trial.best is not None
        value, step = trial.best
        number = os.path.basename(trial.directory)
        cells = [_shortened(text) for text in trial.settings.values()]
        table.add_row(
            number + _mark(rank), *cells, f"{value:.4g}", f"{step:,.0f}"
        )
    constants: list[str] = []
    variables: list[str] = []
    most_varied = sorted(
        fields, key=numbers_of_values.__getitem__, reverse=True
    )
    for field in reversed(most_varied):
        if numbers_of_values[field] == 1:
            constants.append(header_of_field[field])
        else:
            variables.append(header_of_field[field])
    display.print_table(
        display.table_console(),
        table,
        less_important=[*constants, "step", *variables],
    )


def _short_names(fields: Sequence[str]) -> dict[str, str]:
    """Returns the last name of the path of each field, or the path where two have that name.

    >>> _short_names(["model.width", "learner.rate", "evaler.rate"])
    {'model.width': 'width', 'learner.rate': 'learner.rate', 'evaler.rate': 'evaler.rate'}
    """
    last_names = [field.rpartition(".")[2] for field in fields]
    header_of_field = {}
    for field, name in zip(fields, last_names, strict=True):
        is_unique = last_names.count(name) == 1 and name != "step"
        header_of_field[field] = name if is_unique else field
    return header_of_field


def _shortened(text: str) -> str:
    """Returns a value that a table has room for: a number stays whole."""
    try:
        float(text)
    except ValueError:
        if len(text) > _LONGEST_VALUE:
            return f"{text[: _LONGEST_VALUE - 1]}…"
    return text
