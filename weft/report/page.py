"""`report.html`: the results of a run, or of several to compare, as one page that needs no server.

It is made from the directories of the runs at any time, also after an interruption and while they
go on. The status page of a run is the same page. The file `report.html` next to this module is the
template; it has no scripts.
"""

import html
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.report.charts import NUM_STYLES, Series, finite, line_chart, number, smoothed
from weft.report.display import duration_text, metric_text
from weft.report.readings import LOSSES
from weft.report.results import TRAIN_SUMMARIES, Results, config_values, named, read_results
from weft.serialization.directory import Directory

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
    return render_run(runs[0]) if len(runs) == 1 else render_comparison(_distinct(runs))


def render_run(run: Results) -> str:
    """Returns the page of a run."""
    return page(f"{run.name} · Weft", run_body(run))


def run_body(run: Results) -> str:
    """Returns the body of the page of a run."""
    sections = [
        _header(run),
        _loss_section(run),
        _metrics_section(run),
        _evaluations_section(run),
        _samples_section(run.record.get("samples", [])),
        _curves_section(run),
        _environment_section(run.record),
        _folded("Config", f"<pre>{html.escape(run.config)}</pre>") if run.config else "",
    ]
    return "\n".join(filter(None, sections))


def render_comparison(runs: Sequence[Results]) -> str:
    """Returns a page that compares runs: results, curves over each other, configs."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    sections = [
        f"<header><h1>{html.escape(title)}</h1></header>",
        _results_section(runs),
        _compared_curves(runs),
        _config_section(runs),
    ]
    return page(f"{title} · Weft", "\n".join(filter(None, sections)))


# Parts of the page of a run.


def _header(run: Results) -> str:
    facts = _table([], list(_facts(run).items())) if _facts(run) else ""
    status = html.escape(_status(run))
    return f"<header><h1>{html.escape(run.name)}</h1><p>{status}</p>{facts}</header>"


_REASONS = {
    "max_step": "finished",
    "input ended": "the data ended",
    "early stopping": "stopped early, since its evaluations no longer improved",
}


def _status(run: Results) -> str:
    end = run.record.get("end")
    if end is None and run.live:
        return "running"
    if end is None:
        if not run.times:
            return "no steps yet"
        how = "not ended" if run.in_use else "killed or lost: no end was written"
        return f"at step {run.last_step:,}, {how}"
    reason = end["reason"]
    is_error = ":" in reason
    how = _REASONS.get(reason, f"ended by {reason}" if is_error else f"stopped by {reason}")
    return f"{end['step']:,} steps, {how}"


def _facts(run: Results) -> dict[str, str]:
    facts = dict(run.live or {})
    if run.live is None and run.seconds:
        facts["duration"] = duration_text(run.seconds)
    if run.speed and run.live is None:
        facts["speed"] = f"{number(run.speed[0])} {run.speed[1]}"
    model = run.record.get("model")
    if model:
        count, trained = model["parameters"], model.get("trained", model["parameters"])
        some = f", {trained:,} of them trained" if trained < count else ""
        facts["parameters"] = f"{count:,}{some}"
    starts = run.record.get("starts")
    if starts:
        start = starts[-1]
        facts |= {n: str(start[n]) for n in ("devices", "processes", "platform") if n in start}
        versions = (f"{n} {start[n]}" for n in ("weft", "jax", "python") if n in start)
        facts["versions"] = ", ".join(versions)
        facts["last start"] = start["time"]
    return facts


def _loss_section(run: Results) -> str:
    train = run.train("loss")
    averaged = Series("train, averaged", smoothed(train))
    series = [Series("each step", train, faint=True), averaged] if train else []
    series += _eval_series(run, "loss")
    if not series:
        return "<section><h2>Loss</h2><p>No summaries were written yet.</p></section>"
    baselines = run.record.get("baselines", {})
    levels = {name: counts["nats_per_token"] for name, counts in baselines.items()}
    return f"<section><h2>Loss</h2>{_chart('loss', series, levels=levels)}</section>"


def _eval_series(run: Results, path: str) -> list[Series]:
    found = {name: finite(named(of, path) or []) for name, of in run.evalers.items()}
    numbered = enumerate(found.items(), start=1)
    return [Series(name, points, style, dots=True) for style, (name, points) in numbered if points]


def _metrics_section(run: Results) -> str:
    """Returns charts of the model's metrics in training and evaluation over each other."""
    charts = {}
    for name in _metric_names([run]):
        train = run.train(name)
        series = [Series("train, averaged", smoothed(train))] if train else []
        charts[name.replace("_", " ")] = series + _eval_series(run, name)
    return f"<section><h2>Metrics</h2>{_small_charts(charts)}</section>" if charts else ""


