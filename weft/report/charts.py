"""Line charts as single SVG elements, for self-contained pages without scripts.

Colors are CSS classes (`series-0`, `series-1`, …, `level`, `grid`) for the page's style sheet. The
style sheet also shows the group `at` of the step under the pointer, with the values there.
"""

import bisect
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Point = tuple[float, float]

NUM_STYLES = 8
_LARGEST, _SMALLEST = 1e300, 1e-300
_MAX_POINTS = 500
_MAX_STOPS = 80
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 62, 20, 26, 40


class Series(NamedTuple):
    """Line of a chart.

    Attributes:
        points: Pairs of x and y, sorted by x; non-finite ones are omitted.
        style: Index N of the page's class `series-N`.
        faint: Whether the line is in the background, without values under the pointer.
        dots: Whether each point has a dot.
    """

    name: str
    points: Sequence[Point]
    style: int = 0
    faint: bool = False
    dots: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    y_title: str,
    x_title: str = "step",
    levels: Mapping[str, float] | None = None,
    width: int = 760,
    height: int = 340,
    is_log: bool = False,
) -> str:
    """Draws lines over a grid with titled axes, and returns the `<svg>` element.

    Args:
        series: The lines, background lines first.
        levels: Horizontal lines by name, such as baselines.
        width: In CSS pixels, like `height`; the page may scale it.
        is_log: Whether the y axis is logarithmic; values that are not positive are omitted.

    >>> line_chart([Series("train", [(1, 3.0), (2, 2.5)])], y_title="loss").startswith("<svg")
    True
    """
    lowest = _SMALLEST if is_log else -math.inf
    lines = [s._replace(points=[p for p in finite(s.points) if p[1] >= lowest]) for s in series]
    stops = _stops([x for line in lines if not line.faint for x, _ in line.points])
    lines = [line._replace(points=thin_out(line.points)) for line in lines]
    points = [point for line in lines for point in line.points]
    levels = {name: y for name, y in (levels or {}).items() if lowest <= y and _is_drawn(y)}
    ys = [y for _, y in points] + list(levels.values())
    if not points:
        points, ys = [(0.0, 0.0), (1.0, 1.0)], [0.1, 1.0]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), width // 80)
    y_ticks = (log_ticks if is_log else ticks)(min(ys), max(ys), height // 55)
    frame = _Frame(width, height, x_ticks, y_ticks, is_log)
    body = [_grid(frame, x_title, y_title), *(_level(frame, n, y) for n, y in levels.items())]
    body += [_line(frame, line) for line in lines if line.points]
    shown = [line for line in lines if line.points and not line.faint]
    body += [_values_at(frame, left, x, right, shown, x_title) for left, x, right in stops]
    label = html.escape(f"{y_title} by {x_title}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        + "".join(body)
        + "</svg>"
    )


def finite(points: Sequence[Point]) -> list[Point]:
    """Returns the points with finite coordinates, less those whose distance could be infinite."""
    return [(x, y) for x, y in points if _is_drawn(x) and _is_drawn(y)]


def _is_drawn(value: float) -> bool:
    return abs(value) < _LARGEST  # False for NaN


def thin_out(points: Sequence[Point], at_most: int = _MAX_POINTS) -> list[Point]:
    """Returns evenly selected points, including the first and the last."""
    if len(points) <= at_most:
        return list(points)
    return [points[i * (len(points) - 1) // (at_most - 1)] for i in range(at_most)]


def smoothed(points: Sequence[Point], span: float = 0.05) -> list[Point]:
    """Returns a moving average over about a fraction `span` of the points, from the first value."""
    points = finite(points)
    decay = 1 - 1 / max(1.0, span * len(points))
    result, total, weight = [], 0.0, 0.0
    for x, y in points:
        total, weight = decay * total + y, decay * weight + 1
        result.append((x, total / weight))
    return result


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers from below `low` to above `high`."""
    # Averages of equal values differ that much.
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _SMALLEST):
        spread = abs(low) * 0.1
        if spread < _SMALLEST:
            spread = 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(about, 1)
    exponent = math.floor(math.log10(rough))
    magnitude = 10.0**exponent
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - exponent) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Returns 1, 2 or 5 times powers of ten from below `low` to above `high`, both positive."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= about / 3 else (1,)
    found = [round(f * 10.0**k, 12 - k) for k in range(first, last + 1) for f in factors]
    below = max((t for t in found if t <= low * (1 + 1e-9)), default=found[0])
    above = min((t for t in found if t >= high * (1 - 1e-9) and t > below), default=10 * below)
    kept = [t for t in found if below <= t <= above] or [below, above]
    stride = max(1, math.ceil(len(kept) / (about + 1)))
    return kept if stride == 1 else [*kept[:-1:stride], kept[-1]]


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

    def __init__(
        self, width: int, height: int, x_ticks: list[float], y_ticks: list[float], is_log: bool
    ):
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self.left, self.right = _MARGIN_LEFT, width - _MARGIN_RIGHT
        self.top, self.bottom = _MARGIN_TOP, height - _MARGIN_BOTTOM
        self._scale = math.log10 if is_log else float

    def x(self, value: float) -> float:
        share = (value - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        low, high = self._scale(self.y_ticks[0]), self._scale(self.y_ticks[-1])
        share = (self._scale(value) - low) / (high - low)
        return round(self.bottom - share * (self.bottom - self.top), 1)


def _grid(frame: _Frame, x_title: str, y_title: str) -> str:
    rows = [
        f'<path class="grid" d="M{frame.left} {frame.y(y)}H{frame.right}"/>'
        f'<text x="{frame.left - 8}" y="{frame.y(y) + 4}" text-anchor="end">{number(y)}</text>'
        for y in frame.y_ticks
    ]
    columns = [
        f'<text x="{frame.x(x)}" y="{frame.bottom + 18}" text-anchor="middle">{number(x)}</text>'
        for x in frame.x_ticks
    ]
    titles = (
        f'<text class="title" x="4" y="14">{html.escape(y_title)}</text>'
        f'<text class="title" x="{frame.right}" y="{frame.bottom + 35}" text-anchor="end">'
        f"{html.escape(x_title)}</text>"
    )
    return "".join(rows + columns) + titles


def _level(frame: _Frame, name: str, value: float) -> str:
    y = frame.y(value)
    text = html.escape(f"{name} {number(value)}")
    return (
        f'<path class="level" d="M{frame.left} {y}H{frame.right}"/>'
        f'<text x="{frame.right}" y="{y - 5}" text-anchor="end">{text}</text>'
    )


def _line(frame: _Frame, line: Series) -> str:
    path = "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in line.points)
    classes = f"series-{line.style % NUM_STYLES}" + (" faint" if line.faint else "")
    drawn = f'<path class="{classes}" d="M{path}"/>'
    if not line.dots and len(line.points) > 1:
        return drawn
    return drawn + "".join(
        f'<circle class="{classes}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3.5"/>'
        for x, y in line.points
    )


def _stops(xs: Sequence[float]) -> list[tuple[float, float, float]]:
    """Returns evenly selected values of x, each with the ends of the range nearest to it."""
    stops = [x for x, _ in thin_out([(x, 0.0) for x in sorted(set(xs))], _MAX_STOPS)]
    ends = [(a + b) / 2 for a, b in itertools.pairwise(stops)]
    return list(zip([*stops[:1], *ends], stops, [*ends, *stops[-1:]], strict=True))


def _values_at(
    frame: _Frame, left: float, x: float, right: float, lines: Sequence[Series], x_title: str
) -> str:
    """Returns a group that covers a range around x, with the last value of each line until x."""
    texts, marks = [f"{x_title} {x:,.10g}"], ""
    for line in lines:
        index = bisect.bisect_right(line.points, x, key=lambda point: point[0])
        if index and x <= line.points[-1][0]:
            y = line.points[index - 1][1]
            texts.append(f"{line.name} {number(y)}")
            marks += f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>' if not line.dots else ""
    start, end = max(frame.left, frame.x(left) - 1), min(frame.right, frame.x(right) + 1)
    return (
        f'<g class="at"><rect x="{start}" y="{frame.top}" width="{round(end - start, 1)}" '
        f'height="{frame.bottom - frame.top}"/>'
        f'<path d="M{frame.x(x)} {frame.top}V{frame.bottom}"/>{marks}'
        f'<text x="{frame.right}" y="{frame.bottom + 35}" text-anchor="end">'
        f"{html.escape(' · '.join(texts))}</text></g>"
    )
