"""Changes between two runs that exceed the noise of each.

A line of the table moved when the middle halves of its ratios in the two runs do not overlap, and
the median changed by more than 5 %. What is counted has no noise, so there any change by more than
5 % counts.

A line of a curve is compared with its base, measured in the same rounds. It moved when in the
upper half of its points, where the slope is read, all ratios to the base are on the same side of
those before, at each point, and the medians there changed by more than 5 %.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from benchmarks.frame.results import Answer
from benchmarks.harness import Relative, Row, number

SMALLEST = 0.05


@dataclasses.dataclass(frozen=True)
class Move:
    """A line that is faster or slower than it was.

    Attributes:
        line: the question of the table, or the curve and its library.
        before: the median, and its noise in words.
        after: the same now.
    """

    line: str
    before: tuple[float, str]
    after: tuple[float, str]

    @property
    def is_better(self) -> bool:
        return self.after[0] < self.before[0]

    def __str__(self) -> str:
        word = "better" if self.is_better else "worse"
        values = (f"{number(median)} ({noise})" for median, noise in (self.before, self.after))
        return f"{word}: {self.line}: {' -> '.join(values)}"


def _of_row(row: Row) -> tuple[float, str]:
    return row.median, "counted" if row.pairs == 1 else _range(*row.quartiles)


def _of_point(point: Relative) -> tuple[float, str]:
    _, low, median, high = point
    return median, "counted" if low == high else _range(low, high)


def _range(low: float, high: float) -> str:
    return f"{number(low)} … {number(high)}"


def has_moved(before: Row, after: Row) -> bool:
    """Returns whether a line is another than it was, beyond the noise of both runs."""
    overlap = (
        before.quartiles[0] <= after.quartiles[1] and after.quartiles[0] <= before.quartiles[1]
    )
    return not overlap and abs(after.median - before.median) > SMALLEST * before.median


def has_changed_growth(before: list[Relative], after: list[Relative]) -> bool:
    """Returns whether a line of a curve changed relative to its base, beyond the noise of both
    runs.
    """
    old = {x: ratios for x, *ratios in before}
    both = [(old[x], ratios) for x, *ratios in after if x in old]
    upper = both[len(both) // 2 :]
    worse = [a[0] > b[2] and a[1] > (1 + SMALLEST) * b[1] for b, a in upper]
    better = [a[2] < b[0] and a[1] < (1 - SMALLEST) * b[1] for b, a in upper]
    return bool(upper) and (all(worse) or all(better))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs of the same questions.

    Attributes:
        moves: the lines that moved, worse ones first.
        same: how many lines did not.
        new: lines that there were not.
        gone: lines that there are no longer.
        elsewhere: the questions that were measured on another machine before.
    """

    moves: list[Move]
    same: int
    new: list[str]
    gone: list[str]
    elsewhere: list[str]

    def lines(self) -> Iterator[str]:
        """Returns the report, one string per line."""
        if not self.moves and not self.same:
            yield "Nothing of this was committed before."
            return
        yield (
            f"Compared with the last commit: {len(self.moves)} of "
            f"{len(self.moves) + self.same} lines moved beyond noise."
        )
        if self.elsewhere:
            yield f"There, another machine answered: {', '.join(self.elsewhere)}."
        yield from map(str, self.moves)
        yield from (f"new: {line}" for line in self.new)
        yield from (f"gone: {line}" for line in self.gone)


def compare(before: dict[str, Answer], after: dict[str, Answer]) -> Comparison:
    """Compares the questions of `after` with what `before` says of them."""
    old = {key: line for name in after if name in before for key, line in _lines(name, before)}
    new = {key: line for name in after for key, line in _lines(name, after)}
    both = [(key[1], old[key], new[key]) for key in new if key in old]
    moves = [move for pair in both if (move := _move(*pair))]
    return Comparison(
        moves=sorted(moves, key=lambda move: move.is_better),
        same=len(both) - len(moves),
        new=[line for name, line in new if (name, line) not in old],
        gone=[line for name, line in old if (name, line) not in new],
        elsewhere=[
            name
            for name, answer in after.items()
            if name in before and _machine(before[name]) != _machine(answer)
        ],
    )


_Line = Row | list[Relative]


def _lines(name: str, answers: dict[str, Answer]) -> Iterable[tuple[tuple[str, str], _Line]]:
    """Yields the lines of the table and of the curves of a question, by its name and theirs."""
    for row in answers[name].rows:
        yield (name, row.question), row
    for curve in answers[name].curves:
        yield from (((name, f"{curve.title}, {of}"), line) for of, line in curve.relative.items())


def _move(line: str, before: _Line, after: _Line) -> Move | None:
    if isinstance(before, Row) and isinstance(after, Row):
        return Move(line, _of_row(before), _of_row(after)) if has_moved(before, after) else None
    assert isinstance(before, list) and isinstance(after, list)
    if not has_changed_growth(before, after):
        return None
    last = max({x for x, *_ in before} & {x for x, *_ in after})
    ends = (next(point for point in points if point[0] == last) for points in (before, after))
    return Move(f"{line} at {last:,g}", *map(_of_point, ends))


def _machine(answer: Answer) -> list[object]:
    return [answer.place.get(key) for key in ("machine", "cpus", "memory", "devices")]
