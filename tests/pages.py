"""The fenced blocks of a page for people, and what its programs print.

A `python` block is a program; the `text` block that follows it, if there is one, is what it prints.
One with a title is a file: that of WEFT is run with the page's programs, and the others, such as
the same program of another library, only where that library is installed.
"""

import contextlib
import io
import itertools
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WEFT = "with_weft.py"


class Block(NamedTuple):
    """A fenced block: its language, title and text, and how many lines of the page precede it."""

    language: str
    title: str | None
    text: str
    line: int


class Program(NamedTuple):
    """A block of Python and what the page says that it prints, None if the page does not say."""

    block: Block
    printed: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    pattern = r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$'
    fences = re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL)
    return [Block(f[1], f[2], f[3], text[: f.start(3)].count("\n")) for f in fences]


def programs(page: Path) -> list[Program]:
    """Returns the programs of a page that are run in order in one namespace."""
    return [p for p in _all_programs(page) if p.block.title in (None, WEFT)]


def files(page: Path) -> dict[str, Program]:
    """Returns the programs of a page that have a title, by it."""
    return {p.block.title: p for p in _all_programs(page) if p.block.title is not None}


def _all_programs(page: Path) -> list[Program]:
    found = blocks(page)
    return [
        Program(block, after.text if after is not None and after.language == "text" else None)
        for block, after in itertools.zip_longest(found, found[1:])
        if block.language == "python"
    ]


def run_in_order(page: Path, monkeypatch, *, with_files=False) -> list[tuple[str, str]]:
    """Runs a page's programs in one namespace; what the page says of each, and what it printed.

    Args:
      with_files: Runs the other programs that have a title too, each in its own namespace. They
        import each other as they have been run, by their titles.
    """
    shared = types.ModuleType("__main__")
    results = []
    for block, printed in _all_programs(page) if with_files else programs(page):
        module = shared if block.title in (None, WEFT) else types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        if with_files and block.title is not None:
            monkeypatch.setitem(sys.modules, block.title.removesuffix(".py"), module)
        # So that lines are those of the page, as errors and origins name them.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, vars(module))
        results.append((printed or "", output.getvalue()))
    return results
