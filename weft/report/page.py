"""`report.html`: the results of a run, or of several to compare, as one page that needs no server.

It is made from the directories of the runs at any time, also after an interruption and while they
go on. The status page of a run is the same page. This module computes what a page shows; the
templates `run.html`, `status.html` and `comparison.html` show it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.report.charts import (
    NUM_STYLES,
    Chart,
    Point,
    Series,
    finite,
    line_chart,
    number,
    smoothed,
)
from weft.report.display import duration_text, metric_text
from weft.report.readings import LOSSES
from weft.report.rendering import render
from weft.report.results import (
    TRAIN_SUMMARIES,
    Results,
    config_values,
    named,
    read_results,
)
from weft.serialization.directory import Directory
from weft.trainer.goodput import goodput_of

REPORT_FILE = "report.html"


def write_report(directory: str) -> Path:
    """Writes the report of a run into its directory and returns the path of the page."""
    Directory(directory).write(REPORT_FILE, render_report(directory))
    return Path(directory, REPORT_FILE)


def render_report(*directories: str) -> str:
    """Returns the report of a run, or a comparison of several, as HTML.

    Raises RunDirError if one is not the directory of a run.
    """
    runs = [read_results(directory) for directory in directories]
    if len(runs) == 1:
        return render("run.html", title=runs[0].name, run=run_page(runs[0]))
    _make_names_distinct(runs)
    return render_comparison(runs)


def render_comparison(runs: Sequence[Results]) -> str:
    """Returns the comparison of runs with different names as HTML, in their order."""
    if len(runs) == 2:
        title = f"{runs[0].name} and {runs[1].name}"
    else:
        title = f"{len(runs)} runs"
    return render("comparison.html", title=title, comparison=_comparison(runs))


def _make_names_distinct(runs: Sequence[Results]) -> None:
    names = {run.name for run in runs}
    if len(names) < len(runs):
        for index, run in enumerate(runs, start=1):
            run.name = f"{run.name} ({index})"


# Elements of pages, which the macros of `templates/parts.html` draw.


class Table(NamedTuple):
    """Table of texts; without a head, the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Figure(NamedTuple):
    """Lines over the steps.

    Attributes:
        legend: The style of each line by its name; empty if it is that of a `Gallery`.
        linear: A chart, or one for broad windows and one for narrow ones.
        logarithmic: The same with that scale, to switch to; empty if it would hardly differ.
    """

    title: str
    legend: Mapping[str, int]
    linear: Sequence[Chart]
    logarithmic: Sequence[Chart]


class Gallery(NamedTuple):
    """Small figures in rows, with one legend."""

    legend: Mapping[str, int]
    figures: Sequence[Figure]


