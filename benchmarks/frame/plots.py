"""The plots of the page, drawn from what is kept: nothing is measured for them."""

from pathlib import Path
from typing import Any

from benchmarks.frame.naming import FAMILIES, family, library
from benchmarks.frame.results import Answer
from benchmarks.harness import Curve, Row

# One color for a library, in whichever way it is written.
_COLORS: dict[str, str] = dict(
    zip(FAMILIES, ("#1b6ca8", "#d9822b", "#5a9367", "#8e5ea2", "#333333"), strict=True)
)
_MARKERS = {"Weft": "o", "Flax": "s", "Equinox": "^", "Haiku": "D"}
_OTHER = "#999999"
OVERVIEW = "overview"


def relative_to_raw(answers: dict[str, Answer]) -> dict[str, list[tuple[str, Row]]]:
    """Returns the measurements relative to raw JAX: by subject, the libraries and their lines."""
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
    if subjects := relative_to_raw(answers):
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
    of = family(name)
    return {
        "color": _COLORS.get(of, _OTHER),
        "marker": _MARKERS.get(of, "x"),
        "markersize": 4 if of in _MARKERS else 7,
        "zorder": 3 if of == "Weft" else 2.5 if of in _MARKERS else 2,
    }


def _draw_curve(curve: Curve, path: Path) -> Path:
    figure, axes = _figure(7.6, 4.0)
    families: dict[str, int] = {}
    for name, points in curve.lines.items():
        style = _style(name)
        nth = families[style["color"]] = families.get(style["color"], -1) + 1
        dashes = ("-", "--", ":", "-.")[nth % 4]
        axes.plot(*zip(*points, strict=True), dashes, label=name, **style)
    at = sorted({x for points in curve.lines.values() for x, _ in points})
    _scale(axes.xaxis, at, ticks=at)
    _scale(axes.yaxis, [y for points in curve.lines.values() for _, y in points])
    axes.set(title=curve.title, xlabel=curve.x, ylabel=curve.y)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return _save(figure, path)


def _scale(axis: Any, values: list[float], ticks: list[float] | None = None) -> None:
    """Uses a logarithmic scale for values that grow at least eightfold, and plain number labels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    name = axis.axis_name
    if min(values) > 0 and max(values) >= 8 * min(values):
        axis.axes.set(**{f"{name}scale": "log"})
        axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
    elif name == "y":
        axis.axes.set_ylim(bottom=min(0, *values))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _draw_overview(subjects: dict[str, list[tuple[str, Row]]], path: Path) -> Path:
    figure, axes = _figure(9.0, 1.2 + 0.26 * len(subjects))
    handles: dict[str, Any] = {}
    for y, lines in enumerate(subjects.values()):
        for name, row in lines:
            made = axes.plot(row.median, y, linestyle="", **{**_style(name), "markersize": 6})
            handles.setdefault(family(name), made[0])
            if row.at_most:
                made = axes.plot(row.at_most, y, "|", color="black", markersize=13, zorder=4)
                handles.setdefault("target", made[0])
    _scale(axes.xaxis, [row.median for lines in subjects.values() for _, row in lines])
    axes.axvline(1, color=_COLORS["raw JAX"], linewidth=0.8)
    axes.set_yticks(range(len(subjects)), list(subjects), fontsize="small")
    axes.set_ylim(len(subjects) - 0.5, -0.5)
    axes.set_xlabel("times of raw JAX (less is better)")
    shown = [name for name in (*_COLORS, "target") if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown, loc="outside upper center", ncols=6, frameon=False
    )
    return _save(figure, path)
