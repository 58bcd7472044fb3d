"""Boxes, texts and arrows of the drawings, with one style in light and in dark.

A drawing is an SVG with a background of its own. Its style follows `prefers-color-scheme`: that of
the system, and in a page with a switch that of the page, where the browser passes it to images.
"""

import html
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple


class Palette(NamedTuple):
    """Colors: the page, text, softer text, lines, and the fill and stroke of boxes by meaning."""

    page: str
    ink: str
    soft: str
    line: str
    boxes: dict[str, tuple[str, str]]


# plain: yours; weft: a step of Weft; jax: JAX and compiled code; state: arrays; fault: damage.
LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f24",
    soft="#57606a",
    line="#6e7781",
    boxes={
        "plain": ("#f3f4f6", "#8c959f"),
        "weft": ("#e3eefa", "#2f6fb0"),
        "jax": ("#fdeedd", "#c4741b"),
        "state": ("#e2f3e8", "#2f8550"),
        "fault": ("#fde8e7", "#c0392b"),
    },
)
DARK = Palette(
    page="#161b22",
    ink="#e6edf3",
    soft="#a3adb8",
    line="#8b949e",
    boxes={
        "plain": ("#252b34", "#7d8590"),
        "weft": ("#15304d", "#62a5e6"),
        "jax": ("#40290f", "#e39b45"),
        "state": ("#12351f", "#57b97a"),
        "fault": ("#451d1d", "#f0807a"),
    },
)

SIZE = 13  # of text, in pixels of a drawing that is not scaled
LINE_HEIGHT = 18
_SANS = "'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_MONO = (
    "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)
# Widths of characters in the widest usual fonts, in units of the size.
_WIDTHS = {"": 0.57, "bold": 0.64, "code": 0.585}
_HEAD = 7


def style() -> str:
    """Returns the style sheet that all drawings share."""
    return (
        f"text{{font:{SIZE}px {_SANS}}}.bold{{font-weight:600}}"
        f".code{{font-family:{_MONO};font-size:{SIZE - 0.5}px}}"
        ".path{fill:none;stroke-width:1.5}.region{fill:none;stroke-dasharray:5 4}"
        f"{_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_rules(DARK)}}}"
    )


def _rules(palette: Palette) -> str:
    boxes = "".join(
        f".{name}{{fill:{fill};stroke:{stroke}}}.on-{name}{{stroke:{stroke}}}"
        f".tip-{name}{{fill:{stroke}}}.region.{name}{{fill:none}}"
        for name, (fill, stroke) in palette.boxes.items()
    )
    return (
        f".page{{fill:{palette.page}}}text{{fill:{palette.ink}}}.soft{{fill:{palette.soft}}}"
        f".path{{stroke:{palette.line}}}.tip{{fill:{palette.line}}}{boxes}"
    )


