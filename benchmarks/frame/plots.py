"""The plots of the page, drawn from what is kept: nothing is measured for them."""

import re
from pathlib import Path
from typing import Any

from benchmarks.frame.results import Answer
from benchmarks.harness import Curve, Row

# One color for a library, in whichever way it is written.
_COLORS = {
    "Weft": "#1b6ca8",
    "Flax": "#d9822b",
    "Equinox": "#5a9367",
    "Haiku": "#8e5ea2",
    "raw": "#666666",
}
_MARKERS = {"Weft": "o", "Flax": "s", "Equinox": "^", "Haiku": "D"}
_LIBRARY = re.compile(r", ((?:Weft|Flax|Equinox|Haiku)\b.*?) / raw")
OVERVIEW = "overview"


def library(question: str) -> tuple[str, str]:
    """A question without its library, and the library: Weft where none is named."""
    if named := _LIBRARY.search(question):
        return question[: named.start()] + question[named.end(1) :], named[1]
    return question, "Weft"


def beside_raw(answers: dict[str, Answer]) -> dict[str, list[tuple[str, Row]]]:
    """What was measured against raw JAX: by subject, the libraries and their lines."""
    found: dict[str, list[tuple[str, Row]]] = {}
    for answer in answers.values():
        for row in answer.rows:
            if "/ raw" in row.question and row.median > 0:
                subject, name = library(row.question)
                found.setdefault(subject.removesuffix(" / raw"), []).append((name, row))
    return found


def draw(answers: dict[str, Answer], folder: Path) -> list[Path]:
    """Draws the overview and each curve into `folder`; plots of what is gone are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = [curve for answer in answers.values() for curve in answer.curves]
    made = [_draw_curve(curve, folder / f"{curve.name}.png") for curve in curves]
    if subjects := beside_raw(answers):
        made.append(_draw_overview(subjects, folder / f"{OVERVIEW}.png"))
    for path in set(folder.glob("*.png")) - set(made):
        path.unlink()
    return made


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    return path


def _style(name: str) -> dict[str, Any]:
    family = name.split()[0].rstrip(",")
    return {"color": _COLORS.get(family, "#999999"), "marker": _MARKERS.get(family, "x")}


def _draw_curve(curve: Curve, path: Path) -> Path:
    figure, axes = _figure(6.4, 4.0)
    families: dict[str, int] = {}
    for name, points in curve.lines.items():
        style = _style(name)
        nth = families[style["color"]] = families.get(style["color"], -1) + 1
        dashes = ("-", "--", ":", "-.")[nth % 4]
        axes.plot(*zip(*points, strict=True), dashes, label=name, markersize=4, **style)
    for axis, values in (
        ("x", [x for points in curve.lines.values() for x, _ in points]),
        ("y", [y for points in curve.lines.values() for _, y in points]),
    ):
        if min(values) > 0 and max(values) >= 10 * min(values):
            axes.set(**{f"{axis}scale": "log"})
        elif axis == "y":
            axes.set_ylim(bottom=min(0, *values))
    axes.set(title=curve.title, xlabel=curve.x, ylabel=curve.y)
    axes.legend(frameon=False, fontsize="small")
    return _save(figure, path)


def _draw_overview(subjects: dict[str, list[tuple[str, Row]]], path: Path) -> Path:
    from matplotlib.ticker import FuncFormatter

    figure, axes = _figure(9.0, 1.2 + 0.26 * len(subjects))
    shown = set()
    for y, lines in enumerate(subjects.values()):
        # Weft is drawn last, so that it lies above the others.
        for name, row in sorted(lines, key=lambda line: line[0].startswith("Weft")):
            family = name.split()[0].rstrip(",")
            label = None if family in shown else family
            shown.add(family)
            axes.plot(row.median, y, linestyle="", label=label, markersize=6, **_style(name))
            if row.at_most:
                target = None if "target" in shown else "target"
                shown.add("target")
                axes.plot(row.at_most, y, "|", color="black", markersize=13, label=target)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color="#666666", linewidth=0.8)
    axes.set_yticks(range(len(subjects)), list(subjects), fontsize="small")
    axes.set_ylim(len(subjects) - 0.5, -0.5)
    axes.set_xlabel("times of raw JAX (less is better)")
    figure.legend(loc="outside upper center", ncols=6, frameon=False)
    return _save(figure, path)
