"""The page about configs: its blocks run in order and print what it says they print."""

import contextlib
import io
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"


def test_the_page_prints_what_it_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.M | re.S))
    assert len(blocks) == text.count("```python") == 5
    for block in blocks:
        # So that lines are those of the page, as errors and origins name them.
        source = "\n" * text[: block.start(1)].count("\n") + block[1]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(PAGE), "exec"), vars(module))
        assert printed.getvalue() == block[2]
