"""What moved between two runs, beyond the noise of each.

A line moved when the middle halves of its ratios in the two runs do not overlap, and the median
changed by more than 5 %. What is counted has no noise, so there any change by more than 5 % counts.
"""

import dataclasses
from collections.abc import Iterator

from benchmarks.frame.results import Answer
from benchmarks.harness import Row

SMALLEST = 0.05


@dataclasses.dataclass(frozen=True)
class Move:
    """A line that is faster or slower than it was: both its answers."""

    before: Row
    after: Row

    @property
    def is_better(self) -> bool:
        return self.after.median < self.before.median

    def __str__(self) -> str:
        word = "better" if self.is_better else "worse"
        values = (f"{row.median:.3g} ({_range(row)})" for row in (self.before, self.after))
        return f"{word}: {self.after.question}: {' -> '.join(values)}"


def _range(row: Row) -> str:
    return "counted" if row.pairs == 1 else f"{row.quartiles[0]:.3g} … {row.quartiles[1]:.3g}"


def has_moved(before: Row, after: Row) -> bool:
    """Whether a line is another than it was, beyond the noise of both runs."""
    overlap = (
        before.quartiles[0] <= after.quartiles[1] and after.quartiles[0] <= before.quartiles[1]
    )
    return not overlap and abs(after.median - before.median) > SMALLEST * before.median


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
        """What there is to say, a line each."""
        if not self.moves and not self.same:
            yield "Nothing of this was committed before."
            return
        yield (
            f"Beside the last commit: {len(self.moves)} of {len(self.moves) + self.same} lines "
            "moved beyond noise."
        )
        if self.elsewhere:
            yield f"There, another machine answered: {', '.join(self.elsewhere)}."
        yield from map(str, self.moves)
        yield from (f"new: {question}" for question in self.new)
        yield from (f"gone: {question}" for question in self.gone)


def compare(before: dict[str, Answer], after: dict[str, Answer]) -> Comparison:
    """Compares the questions of `after` with what `before` says of them."""
    old = {(name, row.question): row for name in after for row in _rows(before, name)}
    new = {(name, row.question): row for name in after for row in _rows(after, name)}
    both = [(old[key], new[key]) for key in new if key in old]
    moves = [Move(*rows) for rows in both if has_moved(*rows)]
    return Comparison(
        moves=sorted(moves, key=lambda move: move.is_better),
        same=len(both) - len(moves),
        new=[question for name, question in new if (name, question) not in old],
        gone=[question for name, question in old if (name, question) not in new],
        elsewhere=[
            name
            for name, answer in after.items()
            if name in before and _machine(before[name]) != _machine(answer)
        ],
    )


def _rows(answers: dict[str, Answer], name: str) -> list[Row]:
    return answers[name].rows if name in answers else []


def _machine(answer: Answer) -> list[object]:
    return [answer.place.get(key) for key in ("machine", "cpus", "memory", "devices")]
