"""`report.html`: the results of a run, as one page that opens without a server.

It is made from the run's directory: the summaries of a `JsonLinesWriter`, the config, and
`run.json`. It can be written at any time, also after an interrupted run. The file `report.html`
next to this module is the template of the page.
"""

import html
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.cli.charts import Point, Series, finite, line_chart, smoothed
from weft.trainer.run_dir import CONFIG_FILE, read_record, write_atomically
from weft.trainer.summary_writer.files import JSON_LINES_FILE, read_json_lines

REPORT_FILE = "report.html"
SUMMARIES_DIR = "summaries"
TRAIN_SUMMARIES = "train_train"

Curves = dict[str, list[Point]]


def write_report(directory: str) -> Path:
    """Writes the report of a run into its directory and returns the path of the page."""
    path = Path(directory, REPORT_FILE)
    write_atomically(path, render_report(directory))
    return path


def render_report(directory: str) -> str:
    """Returns the report of a run as HTML."""
    record = read_record(directory)
    curves = read_curves(directory)
    config = Path(directory, CONFIG_FILE)
    sections = [
        _header(directory, record),
        _loss_section(curves, record.get("baselines", {})),
        _samples_section(record.get("samples", [])),
        _curves_section(curves),
        _environment_section(record),
        _folded("Config", f"<pre>{html.escape(config.read_text())}</pre>")
        if config.exists()
        else "",
    ]
    return page(f"{Path(directory).absolute().name} · Weft", "\n".join(filter(None, sections)))


def read_curves(directory: str) -> dict[str, Curves]:
    """Returns pairs of step and value by reporter (`train_train`, evalers) and summary path."""
    curves: dict[str, Curves] = {}
    for file in sorted(Path(directory, SUMMARIES_DIR).glob(f"**/{JSON_LINES_FILE}")):
        of_file = curves.setdefault(file.parent.name, {})
        for line in read_json_lines(str(file)):
            for name, value in line.get("values", {}).items():
                if not isinstance(value, str):
                    of_file.setdefault(name, []).append((line["step"], value))
    return curves


def named(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of the shortest path that ends in a name, or None.

    >>> named({"model/decoder/loss": 2, "model/loss": 1, "accuracy": 0}, "loss")
    1
    """
    paths = [path for path in values if path.rpartition("/")[2] == name]
    return values[min(paths, key=len)] if paths else None


# Parts of the page.


def _header(directory: str, record: Mapping[str, Any]) -> str:
    name = Path(directory).absolute().name
    end, facts = record.get("end"), []
    if end:
        how = _REASONS.get(end["reason"], f"stopped by {end['reason']}")
        facts.append(f"{end['step']:,} steps, {how}")
    if "model" in record:
        facts.append(f"{record['model']['parameters']:,} parameters")
    if record.get("starts"):
        facts += [record["starts"][-1]["devices"], record["starts"][-1]["time"]]
    return f"<header><h1>{html.escape(name)}</h1><p>{html.escape(' · '.join(facts))}</p></header>"


_REASONS = {
    "max_step": "finished",
    "input ended": "the data ended",
    "early stopping": "stopped early, since its evaluations no longer improved",
}


def _loss_section(curves: Mapping[str, Curves], baselines: Mapping[str, Any]) -> str:
    series: list[Series] = []
    rows: list[list[str]] = []
    train = named(curves.get(TRAIN_SUMMARIES, {}), "loss")
    if train and finite(train):
        average = smoothed(train)
        series += [Series("each step", train, faint=True), Series("train, averaged", average)]
        rows.append(["train, averaged", f"{average[-1][1]:.3f}", ""])
    evalers = [(name, of) for name, of in curves.items() if name != TRAIN_SUMMARIES]
    for style, (name, of_evaler) in enumerate(evalers, start=1):
        points = finite(named(of_evaler, "loss") or [])
        if points:
            series.append(Series(name, points, style, dots=True))
            bits = named(of_evaler, "bits_per_byte")
            rows.append([name, f"{points[-1][1]:.3f}", f"{bits[-1][1]:.3f}" if bits else ""])
    if not series:
        return "<section><h2>Loss</h2><p>No summaries were written yet.</p></section>"
    for name, counts in baselines.items():
        rows.append([name, *(f"{counts[n]:.3f}" for n in ("nats_per_token", "bits_per_byte"))])
    levels = {name: counts["nats_per_token"] for name, counts in baselines.items()}
    legend = "".join(
        f'<li class="series-{s.style}">{html.escape(s.name)}</li>' for s in series if not s.faint
    )
    chart = line_chart(series, levels=levels, label="loss by step")
    table = _table(["at the end", "nats per token", "bits per byte"], rows)
    legend = f'<ul class="legend">{legend}</ul>'
    return f"<section><h2>Loss</h2>{legend}{chart}{table}</section>"


def _samples_section(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    shown = [
        f"<figure><figcaption>after step {sample['step']:,}</figcaption>"
        f"<pre><b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}</pre></figure>"
        for sample in reversed(samples)
    ]
    return f"<section><h2>Samples</h2>{''.join(shown)}</section>"


def _curves_section(curves: Mapping[str, Curves]) -> str:
    charts = []
    for reporter, of_reporter in curves.items():
        for name, points in sorted(of_reporter.items()):
            if len(finite(points)) < 2:
                continue
            style = 0 if reporter == TRAIN_SUMMARIES else 1
            title = html.escape(name if reporter == TRAIN_SUMMARIES else f"{reporter}: {name}")
            chart = line_chart([Series(name, points, style)], width=380, height=180, label=name)
            charts.append(f"<figure><figcaption>{title}</figcaption>{chart}</figure>")
    if not charts:
        return ""
    return _folded("Everything that was reported", f'<div class="charts">{"".join(charts)}</div>')


def _environment_section(record: Mapping[str, Any]) -> str:
    parts = []
    starts = record.get("starts", [])
    if starts:
        names = list(starts[-1])
        rows = [[str(start.get(name, "")) for name in names] for start in starts]
        parts.append(_table(names, rows))
    for path, corpus in record.get("corpora", {}).items():
        rows = [[name, str(value)] for name, value in corpus.items()]
        parts.append(f"<h3>{html.escape(path)}</h3>" + _table(["", ""], rows))
    return _folded("Environment", "".join(parts)) if parts else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    header = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{header}<tbody>{body}</tbody></table></div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary><h2>{html.escape(title)}</h2></summary>{content}</details>"


def page(title: str, body: str) -> str:
    """Returns a self-contained page from a title in plain text and a body in HTML."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=html.escape(title), body=body)
