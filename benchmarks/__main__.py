"""Runs the benchmarks and prints one table."""

import importlib
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.frame import results
from benchmarks.frame.results import Answer

QUESTIONS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "harness") and not path.stem.startswith("_")
)


def table(answers: dict[str, Answer]) -> Table:
    """The rows for a terminal."""
    made = Table("question", "ratio", "min … max", "pairs", "target", "", "times")
    for question, answer in answers.items():
        made.add_section()
        made.add_row(f"[bold]{question}[/]")
        for row in answer.rows:
            made.add_row(
                row.question,
                f"{row.median:.3f}",
                f"{row.low:.3f} … {row.high:.3f}",
                str(row.pairs),
                row.target,
                {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[row.met],
                row.note,
            )
    return made


def main(only: list[str]) -> int:
    """Runs the questions that are named, or all."""
    console = Console()
    if unknown := set(only) - set(QUESTIONS):
        console.print(f"unknown question {sorted(unknown)}; there are: {', '.join(QUESTIONS)}")
        return 2
    place = results.here()
    console.print(place)
    answers = {}
    for name in only or QUESTIONS:
        console.print(f"[dim]running {name} …[/]")
        answers[name] = Answer.of(place, importlib.import_module(f"benchmarks.{name}").run())
    console.print(table(answers))
    results.save({**results.load(), **answers})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
