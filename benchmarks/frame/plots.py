"""The plots of the page, drawn from what is kept: nothing is measured for them.

They are SVG files in two sets of colors, for light and for dark pages.
"""

import io
import re
from collections.abc import Collection, Iterable
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
_OTHER, _INK, _GRID, _PAGE = "#999999", "#24292f", "#d8dee4", "#ffffff"
_DARK = {
    "#1b6ca8": "#62a5e6",
    "#d9822b": "#e39b45",
    "#5a9367": "#6cc283",
    "#8e5ea2": "#c295d8",
    "#333333": "#c9d1d9",
    _OTHER: "#8b949e",
    _INK: "#e6edf3",
    _GRID: "#30363d",
    _PAGE: "#161b22",
}
_FONTS = "'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",  # the same file for the same numbers
    "font.size": 11,
    "figure.facecolor": _PAGE,
    "axes.facecolor": _PAGE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}
OVERVIEW, OVERHEAD = "overview", "overhead"
# The questions of the overhead, which several libraries answer.
_OF_OVERHEAD = (
    "dispatch of a train step, 100 arrays",
    "eager forward of an MLP of 8 layers of width 8",
    "abstract init of 6 layers",
    "trace 24 layers",
    "trace 24 layers, each in a jit",
    "trace a scan of 12 layers",
    "trace vmap(scan(remat(block)))",
)


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
    """Draws the overview, the overhead and each curve into `folder`.

    The overhead has fewer questions and no targets, for the README, also in a layout for phones.
    Plots of what is gone are removed.
    """
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        made = list(_draw_all(answers, folder))
    for path in {*folder.glob("*.svg"), *folder.glob("*.png")} - {*made}:
        path.unlink()
    return made


def _draw_all(answers: dict[str, Answer], folder: Path) -> Iterable[Path]:
    for curve in (curve for answer in answers.values() for curve in answer.curves):
        yield _draw_curve(curve, folder / f"{curve.name}.svg")
    if subjects := relative_to_raw(answers):
        yield _draw_subjects(subjects, folder / f"{OVERVIEW}.svg", ["target"])
    if few := {name: subjects[name] for name in _OF_OVERHEAD if name in subjects}:
        yield _draw_subjects(few, folder / f"{OVERHEAD}.svg")
        yield _draw_subjects(few, folder / f"{OVERHEAD}-narrow.svg", narrow=True)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(
        r"<!DOCTYPE[^>]*>\s*|<metadata>.*?</metadata>\s*", "", file.getvalue(), flags=re.S
    )
    text = re.sub(r"'DejaVu Sans'[^;\"]*", _FONTS, text)
    for light in _DARK:
        text = text.replace(light, f"var(--{light[1:]})")
    light, dark = (
        "".join(f"--{name[1:]}:{color};" for name, color in of.items())
        for of in (dict(zip(_DARK, _DARK, strict=True)), _DARK)
    )
    colors = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    path.write_text(
        re.sub(r"<defs>", f"<style>{colors}</style>\n <defs>", text, count=1), encoding="utf-8"
    )
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


def _draw_subjects(
    subjects: dict[str, list[tuple[str, Row]]],
    path: Path,
    also: Collection[str] = (),
    narrow: bool = False,
) -> Path:
    """Draws a line per subject; `also` may have "target". If narrow, the names are above."""
    height = 1.3 + (0.5 if narrow else 0.28) * len(subjects)
    figure, axes = _figure(5.0 if narrow else 9.0, height)
    handles: dict[str, Any] = {}
    for y, (subject, lines) in enumerate(subjects.items()):
        # The library that is compared is drawn last, above the others.
        for name, row in sorted(lines, key=lambda line: family(line[0]) == "Weft"):
            made = axes.plot(row.median, y, linestyle="", **{**_style(name), "markersize": 7})
            handles.setdefault(family(name), made[0])
            if row.at_most and "target" in also:
                made = axes.plot(row.at_most, y, "|", color=_INK, markersize=13, zorder=4)
                handles.setdefault("target", made[0])
        if narrow:
            box = {"facecolor": _PAGE, "linewidth": 0, "pad": 1.5}
            of_axes = ("axes fraction", "data")
            axes.annotate(subject, (0.01, y - 0.38), xycoords=of_axes, va="center", bbox=box)
    _scale(axes.xaxis, [row.median for lines in subjects.values() for _, row in lines])
    axes.axvline(1, color=_COLORS["raw JAX"], linewidth=1)
    axes.set_yticks(range(len(subjects)), [""] * len(subjects) if narrow else list(subjects))
    axes.set_ylim(len(subjects) - 0.5, -0.6 if narrow else -0.5)
    axes.set_xlabel("times of raw JAX (less is better)")
    shown = [name for name in (*_COLORS, "target") if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside upper center",
        ncols=3 if narrow else 6,
        frameon=False,
        handletextpad=0.2,
    )
    return _save(figure, path)
