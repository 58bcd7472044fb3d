"""Generated part of `docs/performance.md`, between two marks; the rest is written by hand.

It is made from `results.json` alone, so a test can compare the two.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.frame import plots, short, table
from benchmarks.frame.results import RESULTS, ROOT, Answer

PAGE = ROOT / "docs" / "performance.md"
PLOTS = PAGE.with_suffix("")
BEGIN, END = "<!-- `make bench` writes everything from here. -->", "<!-- To here. -->"
_IN_SHORT = (
    "Median ratios, or counts, of all lines with a target, by API and library. Raw JAX has a "
    "value if it is written in the same way, or if it is a lower bound."
)
NOTHING = "Nothing was measured yet: `make bench` writes the table here."


def write(answers: dict[str, Answer], page: Path = PAGE) -> list[str]:
    """Writes the page and its plots; returns what there is to say about it, a line each."""
    text = page.read_text(encoding="utf-8")
    page.write_text(updated(text, answers), encoding="utf-8")
    written = f"Written: {RESULTS.relative_to(ROOT)}, {page.relative_to(ROOT)}"
    try:
        drawn = plots.draw(answers, page.with_suffix(""))
    except ImportError as error:
        return [f"{written}.", f"No plots were drawn: {error}. The extra bench has matplotlib."]
    return [f"{written}, and {len(drawn)} plots in {page.with_suffix('').relative_to(ROOT)}/."]


def updated(text: str, answers: dict[str, Answer]) -> str:
    """Returns the text of the page with the results as they are now."""
    before, after = text.split(BEGIN)[0], text.split(END)[-1]
    return "\n".join([before + BEGIN, "", *_shown(answers), END + after])


def _shown(answers: dict[str, Answer]) -> Iterator[str]:
    if not answers:
        yield from (NOTHING, "")
        return
    yield from _places(answers)
    yield from (table.summary(answers), "")
    footnotes = table.Footnotes(answers)
    yield from ("### In short", "", _IN_SHORT, "")
    yield from _table(short.COLUMNS, "|---|--:|--:|--:|--:|--:|--:|---|", short.lines(answers))
    if plots.relative_to_raw(answers):
        yield from (_image("Times of raw JAX, by question and library", plots.OVERVIEW), "")
    for name, answer in answers.items():
        yield from (f"### {name}", "", answer.asks, "")
        if answer.rows:
            names = "measurement / baseline", *table.COLUMNS[1:]
            lines = (table.cells(row, footnotes) for row in answer.rows)
            yield from _table(names, "|---|--:|--:|--:|--:|---|---|", lines)
        for curve in answer.curves:
            yield from (_image(curve.title, curve.name), "", f"{curve.title}:", "")
            yield from (f"- {said}" for said in curve.words)
            yield ""
    if footnotes.texts:
        yield from ("### Targets that are missed", "")
        yield from (f"- [{i}] {text}" for i, text in footnotes.numbered())
        yield ""


def _places(answers: dict[str, Answer]) -> Iterator[str]:
    """Returns the distinct places of measurement."""
    places: dict[str, list[str]] = {}
    for name, answer in answers.items():
        places.setdefault(json.dumps(answer.place), []).append(name)
    for names in sorted(places.values(), key=len, reverse=True):
        of = "" if len(names) == len(answers) else f" ({', '.join(names)})"
        yield from (f"{' · '.join(table.header(answers[names[0]]))}{of}", "")


def _table(names: Iterable[str], aligned: str, lines: Iterable[Iterable[str]]) -> Iterator[str]:
    yield _line(*names)
    yield aligned
    yield from (_line(*cells) for cells in lines)
    yield ""


def _line(*cells: str) -> str:
    return "| " + " | ".join(re.sub(r"([|*_<])", r"\\\1", cell) for cell in cells) + " |"


def _image(title: str, name: str) -> str:
    return f"![{title}]({PLOTS.name}/{name}.svg)"
