"""The fenced blocks of a page for people, and what its programs print.

A `python` block is a program; the `text` block that follows it, if there is one, is what it prints.
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


class Block(NamedTuple):
    """A fenced block: its language, its text, and how many lines of the page stand above it."""

    language: str
    text: str
    line: int


class Program(NamedTuple):
    """A block of Python and what the page says that it prints, None if the page does not say."""

    block: Block
    printed: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(f[1], f[2], text[: f.start(2)].count("\n")) for f in fences]


def programs(page: Path) -> list[Program]:
    found = blocks(page)
    return [
        Program(block, after.text if after is not None and after.language == "text" else None)
        for block, after in itertools.zip_longest(found, found[1:])
        if block.language == "python"
    ]


def run_in_order(page: Path, monkeypatch) -> list[tuple[str, str]]:
    """Runs a page's programs in one namespace; what the page says of each, and what it printed."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    results = []
    for block, printed in programs(page):
        # So that lines are those of the page, as errors and origins name them.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, vars(module))
        results.append((printed or "", output.getvalue()))
    return results
