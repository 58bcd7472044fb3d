"""Prints how the code base measures: python -m tests.house."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """A measure of the code base.

    Attributes:
        name: what is counted.
        before: the count before the code base was rebuilt.
        now: the count.
        target: the most that it should be.
        percent: whether the counts are shares.
    """

    name: str
    before: float
    now: float
    target: float
    percent: bool = False

    def cells(self) -> list[str]:
        form = "{:.0%}" if self.percent else "{:,}"
        met = "yes" if self.now <= self.target else "no"
        counts = (form.format(count) for count in (self.before, self.now, self.target))
        return [self.name, *counts, met]


def texts() -> Iterator[Row]:
    """Yields the measures of the source files."""
    from tests.house import sources

    files = sources.sources(ROOT / "weft")
    code = {file.module: file.code_lines() for file in files}
    lines = sum(map(len, code.values()))
    imports = sum(len(file.import_lines() & code[file.module]) for file in files)
    graph = sources.import_graph(files)
    importers = [
        sum(name in imported for imported in graph.values())
        for name in graph
        if name.startswith("weft.trainer.")
    ]
    annotations = [note for file in files for note in file.parameters()]
    plain_any = [note for note in annotations if sources.is_any(note)]
    helpers = sum(1 for file in files for _ in file.small_helpers())
    yield Row("imports and `__all__`, share of code lines", 0.15, imports / lines, 0.07, True)
    yield Row("files", 510, len(files), float("inf"))
    yield Row("trainer modules with one importer", 38, importers.count(1), 5)
    yield Row("private helpers of at most 6 lines used once", 334, helpers, float("inf"))
    share = len(plain_any) / len(annotations)
    yield Row("annotated parameters that are plain `Any`", 0.23, share, 0.08, True)
    yield Row("import cycles between files", 9, len(sources.cycles(graph)), 0)


def suite() -> Iterator[Row]:
    """Yields the minutes that `make test` took here last, if it passed."""
    seconds = ROOT / ".pytest_cache/v/weft/suite_seconds"
    if seconds.exists():
        minutes = round(json.loads(seconds.read_text(encoding="utf-8")) / 60, 1)
        yield Row("minutes of the last `make test`", 24, minutes, 12)
    else:
        print("Run `make test` first, to see how long it takes.", file=sys.stderr)


def runs() -> Iterator[Row]:
    """Yields the measures of programs that run."""
    from tests.house import call_paths

    wanted = {
        "nn.scan(nn.remat(Block)) in apply": (30, 14),
        "nn.vmap(Module)": (10, 6),
        "nnx.jit, first call": (9, 4),
        "nnx.vmap(f)": (7, 4),
        "Repeat to the child's forward": (17, 10),
    }
    for name, frames in call_paths.paths():
        before, target = wanted[name]
        yield Row(f"frames: {name}", before, len(frames), target)
    frames, calls = call_paths.trainer()
    yield Row("frames: SpmdTrainer.run to the model's forward", 30, len(frames), 14)
    yield Row("Python calls between two warm trainer steps", 310, calls, 70)


def table(rows: list[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    cells = [["", "before", "now", "target", "met"], *(row.cells() for row in rows)]
    cells = [[cell.replace("inf", "") for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(table([*runs(), *texts(), *suite()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
