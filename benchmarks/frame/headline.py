"""The ten measurements that open the page on speed, one line each."""

from collections.abc import Iterator

from benchmarks.frame.naming import FAMILIES, family
from benchmarks.frame.results import Answer
from benchmarks.frame.short import by_subject
from benchmarks.harness import Row, number

LIBRARIES = tuple(name for name in FAMILIES if not name.startswith("raw"))
COLUMNS = ("", *LIBRARIES)
# Names of questions, and what each means to a reader.
QUESTIONS = {
    "dispatch of a train step, 100 arrays / raw": "A call of a compiled train step",
    "trace 24 layers / raw": "Tracing 24 layers",
    "trace a scan of 12 layers / raw": "Tracing a scan of 12 layers",
    "abstract init of 6 layers / raw": "Shapes of the parameters, without computing them",
    "eager forward of an MLP of 8 layers of width 8 / raw": "A small model, not compiled",
    "read a variable / plain Python": "Reading a variable, against an attribute in Python",
    "import weft.nnx / import jax": "`from weft import nnx`, against `import jax`",
    "a step of lm / plain JAX, unrolled": "A training step of the default language model",
    "a step of lm / PyTorch, compiled": "The same step, against compiled PyTorch",
    "peak memory of a step of 50M parameters, the default trainer / raw": (
        "Peak memory of a training step of 50 million parameters"
    ),
}


def lines(answers: dict[str, Answer]) -> Iterator[tuple[str, ...]]:
    """Returns the cells of the questions that were answered, in the order of `COLUMNS`."""
    rows_by_subject = by_subject(answers)
    for subject, text in QUESTIONS.items():
        rows = rows_by_subject.get(subject)
        if rows is not None:
            cells = [_range(rows, library) for library in LIBRARIES]
            yield (text, *cells)


def _range(rows: dict[str, Row], library: str) -> str:
    """Returns the smallest and the largest median of a library's ways to write the program."""
    medians = [row.median for name, row in rows.items() if family(name) == library]
    if not medians:
        return ""
    smallest = number(min(medians))
    largest = number(max(medians))
    if smallest == largest:
        return smallest
    return f"{smallest}–{largest}"
