"""Each question that has a target in one line: Weft's value, and those of the others."""

from collections.abc import Iterator

from benchmarks.frame.naming import FAMILIES, family, library
from benchmarks.frame.results import Answer
from benchmarks.frame.table import Footnotes
from benchmarks.harness import Row, number

COLUMNS = ("measurement / baseline", "target", *FAMILIES, "")


def lines(answers: dict[str, Answer]) -> Iterator[tuple[str, ...]]:
    """Returns the cells, in the order of `COLUMNS`."""
    footnotes = Footnotes(answers)
    for subject, rows in by_subject(answers).items():
        targets = dict.fromkeys(row.target for row in rows.values() if row.target)
        if targets:
            cells = (_values(rows, of) for of in FAMILIES)
            yield subject, " or ".join(targets), *cells, _verdict(rows, footnotes)


def by_subject(answers: dict[str, Answer]) -> dict[str, dict[str, Row]]:
    """Returns the lines of each question, with the library left out of its name."""
    found: dict[str, dict[str, Row]] = {}
    for answer in answers.values():
        for row in answer.rows:
            subject, name = library(row.question)
            found.setdefault(subject, {})[name] = row
    return found


def _values(rows: dict[str, Row], of: str) -> str:
    return " · ".join(
        f"{_way(name)} {number(row.median)}".strip()
        for name, row in rows.items()
        if family(name) == of
    )


def _way(name: str) -> str:
    return name.removeprefix(family(name)).strip(" ,")


def _verdict(rows: dict[str, Row], footnotes: Footnotes) -> str:
    """Returns whether all targets are met, or names those missed."""
    judged = {name: row for name, row in rows.items() if row.at_most is not None}
    others = {name: footnotes.verdict(row) for name, row in judged.items() if not row.met}
    words = (f"{_way(name)} {word}".strip() for name, word in others.items())
    return " · ".join(words) if others else "met"