def _metric_names(runs: Iterable[Results]) -> list[str]:
    """Returns the names of the model's metrics, as the evalers report them."""
    paths = [path for run in runs for of in run.evalers.values() for path in of]
    paths = paths or [p for run in runs for p in run.curves.get(TRAIN_SUMMARIES, {})]
    names = {path.removeprefix("model/") for path in paths}
    return sorted(n for n in names if "/" not in n and not any(part in n for part in LOSSES))


def _evaluations_section(run: Results) -> str:
    """Returns a table of all evaluations, with the baselines."""
    rows: dict[tuple[str, float], dict[str, float]] = {}
    for evaler, of in run.evalers.items():
        for path, points in of.items():
            for step, value in points:
                rows.setdefault((evaler, step), {})[path.removeprefix("model/")] = value
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    names.sort(key=lambda name: (name != "loss", name))
    baselines = {
        name: {"loss": counts["nats_per_token"], "bits_per_byte": counts["bits_per_byte"]}
        for name, counts in run.record.get("baselines", {}).items()
    }
    if not rows:
        return ""
    lines = [
        [evaler, f"{step:,.0f}", *_cells(values, names)] for (evaler, step), values in rows.items()
    ]
    lines += [[name, "", *_cells(values, names)] for name, values in baselines.items()]
    head = ["", "step", *(name.replace("_", " ") for name in names)]
    return f'<section><h2>Evaluations</h2><div class="long">{_table(head, lines)}</div></section>'


