"""How a cost grows: measured in rounds, fitted, and said in words."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Points = list[tuple[float, float]]


def in_rounds(
    fns: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.thread_time,
    collect: bool = True,
) -> dict[str, float]:
    """The median seconds of each function; all are run once in each round, after one before."""
    times: dict[str, list[float]] = {name: [] for name in fns}
    for fn in fns.values():
        fn()
    for _ in range(rounds):
        for name, fn in fns.items():
            if collect:
                gc.collect()
            start = clock()
            fn()
            times[name].append(clock() - start)
    return {name: statistics.median(of) for name, of in times.items()}


def exponent(points: Points) -> float:
    """p of y = c x^p: least squares of the logarithms over the upper half of the points.

    Below it, what does not grow at all is most of the cost.
    """
    upper = points[len(points) // 2 :] if len(points) > 3 else points
    x, y = np.log(np.array(upper)).T
    return float(np.polyfit(x, y, 1)[0])


def slope(points: Points) -> float:
    """b of y = a + b x, least squares of the relative errors."""
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1, w=1 / y)[0])


def _grows(power: float) -> str:
    for limit, word in ((0.15, "flat"), (0.8, "below linear"), (1.2, "linear")):
        if power < limit:
            return word
    return "above linear" if power < 1.7 else "quadratic"


def words(lines: Mapping[str, Points], per: str) -> str:
    """The slopes of lines in words; `per` names the unit of y by that of x: "µs per array"."""
    said = []
    for name, points in lines.items():
        if len(points) < 2:
            continue
        power, ends = exponent(points), (points[0], points[-1])
        if power < 0.15:
            how = f"{ends[0][1]:.3g} at {ends[0][0]:g} and {ends[1][1]:.3g} at {ends[1][0]:g}"
        else:
            how = f"{slope(points):.3g} {per}"
        said.append(f"{name}: {_grows(power)} (x^{power:.2f}), {how}")
    return "; ".join(said)
