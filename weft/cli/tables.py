"""Tables on standard output, which scripts can split by columns."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from weft.trainer.display import with_unit

T = TypeVar("T")

# A pipe has no width; this suffices for the paths of deep models.
_WIDTH_OF_PIPES = 200


class _Console(Console):
    """Console on standard output; `weft.cli` handles broken pipes."""

    def on_broken_pipe(self) -> None:
        """Reraises the error, where the library would end the process."""
        raise


def table_console() -> Console:
    """Returns a console on standard output, without highlighting."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_PIPES)


def tree_table(title: str, columns: Sequence[str], numbers: Sequence[str]) -> Table:
    """Creates a table with a first column of indented names; `numbers` are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for column in columns:
        right = column in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def tree_lines(leaves: Iterable[tuple[str, T]]) -> Iterator[tuple[str, str, T | None]]:
    """Yields the path, the indented name and the leaf of each line of a tree.

    The leaf of a name above others is None.

    >>> for line in tree_lines([("model/w", 1), ("model/b", 2), ("step", 3)]):
    ...     print(line)
    ('model', 'model', None)
    ('model/w', '  w', 1)
    ('model/b', '  b', 2)
    ('step', 'step', 3)
    """
    before: list[str] = []
    for path, leaf in leaves:
        names = path.split("/")
        places = list(itertools.accumulate(names, "{}/{}".format))
        for depth, (name, place) in enumerate(zip(names, places, strict=True)):
            if place not in before:
                yield place, "  " * depth + name, leaf if place == path else None
        before = places


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape.

    >>> shape_text([2, 3])
    '(2, 3)'
    """
    return f"({', '.join(map(str, shape))})"


def layout_text(axes: Iterable[Any] | None) -> str:
    """Formats a layout: the mesh axes per dimension, `-` for none; "" if fully replicated.

    >>> layout_text([None, "model", ("data", "fsdp")]), layout_text([None, None])
    ('(-, model, data×fsdp)', '')
    """
    axes = list(axes or [])
    if not any(axes):
        return ""
    names = [[a] if isinstance(a, str) else a or ["-"] for a in axes]
    return f"({', '.join('×'.join(n) for n in names)})"


def count_text(count: float) -> str:
    """Formats a large number with a unit; "" for 0.

    >>> count_text(950), count_text(12_340_000), count_text(0)
    ('950', '12.3M', '')
    """
    if count < 1000:
        return f"{count:.0f}" if count else ""
    return with_unit(count, ("k", "M", "G", "T", "P"))
