"""Generated parts of the two pages on speed, between two marks; the rest is written by hand.

`docs/performance.md` has ten numbers, `docs/performance-results.md` all of them. Both are made from
`results.json` alone, so a test can compare them.
"""

import json
import re
from collections.abc import Iterable, Iterator

from benchmarks.frame import headline, plots, short, table
from benchmarks.frame.results import RESULTS, ROOT, Answer

PAGE = ROOT / "docs" / "performance.md"
RESULTS_PAGE = ROOT / "docs" / "performance-results.md"
PLOTS = PAGE.with_suffix("")
BEGIN, END = "<!-- The benchmarks write everything from here. -->", "<!-- To here. -->"
_IN_SHORT = (
    "Median ratios, or counts, of all lines with a target, by API and library. Raw JAX has a "
    "value if it is written in the same way, or if it is a lower bound."
)
NOTHING = "Nothing was measured yet: `make bench` writes the table here."


def write(answers: dict[str, Answer]) -> list[str]:
    """Writes the pages and their plots; returns what there is to say about them, a line each."""
    PAGE.write_text(updated_front(PAGE.read_text(encoding="utf-8"), answers), encoding="utf-8")
    all_results = updated(RESULTS_PAGE.read_text(encoding="utf-8"), answers)
    RESULTS_PAGE.write_text(all_results, encoding="utf-8")
    paths = [path.relative_to(ROOT).as_posix() for path in (RESULTS, PAGE, RESULTS_PAGE)]
    written = f"Written: {', '.join(paths)}"
    try:
        plot_paths = plots.draw(answers, PLOTS)
    except ImportError as error:
        return [f"{written}.", f"No plots were drawn: {error}. The extra bench has matplotlib."]
    return [f"{written}, and {len(plot_paths)} plots in {PLOTS.relative_to(ROOT)}/."]


def updated_front(text: str, answers: dict[str, Answer]) -> str:
    """Returns the text of the first page with its ten numbers as they are now."""
    lines = [NOTHING, ""]
    if answers:
        columns = "|---|" + "--:|" * len(headline.LIBRARIES)
        newest = max(answers.values(), key=lambda answer: str(answer.place["date"]))
        place = " · ".join(table.header(newest))
        lines = [*_table(headline.COLUMNS, columns, headline.lines(answers)), place, ""]
    return _between_marks(text, lines)


def updated(text: str, answers: dict[str, Answer]) -> str:
    """Returns the text of the page of all results with them as they are now."""
    return _between_marks(text, _shown(answers))


def _between_marks(text: str, lines: Iterable[str]) -> str:
    before = text.split(BEGIN)[0]
    after = text.split(END)[-1]
    return "\n".join([before + BEGIN, "", *lines, END + after])


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
