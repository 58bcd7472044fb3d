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
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.errors import RunDirError
from weft.report.charts import Point, finite
from weft.serialization.directory import Directory
from weft.trainer import run_dir, run_lock
from weft.trainer.summary_writer.event_file import SessionLog, read_events
from weft.trainer.summary_writer.files import JSON_LINES_FILE, read_json_lines

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
    """

    name: str
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curves: dict[str, Curves] = dataclasses.field(default_factory=dict)
    times: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    config: str = ""
    live: Mapping[str, str] | None = None
    in_use: bool = False

    def train(self, name: str) -> list[Point]:
        """Returns the finite points of a training curve by the last name of its path."""
        return finite(named(self.curves.get(TRAIN_SUMMARIES, {}), name) or [])

    @property
    def evalers(self) -> dict[str, Curves]:
        """Curves by evaler."""
        return {name: of for name, of in self.curves.items() if name != TRAIN_SUMMARIES}

    @property
    def last_step(self) -> int:
        """Last step with a summary, or of the end of the run."""
        end = self.record.get("end") or {}
        return max([end.get("step", 0), *(step for _, step in self.times)])

    @property
    def seconds(self) -> float:
        """Seconds from the starts of the run to the last summaries before the next start."""
        moments, starts = [moment for moment, _ in self.times], self._starts
        total = 0.0
        for start, following in itertools.pairwise([*starts, float("inf")]):
            index = bisect.bisect_left(moments, following)
            total += max(0.0, moments[index - 1] - start) if index else 0.0
        return total

    @property
    def speed(self) -> tuple[float, str] | None:
        """Last reported speed with its unit, or else the mean of the last start, if known."""
        for unit in ("tokens", "examples"):
            if points := self.train(f"{unit}_per_second"):
                return points[-1][1], f"{unit}/s"
        since = [pair for pair in self.times if pair[0] >= max(self._starts, default=0)]
        if since and since[-1][1] > since[0][1] and since[-1][0] > since[0][0]:
            steps, seconds = since[-1][1] - since[0][1], since[-1][0] - since[0][0]
            return steps / seconds, "steps/s"
        return None

    @property
    def _starts(self) -> list[float]:
        times = [start["time"] for start in self.record.get("starts", ())]
        return sorted(datetime.datetime.fromisoformat(time).timestamp() for time in times)


_MAX_CURVES = 5000
"""How many kinds of values of a run are read: a page draws a chart of each."""


def read_results(directory: str) -> Results:
    """Returns the results in the directory of a run.

    Raises RunDirError if the directory is not that of a run, or its record is damaged.
    """
    run = Directory(directory)
    run_dir.check_places(directory)
    config = ""
    with contextlib.suppress(FileNotFoundError):  # lost, or the directory of another program
        config = run_dir.read_config(directory)
    record = run_dir.read_record(directory)
    curves: dict[str, Curves] = {}
    num_curves, times = 0, []
    for folder, names in _summary_files(run).items():
        of_reporter = curves.setdefault(os.path.basename(folder), {})
        for moment, step, values in _read_values(os.path.join(directory, folder), names):
            times.append((moment, step))
            for name, value in values.items():
                if name not in of_reporter:
                    if num_curves == _MAX_CURVES:
                        continue
                    num_curves += 1
                    of_reporter[name] = []
                of_reporter[name].append((step, value))
    if num_curves == _MAX_CURVES:
        logger.warning("%s has many kinds of values; the first %d are shown", directory, num_curves)
    if not (config or record or curves):
        raise RunDirError(
            f"{directory!r} is not the directory of a run: it has no {run_dir.CONFIG_FILE} and no "
            f"{run_dir.SUMMARIES_DIR}. Give the `dir` of a run, such as runs/lm."
        )
    return Results(
        name=Path(directory).absolute().name,
        record=record,
        curves={name: of for name, of in curves.items() if of},
        times=sorted(times),
        config=config,
        in_use=run_lock.is_in_use(directory),
    )


def _summary_files(run: Directory) -> dict[str, list[str]]:
    """Returns the names of the files of summaries by folder, that of the training first."""
    found: dict[str, list[str]] = {}
    for entry in run.walk(run_dir.SUMMARIES_DIR) if run.has_folder(run_dir.SUMMARIES_DIR) else ():
        folder, name = os.path.split(entry.name)
        if name == JSON_LINES_FILE or ".tfevents." in name:
            found.setdefault(folder, []).append(name)
    first = sorted(found, key=lambda folder: (os.path.basename(folder) != TRAIN_SUMMARIES, folder))
    return {folder: sorted(found[folder]) for folder in first}


def _read_values(folder: str, names: list[str]) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Yields time, step and numbers of the summaries in a folder."""
    if JSON_LINES_FILE in names:
        for line in read_json_lines(folder):
            values = {n: x for n, x in line.get("values", {}).items() if not isinstance(x, str)}
            if values:
                yield line["time"], line["step"], values
        return
    events: list[Any] = []
    for name in names:
        for event in read_events(os.path.join(folder, name)):
            if event.session_log.status == SessionLog.START:
                events = [e for e in events if e.step < event.step]
            events.append(event)
    for event in events:
        found = {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}
        if found:
            yield event.wall_time, event.step, found


def named(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of the shortest path that ends in a name, or None."""
    paths = [path for path in values if path.rpartition("/")[2] == name]
    return values[min(paths, key=len)] if paths else None


def config_values(text: str) -> dict[str, str]:
    """Returns the values of a config's text by path, without importing what they name.

    >>> config_values("Trainer.Config(max_step=3, model=Layer.Config(dim=8))")
    {'max_step': '3', 'model': 'Layer.Config', 'model.dim': '8'}
    """
    values: dict[str, str] = {}
    try:
        _add_values(values, "", ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it is another text, or nested
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
            name = key.value if isinstance(key, ast.Constant) else key and ast.unparse(key)
            _add_values(values, f"{prefix}{name}", value)
    else:
        values[path] = ast.unparse(node)
