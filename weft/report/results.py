"""Results of a run, read from its directory: curves, config, record.

The summaries are read from the files of a `JsonLinesWriter`, or else from TensorBoard's. They can
be read at any time, also during the run.
"""

import ast
import bisect
import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import RunDirError
from weft.report.charts import Point, finite
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_json
from weft.trainer import run_dir, run_lock
from weft.trainer.summary_writer.event_file import SessionLog, read_events
from weft.trainer.summary_writer.files import JSON_LINES_FILE, read_json_lines
from weft.typing import T

logger = logging.getLogger(__name__)

TRAIN_SUMMARIES = "train_train"

Curves = dict[str, list[Point]]


@dataclasses.dataclass
class Results:
    """Results of a run.

    Attributes:
        record: The contents of `run.json`, see `weft.trainer.run_dir`.
        curves: Pairs of step and value by reporter (`train_train`, then evalers) and summary path.
        times: Pairs of time, in seconds, and step of the summaries, sorted.
        config: The config as text.
        live: Rows of what the run does now; None for the files of a run.
        in_use: Whether a process is writing to the run's directory.
        evaluations: What `weft eval` measured, as `add_evaluation` keeps it.
    """

    name: str
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curves: dict[str, Curves] = dataclasses.field(default_factory=dict)
    times: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    config: str = ""
    live: Mapping[str, str] | None = None
    in_use: bool = False
    evaluations: Sequence[Mapping[str, Any]] = ()

    def train(self, name: str) -> list[Point]:
        """Returns the finite points of a training curve by the last name of its path."""
        return finite(named(self.curves.get(TRAIN_SUMMARIES, {}), name) or [])

    @property
    def evalers(self) -> dict[str, Curves]:
        """Curves by evaler."""
        curves = dict(self.curves)
        curves.pop(TRAIN_SUMMARIES, None)
        return curves

    @property
    def last_step(self) -> int:
        """Last step with a summary, or of the end of the run."""
        end = self.record.get("end") or {"step": 0}
        return max([end["step"], *(step for _, step in self.times)])

    @property
    def seconds(self) -> float:
        """Seconds from the starts of the run to the last summaries before the next start."""
        summary_times = [time for time, _ in self.times]
        total = 0.0
        for start, next_start in itertools.pairwise([*self._starts, math.inf]):
            num_earlier = bisect.bisect_left(summary_times, next_start)
            if num_earlier > 0:
                total += max(0.0, summary_times[num_earlier - 1] - start)
        return total

    @property
    def speed(self) -> tuple[float, str] | None:
        """Last reported speed with its unit, or else the mean of the last start, if known."""
        for unit in ("tokens", "examples"):
            points = self.train(f"{unit}_per_second")
            if points:
                return points[-1][1], f"{unit}/s"
        last_start = max(self._starts, default=0)
        times = [
            (time, step) for time, step in self.times if time >= last_start
        ]
        if not times:
            return None
        (first_time, first_step), (last_time, last_step) = times[0], times[-1]
        if last_step <= first_step or last_time <= first_time:
            return None
        return (last_step - first_step) / (last_time - first_time), "steps/s"

    @property
    def _starts(self) -> list[float]:
        times: list[float] = []
        for start in self.record.get("starts", ()):
            times.append(
                datetime.datetime.fromisoformat(start["time"]).timestamp()
            )
        return sorted(times)


EVALUATIONS_FILE = "evaluations.json"
_MAX_EVALUATIONS = 200
_EVALUATIONS_FORM = [
    {
        "task": str,
        "data": str,
        "settings": str,
        "num_examples": int,
        "metrics": {str: (None, float)},
        "standard_errors": {str: (None, float)},
    }
]


def add_evaluation(directory: str, evaluation: Mapping[str, Any]) -> None:
    """Keeps an evaluation of a run's model in the run's directory, the last 200 of them.

    Args:
        evaluation: A value of JSON with `task`, `data` and `settings`, texts; `num_examples`; and
            `metrics` and `standard_errors`, numbers or null by name.

    Raises RunDirError if the file of earlier ones is damaged.
    """
    evaluations = [*_read_evaluations(directory), evaluation]
    text = json.dumps(evaluations[-_MAX_EVALUATIONS:], indent=2)
    Directory(directory).write(EVALUATIONS_FILE, text + "\n")


def _read_evaluations(directory: str) -> list[Mapping[str, Any]]:
    try:
        evaluations = Directory(directory).read_json(EVALUATIONS_FILE)
        check_json(evaluations, _EVALUATIONS_FORM)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        path = os.path.join(directory, EVALUATIONS_FILE)
        raise RunDirError(
            f"{path} cannot be read: {error}. It holds the results of `weft eval`; move it away "
            "to continue."
        ) from error
    return evaluations[-_MAX_EVALUATIONS:]


_MAX_CURVES = 5000
"""How many kinds of values of a run are read: a page draws a chart of each."""