class Sample(NamedTuple):
    """Text that a model has continued."""

    step: str
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class RunPage:
    """Values on the page of a run. Sections that are None or empty are left out.

    Attributes:
        status: How far the run is, or how it ended.
        goodput: Where the time has gone, a row for each kind.
        metrics: The model's metrics in training and evaluation over each other.
        highlights: The newest and the best evaluation of each evaler.
        evaluations: A row for each evaluation, and for the baselines.
        measurements: A row for each metric that `weft eval` measured, the newest first.
        curves: Everything that was reported.
        starts: A row of versions and devices for each start.
        corpora: Facts about each corpus, by the first field of the config that names it.
    """

    status: str
    facts: Table
    goodput: Table | None
    loss: Figure | None
    metrics: Gallery
    highlights: Table | None
    evaluations: Table | None
    measurements: Table | None
    samples: Sequence[Sample]
    curves: Gallery
    starts: Table | None
    corpora: Mapping[str, Table]
    config: str


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Values on the page that compares runs.

    Attributes:
        results: A row for each run.
        curves: The evaluations of the runs over each other.
        differing_fields: Of their configs; None if a config is missing.
    """

    results: Table
    train_loss: Figure
    curves: Gallery
    differing_fields: Table | None


def run_page(run: Results) -> RunPage:
    """Returns what the page of a run shows."""
    samples: list[Sample] = []
    for sample in reversed(run.record.get("samples", [])):
        samples.append(
            Sample(f"{sample['step']:,}", sample["prompt"], sample["text"])
        )
    return RunPage(
        status=_status(run),
        facts=Table([], list(_facts(run).items())),
        goodput=_goodput(run),
        loss=_loss(run),
        metrics=_metrics(run),
        highlights=_highlights(run),
        evaluations=_evaluations(run),
        measurements=_measurements(run),
        samples=samples,
        curves=_curves(run),
        starts=_starts(run),
        corpora=_corpora(run),
        config=run.config,
    )


_REASONS = {
    "max_step": "finished",
    "input ended": "the data ended",
    "early stopping": "stopped early, since its evaluations no longer improved",
}


def _status(run: Results) -> str:
    end = run.record.get("end")
    if end is not None:
        reason = end["reason"]
        is_error = ":" in reason
        if reason in _REASONS:
            ending = _REASONS[reason]
        elif is_error:
            ending = f"ended by {reason}"
        else:
            ending = f"stopped by {reason}"
        return f"{end['step']:,} steps, {ending}"
    if run.live:
        return "running"
    if not run.times:
        return "no steps yet"
    if run.in_use:
        return f"at step {run.last_step:,}, not ended"
    return f"at step {run.last_step:,}, killed or lost: no end was written"


def _facts(run: Results) -> dict[str, str]:
    facts: dict[str, str] = {}
    if run.live is not None:
        facts.update(run.live)
    else:
        if run.seconds:
            facts["duration"] = duration_text(run.seconds)
        if run.speed:
            value, unit = run.speed
            facts["speed"] = f"{number(value)} {unit}"
        goodput = goodput_of(run.record)
        if goodput is not None:
            facts["goodput"] = f"{goodput.share:.1%}"
    model = run.record.get("model")
    if model:
        count = model["parameters"]
        trained = model.get("trained", count)
        facts["parameters"] = f"{count:,}"
        if trained < count:
            facts["parameters"] += f", {trained:,} of them trained"
    starts = run.record.get("starts")
    if starts:
        last_start = starts[-1]
        for name in ("devices", "processes", "platform"):
            if name in last_start:
                facts[name] = str(last_start[name])
        packages = [
            name for name in ("weft", "jax", "python") if name in last_start
        ]
        facts["versions"] = ", ".join(
            f"{name} {last_start[name]}" for name in packages
        )
        facts["last start"] = last_start["time"]
    return facts


_KINDS_OF_TIME = {
    "steps": "steps that count",
    "input": "waiting for input",
    "compilation": "compilation and first steps",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "restarts": "starts and restarts",
    "lost": "lost steps",
}


def _goodput(run: Results) -> Table | None:
    goodput = goodput_of(run.record)
    if goodput is None or goodput.elapsed <= 0:
        return None
    seconds_by_title: dict[str, float] = {}
    for kind, title in _KINDS_OF_TIME.items():
        seconds_by_title[title] = goodput.seconds.get(kind, 0.0)
    other_seconds = goodput.elapsed - sum(seconds_by_title.values())
    seconds_by_title["other"] = max(0.0, other_seconds)
    rows: list[list[str]] = []
    for title, seconds in seconds_by_title.items():
        share = f"{seconds / goodput.elapsed:.1%}"
        rows.append([title, duration_text(seconds), share])
    return Table(["", "time", "share"], rows)


def _loss(run: Results) -> Figure | None:
    train = run.train("loss")
    series: list[Series] = []
    if train:
        series.append(Series("each step", train, faint=True))
        series.append(Series("train, averaged", smoothed(train)))
    series += _eval_series(run, "loss")
    if not series:
        return None
    baselines = run.record.get("baselines", {})
    levels = {
        name: losses["nats_per_token"] for name, losses in baselines.items()
    }
    return _figure("loss", series, levels=levels)


def _eval_points(run: Results, evaler: str, name: str) -> list[Point]:
    """Returns the curve of the summary with the shortest path that ends in a name."""
    points = named(run.evalers.get(evaler, {}), name)
    return finite(points or [])


def _eval_series(run: Results, name: str) -> list[Series]:
    series: list[Series] = []
    # Style 0 is that of the training.
    for style, evaler in enumerate(run.evalers, start=1):
        points = _eval_points(run, evaler, name)
        if points:
            series.append(Series(evaler, points, style, dots=True))
    return series


def _metrics(run: Results) -> Gallery:
    series_by_title: dict[str, list[Series]] = {}
    for name in _metric_names([run]):
        train = run.train(name)
        series: list[Series] = []
        if train:
            series.append(Series("train, averaged", smoothed(train)))
        series_by_title[_spaced(name)] = series + _eval_series(run, name)
    return _gallery(series_by_title)


def _metric_names(runs: Iterable[Results]) -> list[str]:
    """Returns the names of the model's metrics, as the evalers report them."""
    eval_paths: list[str] = []
    train_paths: list[str] = []
    for run in runs:
        train_paths += run.curves.get(TRAIN_SUMMARIES, {})
        for curves in run.evalers.values():
            eval_paths += curves
    names: set[str] = set()
    for path in eval_paths or train_paths:
        name = path.removeprefix("model/")
        is_loss = any(part in name for part in LOSSES)
        if "/" not in name and not is_loss:
            names.add(name)
    return sorted(names)


