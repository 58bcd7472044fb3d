"""Two things, run alternately in one process, and the ratio of their times.

Machines are noisy, and the noise comes in waves that are longer than one measurement. So A and B
alternate, each pair gives a ratio, and the median of the ratios is quoted with the smallest and the
largest.

A question is a file of this folder with a `run()` that returns a list of `Row`s and `Curve`s.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.frame.counting import calls as calls


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Less is better.

    Attributes:
        question: what was compared: "WHAT, LIBRARY / BASE", where the library is not Weft alone.
        median: of the ratios.
        low: the smallest ratio.
        high: the largest ratio.
        quartiles: those between which the middle half of the ratios lies.
        pairs: how many there were: at least 15, or 1 for what is counted.
        at_most: what it must reach; None for another library, which is shown for comparison.
        note: further information, such as the times behind the ratio.
        why: should the target be missed: the floor that was measured, and the reason.
    """

    question: str
    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    pairs: int
    at_most: float | None = None
    note: str = ""
    why: str = ""

    @property
    def target(self) -> str:
        """What it must reach, as text."""
        return "" if self.at_most is None else f"≤ {self.at_most:.3g}"

    @property
    def met(self) -> bool | None:
        """Whether it does; None where there is no target."""
        return None if self.at_most is None else self.median <= self.at_most

    def noted(self, note: str) -> "Row":
        """Returns the line with another note."""
        return dataclasses.replace(self, note=note)


# Of a point of a curve: x, and the smallest, the middle and the largest ratio to the base there.
Relative = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A cost that grows, as a plot and in words.

    Attributes:
        name: of the plot's file, without its suffix.
        title: the plot's title.
        x: the horizontal axis, with its unit.
        y: the vertical axis, with its unit.
        lines: by library, its points (x, y).
        words: the slopes, read, a line each: "Weft NNX: linear (x^1.02), 4.7 µs per array".
        relative: points relative to the base, by library. For counts the three are equal.
    """

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    words: list[str]
    relative: dict[str, list[Relative]] = dataclasses.field(default_factory=dict)


def ratios(
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    pairs: int = 15,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    collect: bool = False,
) -> tuple[list[float], list[float], list[float]]:
    """Runs `a` and `b` alternately.

    Args:
        a: what is judged. It waits for its own results.
        b: what it is compared with.
        pairs: the number of measured pairs.
        warmup: the number of pairs before them.
        clock: `time.perf_counter` for elapsed time, `time.thread_time` for the CPU time of Python.
        collect: whether garbage is collected before each measurement. Where much is made, the rare
            and long collections would otherwise always meet the same one of the two.

    Returns:
        The ratios a / b, the times of a, and the times of b, in seconds.
    """

    def measure(fn: Callable[[], Any]) -> float:
        if collect:
            gc.collect()
        start = clock()
        fn()
        return clock() - start

    for _ in range(warmup):
        a(), b()
    times = [(measure(a), measure(b)) for _ in range(pairs)]
    return [x / y for x, y in times], [x for x, _ in times], [y for _, y in times]


def row(
    question: str,
    measured: tuple[list[float], list[float], list[float]],
    *,
    at_most: float | None,
    note: str = "",
    why: str = "",
) -> Row:
    """Returns the line for ratios that must not be larger than `at_most`, if anything is.

    `why` explains a miss: it is shown only where the target is missed.
    """
    quotients, a, b = measured
    one = len(quotients) == 1
    quartiles = quotients * 3 if one else statistics.quantiles(quotients, method="inclusive")
    times = f"{_seconds(statistics.median(a))} against {_seconds(statistics.median(b))}"
    return Row(
        question=question,
        median=statistics.median(quotients),
        low=min(quotients),
        high=max(quotients),
        quartiles=(quartiles[0], quartiles[-1]),
        pairs=len(quotients),
        at_most=at_most,
        note=f"{times}; {note}" if note else times,
        why=why,
    )


def counted(
    question: str, value: float, *, at_most: float | None, note: str = "", why: str = ""
) -> Row:
    """Returns the line for something that is counted, once."""
    return row(question, ([value], [0.0], [0.0]), at_most=at_most, why=why).noted(note)


def number(value: float) -> str:
    """Returns three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs" if value >= 1e-6 else f"{value / 1e-9:.0f} ns"