def read_results(directory: str) -> Results:
    """Returns the results in the directory of a run.

    Raises RunDirError if the directory is not that of a run, or its record is damaged.
    """
    run = Directory(directory)
    run_dir.check_places(directory)
    config = ""
    with contextlib.suppress(
        FileNotFoundError
    ):  # lost, or the directory of another program
        config = run_dir.read_config(directory)
    record = run_dir.read_record(directory)
    curves: dict[str, Curves] = {}
    times: list[tuple[float, int]] = []
    num_curves = 0
    for folder, file_names in _summary_files(run).items():
        reporter_curves = curves.setdefault(os.path.basename(folder), {})
        for summaries in _read_summaries(
            os.path.join(directory, folder), file_names
        ):
            times.append((summaries.time, summaries.step))
            for path, value in summaries.values.items():
                if path not in reporter_curves:
                    if num_curves == _MAX_CURVES:
                        continue
                    num_curves += 1
                    reporter_curves[path] = []
                reporter_curves[path].append((summaries.step, value))
    if num_curves == _MAX_CURVES:
        logger.warning(
            "%s has many kinds of values; the first %d are shown",
            directory,
            num_curves,
        )
    if not (config or record or curves):
        raise RunDirError(
            f"{directory!r} is not the directory of a run: it has no {run_dir.CONFIG_FILE} and no "
            f"{run_dir.SUMMARIES_DIR}. Give the `dir` of a run, such as runs/lm."
        )
    return Results(
        name=Path(directory).absolute().name,
        record=record,
        curves={reporter: paths for reporter, paths in curves.items() if paths},
        times=sorted(times),
        config=config,
        in_use=run_lock.is_in_use(directory),
        evaluations=_read_evaluations(directory),
    )


def _summary_files(run: Directory) -> dict[str, list[str]]:
    """Returns the names of the files of summaries by folder, that of the training first."""
    if not run.has_folder(run_dir.SUMMARIES_DIR):
        return {}
    names_by_folder: dict[str, list[str]] = {}
    for entry in run.walk(run_dir.SUMMARIES_DIR):
        folder, name = os.path.split(entry.name)
        if name == JSON_LINES_FILE or ".tfevents." in name:
            names_by_folder.setdefault(folder, []).append(name)

    def order(folder: str) -> tuple[bool, str]:
        return os.path.basename(folder) != TRAIN_SUMMARIES, folder

    return {
        folder: sorted(names_by_folder[folder])
        for folder in sorted(names_by_folder, key=order)
    }


class _Summaries(NamedTuple):
    """Numbers that a reporter has written at a step."""

    time: float
    step: int
    values: dict[str, float]


def _read_summaries(
    folder: str, file_names: Sequence[str]
) -> Iterator[_Summaries]:
    if JSON_LINES_FILE in file_names:
        for line in read_json_lines(folder):
            values: dict[str, float] = {}
            for path, value in line.get("values", {}).items():
                if not isinstance(value, str):
                    values[path] = value
            if values:
                yield _Summaries(line["time"], line["step"], values)
        return
    events: list[Any] = []  # protocol buffers without types
    for name in file_names:
        for event in read_events(os.path.join(folder, name)):
            # A start that resumes from a checkpoint repeats the steps after it.
            if event.session_log.status == SessionLog.START:
                events = [
                    earlier for earlier in events if earlier.step < event.step
                ]
            events.append(event)
    for event in events:
        values = {}
        for summary in event.summary.value:
            if summary.HasField("simple_value"):
                values[summary.tag] = summary.simple_value
        if values:
            yield _Summaries(event.wall_time, event.step, values)


def named(values: Mapping[str, T], name: str) -> T | None:
    """Returns the value of the shortest path that ends in a name, or None."""
    paths = [path for path in values if path.rpartition("/")[2] == name]
    if not paths:
        return None
    return values[min(paths, key=len)]


def config_values(text: str) -> dict[str, str]:
    """Returns the values of a config's text by path, without importing what they name.

    >>> config_values("Trainer.Config(max_step=3, model=Layer.Config(dim=8))")
    {'max_step': '3', 'model': 'Layer.Config', 'model.dim': '8'}
    """
    values: dict[str, str] = {}
    try:
        _add_values(values, "", ast.parse(text.strip(), mode="eval").body)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # it is another text, or nested
        return {"config": text}
    values.pop("", None)
    return values


def _add_values(values: dict[str, str], path: str, node: ast.expr) -> None:
    prefix = f"{path}." if path else ""
    if isinstance(node, ast.Call) and not node.args:
        values[path] = ast.unparse(node.func)
        for keyword in node.keywords:
            _add_values(values, f"{prefix}{keyword.arg}", keyword.value)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                name = key.value
            else:  # no key is that of `**` in a dict
                name = key and ast.unparse(key)
            _add_values(values, f"{prefix}{name}", value)
    else:
        values[path] = ast.unparse(node)