def _measurements(run: Results) -> Table | None:
    rows: list[list[str]] = []
    for evaluation in reversed(run.evaluations):
        for name, value in evaluation["metrics"].items():
            error = evaluation["standard_errors"].get(name)
            rows.append(
                [
                    evaluation["data"],
                    name,
                    "–" if value is None else metric_text(value),
                    "" if error is None else f"± {metric_text(error)}",
                    f"{evaluation['num_examples']:,}",
                    evaluation["settings"],
                ]
            )
    if not rows:
        return None
    head = ["data", "metric", "value", "error", "examples", "settings"]
    return Table(head, rows)


def _highlights(run: Results) -> Table | None:
    """Returns the newest evaluation of each evaler and that with the best value of its metric.

    The metric is that by which the run keeps a checkpoint, or else the loss.
    """
    evaluations = _values_by_evaluation(run)
    columns = _columns_of_values(evaluations)
    rows: list[list[str]] = []
    for evaler in run.evalers:
        values_by_step: dict[float, dict[str, float]] = {}
        for (name, step), values in evaluations.items():
            if name == evaler:
                values_by_step[step] = values
        if not values_by_step:
            continue
        newest_step = max(values_by_step)
        steps = {f"{evaler}, newest": newest_step}
        metric, sign = _kept_metric(run, evaler)
        finite_steps = [
            step
            for step, values in values_by_step.items()
            if math.isfinite(values.get(metric, math.nan))
        ]
        if finite_steps:
            steps[f"{evaler}, best {_spaced(metric)}"] = min(
                finite_steps,
                key=lambda step: sign * values_by_step[step][metric],
            )
        for title, step in steps.items():
            cells = _cells(values_by_step[step], columns)
            rows.append([title, *cells, f"{step:,.0f}"])
    if not rows:
        return None
    return Table(["", *map(_spaced, columns), "step"], rows)


def _kept_metric(run: Results, evaler: str) -> tuple[str, int]:
    """Returns the metric of the best evaluation, and -1 if more of it is better, else 1."""
    config = config_values(run.config)
    path = "checkpointer.keep_best"
    if config.get(f"{path}.metric.evaler_name") != repr(evaler):
        return "loss", 1
    metric = config.get(f"{path}.metric.metric_name", "'loss'").strip("'")
    sign = -1 if config.get(f"{path}.mode") == "'max'" else 1
    return metric, sign


def _values_by_evaluation(
    run: Results,
) -> dict[tuple[str, float], dict[str, float]]:
    """Returns the values of evaluations by name, for each evaler and step."""
    values_by_evaluation: dict[tuple[str, float], dict[str, float]] = {}
    for evaler, curves in run.evalers.items():
        for path, points in curves.items():
            name = path.removeprefix("model/")
            for step, value in points:
                values_by_evaluation.setdefault((evaler, step), {})[name] = (
                    value
                )
    return values_by_evaluation


def _columns_of_values(
    evaluations: Mapping[tuple[str, float], Mapping[str, float]],
) -> list[str]:
    names: set[str] = set()
    for values in evaluations.values():
        names.update(values)
    return sorted(names, key=lambda name: (name != "loss", name))


def _evaluations(run: Results) -> Table | None:
    values_by_evaluation = _values_by_evaluation(run)
    if not values_by_evaluation:
        return None
    columns = _columns_of_values(values_by_evaluation)
    rows: list[list[str]] = []
    for (evaler, step), values in values_by_evaluation.items():
        rows.append([evaler, f"{step:,.0f}", *_cells(values, columns)])
    for name, losses in run.record.get("baselines", {}).items():
        values = {
            "loss": losses["nats_per_token"],
            "bits_per_byte": losses["bits_per_byte"],
        }
        rows.append([name, "", *_cells(values, columns)])
    return Table(["", "step", *map(_spaced, columns)], rows)


