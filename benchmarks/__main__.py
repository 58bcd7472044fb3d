"""Runs the benchmarks and prints one table."""

import importlib
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness

QUESTIONS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "harness") and not path.stem.startswith("_")
)


def table(rows: list[harness.Row]) -> Table:
    """The rows for a terminal."""
    made = Table("question", "ratio", "min … max", "pairs", "target", "", "times")
    for row in rows:
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
    console.print(harness.machine())
    rows = []
    for name in only or QUESTIONS:
        console.print(f"[dim]running {name} …[/]")
        rows += importlib.import_module(f"benchmarks.{name}").run()
    console.print(table(rows))
    harness.save(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
