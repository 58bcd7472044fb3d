"""Line charts as single SVG elements, for self-contained pages.

Colors are CSS classes (`series-0`, `series-1`, …, `level`, `grid`) for the page's style sheet.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Point = tuple[float, float]

_MAX_POINTS = 500
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 52, 20, 10, 28


class Series(NamedTuple):
    """Line of a chart.

    Attributes:
        points: Pairs of x and y, sorted by x; non-finite ones are omitted.
        style: Index N of the page's class `series-N`.
        faint: Whether the line is in the background.
        dots: Whether each point has a dot that shows its value.
    """

    name: str
    points: Sequence[Point]
    style: int = 0
    faint: bool = False
    dots: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    levels: Mapping[str, float] | None = None,
    width: int = 760,
    height: int = 320,
    label: str = "",
) -> str:
    """Draws lines over a grid with labelled axes, and returns the `<svg>` element.

    Args:
        series: The lines, background lines first.
        levels: Horizontal lines by name, such as baselines.
        width: In CSS pixels, like `height`; the page may scale it.
        label: Description for screen readers.

    >>> line_chart([Series("loss", [(1, 3.0), (2, 2.5)])], label="loss").startswith("<svg")
    True
    """
    lines = [s._replace(points=thin_out(finite(s.points))) for s in series]
    points = [point for line in lines for point in line.points]
    levels = levels or {}
    ys = [y for _, y in points] + list(levels.values())
    if not points:
        points, ys = [(0.0, 0.0), (1.0, 1.0)], [0.0, 1.0]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), width // 90)
    y_ticks = ticks(min(ys), max(ys), height // 50)
    frame = _Frame(width, height, x_ticks, y_ticks)
    body = [_grid(frame), *(_level(frame, n, y) for n, y in levels.items())]
    body += [_line(frame, line) for line in lines if line.points]
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def finite(points: Sequence[Point]) -> list[Point]:
    """Returns the points with finite coordinates."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin_out(points: Sequence[Point], at_most: int = _MAX_POINTS) -> list[Point]:
    """Returns evenly selected points, including the first and the last.

    >>> thin_out([(i, i) for i in range(10)], at_most=4)
    [(0, 0), (3, 3), (6, 6), (9, 9)]
    """
    if len(points) <= at_most:
        return list(points)
    return [points[i * (len(points) - 1) // (at_most - 1)] for i in range(at_most)]


def smoothed(points: Sequence[Point], span: float = 0.05) -> list[Point]:
    """Returns a moving average over about a fraction `span` of the points, from the first value.

    >>> smoothed([(0, 1.0), (1, 2.0), (2, 3.0), (3, 3.0)], span=0.5)
    [(0, 1.0), (1, 1.6666666666666667), (2, 2.4285714285714284), (3, 2.7333333333333334)]
    """
    points = finite(points)
    decay = 1 - 1 / max(1.0, span * len(points))
    result, total, weight = [], 0.0, 0.0
    for x, y in points:
        total, weight = decay * total + y, decay * weight + 1
        result.append((x, total / weight))
    return result


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers from below `low` to above `high`.

    >>> ticks(0.3, 9.2, about=5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(about, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Formats a number in few characters.

    >>> number(1.23456), number(0.0003), number(2_500_000.0), number(400.0)
    ('1.235', '0.0003', '2.5M', '400')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"


class _Frame:
    """Mapping from values to positions on the drawing."""

    def __init__(self, width: int, height: int, x_ticks: list[float], y_ticks: list[float]):
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self.left, self.right = _MARGIN_LEFT, width - _MARGIN_RIGHT
        self.top, self.bottom = _MARGIN_TOP, height - _MARGIN_BOTTOM

    def x(self, value: float) -> float:
        share = (value - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return round(self.bottom - share * (self.bottom - self.top), 1)


def _grid(frame: _Frame) -> str:
    rows = [
        f'<path class="grid" d="M{frame.left} {frame.y(y)}H{frame.right}"/>'
        f'<text x="{frame.left - 8}" y="{frame.y(y) + 4}" text-anchor="end">{number(y)}</text>'
        for y in frame.y_ticks
    ]
    columns = [
        f'<text x="{frame.x(x)}" y="{frame.bottom + 18}" text-anchor="middle">{number(x)}</text>'
        for x in frame.x_ticks
    ]
    return "".join(rows + columns)


def _level(frame: _Frame, name: str, value: float) -> str:
    y = frame.y(value)
    text = html.escape(f"{name} {number(value)}")
    return (
        f'<path class="level" d="M{frame.left} {y}H{frame.right}"/>'
        f'<text x="{frame.right}" y="{y - 5}" text-anchor="end">{text}</text>'
    )


def _line(frame: _Frame, line: Series) -> str:
    path = "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in line.points)
    classes = f"series-{line.style}" + (" faint" if line.faint else "")
    drawn = f'<path class="{classes}" d="M{path}"/>'
    if not line.dots:
        return drawn
    return drawn + "".join(
        f'<circle class="{classes}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3.5">'
        f"<title>{html.escape(line.name)} at {number(x)}: {number(y)}</title></circle>"
        for x, y in line.points
    )
