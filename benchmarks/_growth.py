"""Growth of a cost: measured in rounds, fitted, and described in words."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.harness import Curve, Relative, number

Points = list[tuple[float, float]]
Rounds = Mapping[str, list[float]]
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def in_rounds(
    fns: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: bool = True,
    clock: Callable[[], float] = time.thread_time,
    collect: bool = True,
) -> dict[str, list[float]]:
    """Returns the seconds of each function by round; all are run once in each, and once before the
    first with `warmup`.
    """
    times: dict[str, list[float]] = {name: [] for name in fns}
    if warmup:
        for fn in fns.values():
            fn()
    for _ in range(rounds):
        for name, fn in fns.items():
            if collect:
                gc.collect()
            start = clock()
            fn()
            times[name].append(clock() - start)
    return times


class Growth:
    """The times of several lines as a number grows, and their ratios to a base.

    Args:
        base: the base of all other lines; or a dict from line to base.
    """

    def __init__(self, base: str | Mapping[str, str]):
        self._base = base
        self.seconds: dict[str, Points] = {}
        self.relative: dict[str, list[Relative]] = {}

    def base(self, line: str) -> str:
        """Returns the base of a line; itself, if it is a base."""
        return self._base if isinstance(self._base, str) else self._base.get(line, line)

    def add(self, x: float, times: Rounds) -> None:
        """Takes in what was measured at x: by line, its seconds in each round."""
        for line, seconds in times.items():
            self.seconds.setdefault(line, []).append((x, statistics.median(seconds)))
            if (base := self.base(line)) != line:
                ratios = [a / b for a, b in zip(seconds, times[base], strict=True)]
                point = (x, min(ratios), statistics.median(ratios), max(ratios))
                self.relative.setdefault(line, []).append(point)

    def curve(self, name: str, title: str, *, x: str, per: str, clock: str, unit: str) -> Curve:
        """Returns the curve of the times; `per` names what x counts: "layer"."""
        lines = {
            line: [(at, seconds / _SECONDS[unit]) for at, seconds in points]
            for line, points in self.seconds.items()
        }
        said = words(lines, f"{unit} per {per}")
        for line, points in self.relative.items():
            at, *_, ratio, _ = points[-1]
            said[line] += f"; {number(ratio)} × {self.base(line)} at {at:,g}"
        spoken = [f"{line}: {text}" for line, text in said.items()]
        return Curve(name, title, x, f"{clock}, {unit}", lines, spoken, self.relative)


def exponent(points: Points) -> float:
    """Returns the p of y = c x^p: least squares of the logarithms over the upper half of the
    points.

    Below it, what does not grow at all is most of the cost.
    """
    upper = points[len(points) // 2 :] if len(points) > 3 else points
    x, y = np.log(np.array(upper)).T
    return float(np.polyfit(x, y, 1)[0])


def slope(points: Points) -> float:
    """Returns the b of y = a + b x, by least squares of the relative errors."""
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1, w=1 / y)[0])


def _grows(power: float) -> str:
    for limit, word in ((-0.15, "falls"), (0.15, "flat"), (0.8, "below linear"), (1.2, "linear")):
        if power < limit:
            return word
    return "above linear" if power < 1.7 else "quadratic"


def words(lines: Mapping[str, Points], per: str) -> dict[str, str]:
    """Returns the slope of each line in words; `per` names the units of y and x: "µs per array"."""
    said = {}
    for name, points in lines.items():
        if len(points) < 2:
            continue
        power, ends = exponent(points), (points[0], points[-1])
        if power < 0.15 or slope(points) <= 0:
            how = " and ".join(f"{number(y)} at {x:,g}" for x, y in ends)
        else:
            how = f"{number(slope(points))} {per}"
        said[name] = f"{_grows(power)} (x^{power:.2f}), {how}"
    return said