def _cells(values: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    cells: list[str] = []
    for name in columns:
        cells.append(metric_text(values[name]) if name in values else "")
    return cells


def _curves(run: Results) -> Gallery:
    series_by_title: dict[str, list[Series]] = {}
    for style, (reporter, curves) in enumerate(run.curves.items()):
        reporter_name = "train" if reporter == TRAIN_SUMMARIES else reporter
        for path, points in sorted(curves.items()):
            if len(finite(points)) > 1:
                series_by_title[f"{reporter_name}: {path}"] = [
                    Series(reporter_name, points, style)
                ]
    return _gallery(series_by_title)


def _starts(run: Results) -> Table | None:
    starts = run.record.get("starts")
    if not starts:
        return None
    names = list(starts[-1])
    rows: list[list[str]] = []
    for start in starts:
        rows.append([str(start.get(name, "")) for name in names])
    return Table(names, rows)


def _corpora(run: Results) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for path, facts in run.record.get("corpora", {}).items():
        table = Table([], [(name, str(value)) for name, value in facts.items()])
        # An evaler often reads the corpus that the model is trained on.
        if table not in tables.values():
            tables[path] = table
    return tables


def _comparison(runs: Sequence[Results]) -> _Comparison:
    train_series: list[Series] = []
    for style, run in enumerate(runs):
        train_series.append(
            Series(run.name, smoothed(run.train("loss")), style)
        )
    return _Comparison(
        results=_results(runs),
        train_loss=_figure("train loss", train_series),
        curves=_compared_curves(runs),
        differing_fields=_differing_fields(runs),
    )


class _EvalColumn(NamedTuple):
    evaler: str
    summary: str

    @property
    def title(self) -> str:
        return f"{self.evaler} {_spaced(self.summary)}"


_COMPARED_FACTS = ("duration", "speed", "parameters", "devices")


def _results(runs: Sequence[Results]) -> Table:
    columns = _eval_columns(runs)
    rows: list[list[str]] = []
    for run in runs:
        row = [run.name]
        for column in columns:
            row.append(
                _last_value(_eval_points(run, column.evaler, column.summary))
            )
        row += [_last_value(smoothed(run.train("loss"))), _status(run)]
        facts = _facts(run)
        row += [facts.get(name, "") for name in _COMPARED_FACTS]
        rows.append(row)
    titles = [column.title for column in columns]
    return Table(["run", *titles, "train loss", "", *_COMPARED_FACTS], rows)


def _last_value(points: Sequence[Point]) -> str:
    return number(points[-1][1]) if points else ""


def _eval_columns(runs: Sequence[Results]) -> list[_EvalColumn]:
    evalers: dict[str, None] = {}  # in the order of the runs
    for run in runs:
        evalers |= dict.fromkeys(run.evalers)
    summaries = ["loss", *_metric_names(runs)]
    columns: list[_EvalColumn] = []
    for evaler in evalers:
        columns += [_EvalColumn(evaler, summary) for summary in summaries]
    return columns


def _compared_curves(runs: Sequence[Results]) -> Gallery:
    series_by_title: dict[str, list[Series]] = {}
    for column in _eval_columns(runs):
        series: list[Series] = []
        for style, run in enumerate(runs):
            points = _eval_points(run, column.evaler, column.summary)
            if points:
                series.append(Series(run.name, points, style, dots=True))
        if series:
            series_by_title[column.title] = series
    return _gallery(series_by_title)


_MISSING = "—"


def _differing_fields(runs: Sequence[Results]) -> Table | None:
    if not all(run.config for run in runs):
        return None
    configs = [config_values(run.config) for run in runs]
    paths: dict[str, None] = {}  # in the order of the configs
    for config in configs:
        paths |= dict.fromkeys(config)
    cells_by_path: dict[str, list[str]] = {}
    for path in paths:
        cells = [config.get(path, _MISSING) for config in configs]
        # Where two classes differ, so do their fields, which would only fill the table.
        parent = path.rpartition(".")[0]
        is_of_another_class = _MISSING in cells and parent in cells_by_path
        if len(set(cells)) > 1 and not is_of_another_class:
            cells_by_path[path] = cells
    rows = [[path, *cells] for path, cells in cells_by_path.items()]
    return Table(["field", *(run.name for run in runs)], rows)


# Width and height of the charts of a figure.
_FULL_WIDTH = ((760, 340), (380, 260))
_SMALL = ((320, 210),)


def _figure(
    title: str,
    series: Sequence[Series],
    sizes: Sequence[tuple[int, int]] = _FULL_WIDTH,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    linear: list[Chart] = []
    logarithmic: list[Chart] = []
    has_two_scales = _has_two_scales(series)
    for width, height in sizes:
        chart = functools.partial(
            line_chart,
            series,
            y_title=title,
            levels=levels,
            width=width,
            height=height,
        )
        linear.append(chart())
        if has_two_scales:
            logarithmic.append(chart(is_log=True))
    return Figure(title, _legend(series), linear, logarithmic)


def _gallery(series_by_title: Mapping[str, Sequence[Series]]) -> Gallery:
    figures: list[Figure] = []
    legend: dict[str, int] = {}
    for title, series in series_by_title.items():
        figure = _figure(title, series, _SMALL)
        legend |= figure.legend
        figures.append(figure._replace(legend={}))
    return Gallery(legend, figures)


def _has_two_scales(series: Sequence[Series]) -> bool:
    """Returns whether a logarithmic scale is possible, and differs from a linear one."""
    ys: list[float] = []
    for line in series:
        ys += [y for _, y in finite(line.points)]
    return bool(ys) and min(ys) > 0 and max(ys) >= 2 * min(ys)


def _legend(series: Iterable[Series]) -> dict[str, int]:
    return {
        line.name: line.style % NUM_STYLES for line in series if not line.faint
    }


def _spaced(name: str) -> str:
    return name.replace("_", " ")