class Drawing:
    """Drawing of a given size; the parts appear in the order in which they are added."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        kind: str = "plain",
        left: bool = False,
    ) -> None:
        """Adds a box with lines of text, centered or from the left.

        A line that begins with `# ` is bold, one with `~ ` is soft; `code` is between backticks.

        Raises ValueError if the box is outside of the drawing, or a line does not fit.
        """
        self._check_inside(x, y, width, height)
        self._parts.append(_rect(x, y, width, height, kind, 6))
        first = (
            y + height / 2 - (len(lines) - 1) * LINE_HEIGHT / 2 + SIZE * 0.36
        )
        if len(lines) * LINE_HEIGHT > height:
            raise ValueError(f"{lines} are higher than {height}")
        for i, line in enumerate(lines):
            if text_width(line) > width - 12:
                raise ValueError(
                    f"{line!r} needs {text_width(line):.0f}, the box has {width - 12}"
                )
            at = x + 10 if left else x + width / 2
            self.text(
                at, first + i * LINE_HEIGHT, line, "start" if left else "middle"
            )

    def region(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str,
        kind: str = "plain",
        at: float = 12,
        anchor: str = "start",
    ) -> None:
        """Adds a dashed outline, with a label in its first line, `at` from the left."""
        self._check_inside(x, y, width, height)
        self._parts.append(_rect(x, y, width, height, f"region {kind}", 8))
        self.text(x + at, y + 20, label, anchor)

    def text(
        self, x: float, y: float, line: str, anchor: str = "start"
    ) -> None:
        """Adds a line of text at its baseline; see `box` for its marks."""
        role = {"# ": "bold", "~ ": "soft"}.get(line[:2], "")
        spans = "".join(
            f'<tspan class="code">{html.escape(part, quote=False)}</tspan>'
            if is_code
            else html.escape(part, quote=False)
            for part, is_code in _segments(
                line.removeprefix("# ").removeprefix("~ ")
            )
        )
        attributes = "".join(
            f' {name}="{value}"'
            for name, value in (("class", role), ("text-anchor", anchor))
            if value not in ("", "start")
        )
        self._parts.append(
            f'<text x="{x:g}" y="{round(y, 1):g}"{attributes} xml:space="preserve">{spans}</text>'
        )
        start = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * text_width(
            line
        )
        self._check_inside(start, y - SIZE, text_width(line), SIZE)

    def arrow(
        self, *points: tuple[float, float], kind: str = "", dashed: bool = False
    ) -> None:
        """Adds an arrow along horizontal and vertical lines through the points."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        end = (x1 - dx * (_HEAD - 1), y1 - dy * (_HEAD - 1))
        path = _rounded([*points[:-1], end])
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        on, tip = (
            (f"path on-{kind}", f"tip-{kind}") if kind else ("path", "tip")
        )
        self._parts.append(f'<path class="{on}" d="{path}"{dash}/>')
        bx, by = x1 - dx * _HEAD, y1 - dy * _HEAD
        corners = [
            (x1, y1),
            (bx - dy * 4, by - dx * 4),
            (bx + dy * 4, by + dx * 4),
        ]
        shape = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._parts.append(f'<polygon class="{tip}" points="{shape}"/>')

    def svg(self) -> str:
        """Returns the file's text."""
        size = f'width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {self.width} {self.height}">',
                f"<style>{style()}</style>",
                f'<rect class="page" {size} rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def _check_inside(
        self, x: float, y: float, width: float, height: float
    ) -> None:
        if x < 0 or y < 0 or x + width > self.width or y + height > self.height:
            at = f"{x:g}, {y:g}, {width:g} wide, {height:g} high"
            raise ValueError(
                f"what is at {at} leaves the drawing of {self.width} × {self.height}"
            )


def text_width(line: str) -> float:
    """Returns the width of a line in a wide font."""
    role = "bold" if line.startswith("# ") else ""
    return sum(
        _WIDTHS["code" if is_code else role] * SIZE * len(part)
        for part, is_code in _segments(
            line.removeprefix("# ").removeprefix("~ ")
        )
    )


def _segments(line: str) -> Iterator[tuple[str, bool]]:
    for part, is_code in zip(
        re.split("`", line), itertools.cycle([False, True])
    ):
        if part:
            yield part, is_code


def _rect(
    x: float, y: float, width: float, height: float, role: str, radius: int
) -> str:
    size = f'width="{width:g}" height="{height:g}" rx="{radius}"'
    return f'<rect class="{role}" x="{x:g}" y="{y:g}" {size}/>'


def _rounded(points: list[tuple[float, float]], radius: float = 6) -> str:
    """Returns a path through points, with rounded corners."""
    path = [f"M{points[0][0]:g},{points[0][1]:g}"]
    for (x0, y0), (x1, y1), (x2, y2) in zip(
        points, points[1:], points[2:], strict=False
    ):
        before = (x1 - radius * _sign(x1 - x0), y1 - radius * _sign(y1 - y0))
        after = (x1 + radius * _sign(x2 - x1), y1 + radius * _sign(y2 - y1))
        path.append(
            f"L{before[0]:g},{before[1]:g}Q{x1:g},{y1:g} {after[0]:g},{after[1]:g}"
        )
    path.append(f"L{points[-1][0]:g},{points[-1][1]:g}")
    return "".join(path)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