def _cells(values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [metric_text(values[name]) if name in values else "" for name in names]


def _samples_section(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    shown = [
        f"<figure><figcaption>after step {sample['step']:,}</figcaption>"
        f"<pre><b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}</pre></figure>"
        for sample in reversed(samples)
    ]
    return f"<section><h2>Samples</h2>{''.join(shown)}</section>"


def _curves_section(run: Results) -> str:
    charts = {}
    for style, (reporter, of_reporter) in enumerate(run.curves.items()):
        name_of = "train" if reporter == TRAIN_SUMMARIES else reporter
        for name, points in sorted(of_reporter.items()):
            if len(finite(points)) > 1:
                charts[f"{name_of}: {name}"] = [Series(name_of, points, style)]
    return _folded("Everything that was reported", _small_charts(charts)) if charts else ""


def _environment_section(record: Mapping[str, Any]) -> str:
    parts = []
    starts = record.get("starts", [])
    if starts:
        names = list(starts[-1])
        rows = [[str(start.get(name, "")) for name in names] for start in starts]
        parts.append(_table(names, rows))
    shown = set[str]()
    for path, corpus in record.get("corpora", {}).items():
        text = str(corpus)
        if text in shown:  # to evaluate on, too
            continue
        shown.add(text)
        rows = [[name, str(value)] for name, value in corpus.items()]
        parts.append(f"<h3>{html.escape(path)}</h3>" + _table([], rows))
    return _folded("Environment", "".join(parts)) if parts else ""


# Parts of a comparison.


def _distinct(runs: Sequence[Results]) -> Sequence[Results]:
    """Numbers the runs if their names are not distinct."""
    if len({run.name for run in runs}) < len(runs):
        for index, run in enumerate(runs, start=1):
            run.name = f"{run.name} ({index})"
    return runs


def _results_section(runs: Sequence[Results]) -> str:
    columns = _eval_columns(runs)
    rows = []
    for run in runs:
        train = smoothed(run.train("loss"))
        facts = _facts(run)
        last = [finite(named(run.evalers.get(evaler, {}), n) or []) for evaler, n in columns]
        rows.append(
            [
                run.name,
                _status(run),
                number(train[-1][1]) if train else "",
                *(number(points[-1][1]) if points else "" for points in last),
                *(facts.get(name, "") for name in ("duration", "speed", "parameters", "devices")),
            ]
        )
    titles = [f"{evaler} {name.replace('_', ' ')}" for evaler, name in columns]
    head = ["run", "", "train loss", *titles, "duration", "speed", "parameters", "devices"]
    return f"<section><h2>Results</h2>{_table(head, rows)}</section>"


def _eval_columns(runs: Sequence[Results]) -> list[tuple[str, str]]:
    """Returns the pairs of an evaler and the last name of one of its summaries."""
    evalers = dict.fromkeys(name for run in runs for name in run.evalers)
    return [(evaler, name) for evaler in evalers for name in ("loss", *_metric_names(runs))]


def _compared_curves(runs: Sequence[Results]) -> str:
    train = [Series(r.name, smoothed(r.train("loss")), i) for i, r in enumerate(runs)]
    charts = {}
    for evaler, name in _eval_columns(runs):
        found = [finite(named(run.evalers.get(evaler, {}), name) or []) for run in runs]
        numbered = enumerate(zip(runs, found, strict=True))
        series = [Series(run.name, points, i, dots=True) for i, (run, points) in numbered if points]
        if series:
            charts[f"{evaler} {name.replace('_', ' ')}"] = series
    return f"<section><h2>Curves</h2>{_chart('train loss', train)}{_small_charts(charts)}</section>"


def _config_section(runs: Sequence[Results]) -> str:
    values = [config_values(run.config) for run in runs if run.config]
    if len(values) < len(runs):
        return ""
    differing: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for of in values for path in of):
        cells = [of.get(path, "—") for of in values]
        is_of_another_class = "—" in cells and path.rpartition(".")[0] in differing
        if len(set(cells)) > 1 and not is_of_another_class:
            differing[path] = cells
    rows = [[path, *cells] for path, cells in differing.items()]
    title = "<h2>Configs</h2>"
    if not rows:
        return f"<section>{title}<p>All fields are equal.</p></section>"
    table = _table(["field", *(run.name for run in runs)], rows)
    return f'<section class="configs">{title}<p>Fields that differ.</p>{table}</section>'


# Elements of pages.


def _chart(
    title: str,
    series: Sequence[Series],
    *,
    levels: Mapping[str, float] | None = None,
    is_small: bool = False,
) -> str:
    """Returns a figure of lines, with a switch to a logarithmic scale where that differs much.

    It has a legend unless it is small.
    """
    caption = "" if is_small else _legend(series)

    def drawn_at(width: int, height: int, is_log: bool) -> str:
        return line_chart(
            series, y_title=title, levels=levels, width=width, height=height, is_log=is_log
        )

    def drawn(is_log: bool) -> str:
        if is_small:
            return drawn_at(320, 210, is_log)
        broad, narrow = drawn_at(760, 340, is_log), drawn_at(380, 260, is_log)
        return f'<div class="broad">{broad}</div><div class="narrow">{narrow}</div>'

    ys = [y for line in series for _, y in finite(line.points)]
    if not ys or min(ys) <= 0 or max(ys) < 2 * min(ys):
        return f"<figure>{caption}{drawn(is_log=False)}</figure>"
    key = html.escape(f"log-{title}")
    return (
        f'<figure><input type="checkbox" id="{key}"/><label for="{key}">log scale</label>{caption}'
        f'<div class="linear">{drawn(is_log=False)}</div>'
        f'<div class="log">{drawn(is_log=True)}</div></figure>'
    )


def _small_charts(charts: Mapping[str, Sequence[Series]]) -> str:
    figures = "".join(_chart(title, series, is_small=True) for title, series in charts.items())
    return f'{_legend(s for of in charts.values() for s in of)}<div class="charts">{figures}</div>'


def _legend(series: Iterable[Series]) -> str:
    styles = {s.name: s.style % NUM_STYLES for s in series if not s.faint}
    names = "".join(f'<li class="series-{i}">{html.escape(n)}</li>' for n, i in styles.items())
    return f'<ul class="legend">{names}</ul>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    header = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{header}<tbody>{body}</tbody></table></div>'


def _folded(title: str, content: str) -> str:
    key = html.escape(title)
    return f'<details id="{key}"><summary><h2>{key}</h2></summary>{content}</details>'


def page(title: str, body: str, script: str = "") -> str:
    """Returns a self-contained page from a title in plain text, and a body and script in HTML."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    page = string.Template(template)
    return page.substitute(title=html.escape(title), body=body, script=script)
