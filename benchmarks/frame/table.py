"""The answers as one table, for a terminal and for a page."""

import collections
from collections.abc import Iterable, Iterator

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from benchmarks.frame.results import PEERS, Answer
from benchmarks.harness import Row, number

_NARROW = 140  # columns of a terminal: below, only rows with targets are shown
COLUMNS = ("", "ratio", "min … max", "pairs", "target", "", "times")
_VERDICT = 5  # the column of it
_COLORS = {"met": "green", "explained": "yellow", "missed": "red"}


def verdict(row: Row) -> str:
    """Returns whether a line is met, missed, or missed and explained; empty without a target."""
    if row.met is None:
        return ""
    return "met" if row.met else "explained" if row.why else "missed"


class Footnotes:
    """The explanations of lines that miss their targets, by number; equal ones once."""

    def __init__(self, answers: dict[str, Answer]):
        misses = [row for answer in answers.values() for row in answer.rows if row.met is False]
        self.texts = list(dict.fromkeys(row.why for row in misses if row.why))

    def verdict(self, row: Row) -> str:
        """Returns the verdict, with the number of its footnote."""
        word = verdict(row)
        return f"{word} [{self.texts.index(row.why) + 1}]" if word == "explained" else word

    def numbered(self) -> list[tuple[int, str]]:
        return list(enumerate(self.texts, 1))


def cells(row: Row, footnotes: Footnotes) -> tuple[str, ...]:
    """Returns a line as texts, in the order of `COLUMNS`."""
    spread = "counted" if row.pairs == 1 else f"{number(row.low)} … {number(row.high)}"
    pairs = "" if row.pairs == 1 else str(row.pairs)
    verdict = footnotes.verdict(row)
    return row.question, number(row.median), spread, pairs, row.target, verdict, row.note


def header(answer: Answer) -> list[str]:
    """Returns the place of measurement, one line each: versions, machine, and omitted libraries."""
    place = answer.place
    names = {"weft": "Weft", "jax": "JAX", "python": "Python", **PEERS}
    versions = [f"{shown} {place[name]}" for name, shown in names.items() if place.get(name)]
    lines = [
        ", ".join(versions),
        f"{place['machine']}; {place['cpus']} CPUs, {place['memory']}; {place['devices']}; "
        f"{place['date']}",
    ]
    missing = [shown for name, shown in PEERS.items() if not place.get(name)]
    if missing:
        lines.append(f"Not installed, so left out: {', '.join(missing)}.")
    return lines


def summary(answers: dict[str, Answer]) -> str:
    """Returns how many lines are met, explained and missed."""
    rows = [row for answer in answers.values() for row in answer.rows]
    counts = collections.Counter(map(verdict, rows))
    parts = [f"{counts[word]} {word}" for word in _COLORS if counts[word] or word != "explained"]
    rest = f", {counts['']} without a target" if counts[""] else ""
    return f"{len(rows)} lines: {', '.join(parts)}{rest}."


def misses(answers: dict[str, Answer]) -> Iterator[str]:
    """Yields the lines that are missed and not explained."""
    for answer in answers.values():
        for row in answer.rows:
            if verdict(row) == "missed":
                yield f"missed: {row.question}: {number(row.median)}, target {row.target}"


def rich_table(answers: dict[str, Answer], width: int) -> Table:
    """Returns the table for a terminal of a width, a section for each question."""
    footnotes = Footnotes(answers)
    kept = [c for c in COLUMNS if width >= _NARROW or c not in ("pairs", "times")]
    made = Table(box=None, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        if column in kept:
            right = column in ("ratio", "min … max", "pairs", "target")
            whole = right or i == _VERDICT
            made.add_column(column, justify="right" if right else "left", no_wrap=whole)
    for name, answer in answers.items():
        made.add_row(f"[bold]{name}[/]")
        for row in answer.rows:
            texts = [escape(text) for text in cells(row, footnotes)]
            color = _COLORS.get(verdict(row))
            texts[_VERDICT] = f"[{color}]{texts[_VERDICT]}[/]" if color else texts[_VERDICT]
            shown = [Padding(texts[0], (0, 0, 0, 2)), *texts[1:]]
            made.add_row(*(t for t, c in zip(shown, COLUMNS, strict=True) if c in kept))
        made.add_row()
    return made


def footnote_lines(answers: dict[str, Answer]) -> Iterable[str]:
    """Returns the explanations under the table."""
    return (f"[{i}] {text}" for i, text in Footnotes(answers).numbered())
