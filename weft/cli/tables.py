"""Tables without lines, which a terminal shows and a script can cut by columns."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# A pipe has no width; this is enough for the paths of deep models.
_WIDTH_OF_PIPES = 200


class _Console(Console):
    """Standard output; `weft.cli` decides what happens if nobody reads it."""

    def on_broken_pipe(self) -> None:
        """Raises it again, where the library would end the process."""
        raise


def table_console() -> Console:
    """Where tables are printed: standard output, without highlighting."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_PIPES)


def tree_table(title: str, columns: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table whose first column holds indented names.

    Args:
        title: Of the first column.
        columns: The titles of the others.
        numbers: Which of them hold numbers, to be set to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for column in columns:
        right = column in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def shape_text(shape: Iterable[int]) -> str:
    """A shape in brackets.

    >>> shape_text([2, 3])
    '(2, 3)'
    """
    return f"({', '.join(map(str, shape))})"


def layout_text(axes: Iterable[Any] | None) -> str:
    """The mesh axes of each axis, `-` for none; nothing if no axis is laid over the mesh.

    >>> layout_text([None, "model", ("data", "fsdp")]), layout_text([None, None])
    ('(-, model, data×fsdp)', '')
    """
    axes = list(axes or [])
    if not any(axes):
        return ""
    names = [[a] if isinstance(a, str) else a or ["-"] for a in axes]
    return f"({', '.join('×'.join(n) for n in names)})"


def count_text(count: float) -> str:
    """A large number with a unit; nothing for 0.

    >>> count_text(950), count_text(12_340_000), count_text(0)
    ('950', '12.3M', '')
    """
    if count < 1000:
        return f"{count:.0f}" if count else ""
    for unit in ("k", "M", "G", "T"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f}{unit}"
    return f"{count / 1000:.1f}P"
