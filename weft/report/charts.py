"""Line charts: where their lines, labels and marks are drawn.

A `Chart` holds positions in pixels and texts; the macro `svg` of `templates/parts.html` makes a
single SVG element of it, without scripts. Colors are CSS classes (`series-0`, `series-1`, …,
`level`, `grid`) for the page's style sheet. The style sheet also shows the group `at` of the step
under the pointer, with the values there.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.typing import T

Point = tuple[float, float]

NUM_STYLES = 8
# Beyond these, differences and quotients of values overflow or lose all digits.
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


class Label(NamedTuple):
    """Text at a position on one of the axes."""

    position: float
    text: str


class Line(NamedTuple):
    """A `Series` as it is drawn.

    Attributes:
        path: What follows the pen: "M" and the first position, "L" and each other one.
        dots: Positions that are marked.
    """

    css_classes: str
    path: str
    dots: Sequence[Point]


class Stop(NamedTuple):
    """Range of positions in which the pointer shows the values at `x`.

    Attributes:
        text: The step, and each line's last value until there.
        marks: The points of these values on the lines.
    """

    left: float
    x: float
    right: float
    text: str
    marks: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Chart as it is drawn. All positions are in pixels from the upper left corner.

    Attributes:
        left: First position of the x axis; `right` is its last.
        top: Position of the highest value; `bottom` is that of the lowest.
        levels: Horizontal lines with a name.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_title: str
    y_title: str
    x_labels: Sequence[Label]
    y_labels: Sequence[Label]
    levels: Sequence[Label]
    lines: Sequence[Line]
    stops: Sequence[Stop]


def line_chart(
    series: Sequence[Series],
    *,
    y_title: str,
    x_title: str = "step",
    levels: Mapping[str, float] | None = None,
    width: int = 760,
    height: int = 340,
    is_log: bool = False,
) -> Chart:
    """Lays lines out over a grid with titled axes.

    Args:
        series: The lines, background lines first.
        levels: Horizontal lines by name, such as baselines.
        width: In CSS pixels, like `height`; the page may scale it.
        is_log: Whether the y axis is logarithmic; values that are not positive are omitted.

    >>> chart = line_chart([Series("train", [(1, 3.0), (2, 2.5)])], y_title="loss")
    >>> [label.text for label in chart.y_labels]
    ['2.5', '2.6', '2.7', '2.8', '2.9', '3']
    """
    smallest = _SMALLEST if is_log else -math.inf
    lines: list[Series] = []
    xs: list[float] = []
    ys: list[float] = []
    pointer_xs: set[float] = set()
    for line in series:
        points = [
            point for point in finite(line.points) if point[1] >= smallest
        ]
        if not points:
            continue
        if not line.faint:
            pointer_xs.update(x for x, _ in points)
        # Hundreds of points show all that pixels can; more only make the page larger.
        thin_points = thin_out(points)
        lines.append(line._replace(points=thin_points))
        for x, y in thin_points:
            xs.append(x)
            ys.append(y)
    drawn_levels: dict[str, float] = {}
    for name, y in (levels or {}).items():
        if y >= smallest and _is_drawn(y):
            drawn_levels[name] = y
    ys += drawn_levels.values()
    if not lines:
        xs, ys = [0.0, 1.0], [0.1, 1.0]

    x_ticks = ticks(min(xs), max(xs), width // 80)
    x_axis = _Axis(x_ticks, _MARGIN_LEFT, width - _MARGIN_RIGHT)
    if is_log:
        y_ticks, y_scale = log_ticks(min(ys), max(ys), height // 55), math.log10
    else:
        y_ticks, y_scale = ticks(min(ys), max(ys), height // 55), float
    # In SVG, y grows downwards.
    y_axis = _Axis(y_ticks, height - _MARGIN_BOTTOM, _MARGIN_TOP, y_scale)
    level_labels: list[Label] = []
    for name, y in drawn_levels.items():
        level_labels.append(Label(y_axis.position(y), f"{name} {number(y)}"))
    return Chart(
        width=width,
        height=height,
        left=x_axis.start,
        right=x_axis.end,
        top=y_axis.end,
        bottom=y_axis.start,
        x_title=x_title,
        y_title=y_title,
        x_labels=x_axis.labels(),
        y_labels=y_axis.labels(),
        levels=level_labels,
        lines=[_line(line, x_axis, y_axis) for line in lines],
        stops=_stops(sorted(pointer_xs), lines, x_axis, y_axis, x_title),
    )


def finite(points: Sequence[Point]) -> list[Point]:
    """Returns the points with finite coordinates, less those whose distance could be infinite."""
    return [(x, y) for x, y in points if _is_drawn(x) and _is_drawn(y)]


def _is_drawn(value: float) -> bool:
    return abs(value) < _LARGEST  # False for NaN


def thin_out(points: Sequence[T], at_most: int = _MAX_POINTS) -> list[T]:
    """Returns evenly selected points, including the first and the last."""
    if len(points) <= at_most:
        return list(points)
    last = len(points) - 1
    return [points[i * last // (at_most - 1)] for i in range(at_most)]


def smoothed(points: Sequence[Point], span: float = 0.05) -> list[Point]:
    """Returns a moving average over about a fraction `span` of the points, from the first value.

    With the decay d, it is sum(d^i y[n-i]) / sum(d^i) over all values so far: the denominator
    corrects the bias of the start.
    """
    points = finite(points)
    decay = 1 - 1 / max(1.0, span * len(points))
    averages: list[Point] = []
    total = weight = 0.0
    for x, y in points:
        total = decay * total + y
        weight = decay * weight + 1
        averages.append((x, total / weight))
    return averages


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers from below `low` to above `high`."""
    # Averages of equal values differ that much.
    rounding_error = 1e-9 * max(abs(low), abs(high))
    if high - low <= max(rounding_error, _SMALLEST):
        spread = abs(low) * 0.1
        if spread < _SMALLEST:
            spread = 1.0
        low, high = low - spread, high + spread
    smallest_step = (high - low) / max(about, 1)
    exponent = math.floor(math.log10(smallest_step))
    step = smallest_step
    for factor in (1, 2, 2.5, 5, 10):
        step = factor * 10.0**exponent
        if step >= smallest_step * 0.999:
            break
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - exponent) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Returns 1, 2 or 5 times powers of ten from below `low` to above `high`, both positive."""
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= about / 3 else (1,)
    candidates: list[float] = []
    for exponent in range(first, last + 1):
        for factor in factors:
            candidates.append(round(factor * 10.0**exponent, 12 - exponent))
    lower = [tick for tick in candidates if tick <= low * (1 + 1e-9)]
    start = max(lower, default=candidates[0])
    higher = [
        tick
        for tick in candidates
        if tick >= high * (1 - 1e-9) and tick > start
    ]
    end = min(higher, default=10 * start)
    enclosing = [tick for tick in candidates if start <= tick <= end] or [
        start,
        end,
    ]
    stride = max(1, math.ceil(len(enclosing) / (about + 1)))
    if stride == 1:
        return enclosing
    return [*enclosing[:-1:stride], enclosing[-1]]


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


class _Axis(NamedTuple):
    """Map from values to positions: the first tick is drawn at `start`, the last one at `end`."""

    ticks: Sequence[float]
    start: int
    end: int
    scale: Callable[[float], float] = float

    def position(self, value: float) -> float:
        low, high = self.scale(self.ticks[0]), self.scale(self.ticks[-1])
        share = (self.scale(value) - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    def labels(self) -> list[Label]:
        return [Label(self.position(tick), number(tick)) for tick in self.ticks]


def _line(line: Series, x_axis: _Axis, y_axis: _Axis) -> Line:
    points = [(x_axis.position(x), y_axis.position(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    css_classes = f"series-{line.style % NUM_STYLES}"
    if line.faint:
        css_classes += " faint"
    # A path of one point is not visible.
    dots = points if line.dots or len(points) == 1 else []
    return Line(css_classes, path, dots)


def _stops(
    xs: Sequence[float],
    lines: Sequence[Series],
    x_axis: _Axis,
    y_axis: _Axis,
    x_title: str,
) -> list[Stop]:
    """Returns evenly selected values of x, each with the range of positions nearest to it.

    With stops 0, 4 and 10 the ranges are [0, 2], [2, 7] and [7, 10].
    """
    xs = thin_out(xs, _MAX_STOPS)
    middles = [(x + following) / 2 for x, following in itertools.pairwise(xs)]
    edges = [*xs[:1], *middles, *xs[-1:]]
    stops: list[Stop] = []
    for x, (left, right) in zip(xs, itertools.pairwise(edges), strict=True):
        texts = [f"{x_title} {x:,.10g}"]
        marks: list[Point] = []
        for line in lines:
            if line.faint:
                continue
            num_until_x = bisect.bisect_right(
                line.points, x, key=lambda point: point[0]
            )
            if num_until_x == 0 or x > line.points[-1][0]:
                continue
            y = line.points[num_until_x - 1][1]
            texts.append(f"{line.name} {number(y)}")
            if not line.dots:
                marks.append((x_axis.position(x), y_axis.position(y)))
        # One pixel wider on both sides, so that rounding leaves no gap between two ranges.
        stops.append(
            Stop(
                left=max(x_axis.start, x_axis.position(left) - 1),
                x=x_axis.position(x),
                right=min(x_axis.end, x_axis.position(right) + 1),
                text=" · ".join(texts),
                marks=marks,
            )
        )
    return stops
