"""Every import of the docs, examples and tests of an earlier version works.

`imports.txt` was written by the version before the packages were rearranged: a module, and the name
taken from it. Names that no released version had are not in it.
"""

import importlib
from pathlib import Path

IMPORTS = (Path(__file__).parent / "imports.txt").read_text(encoding="utf-8").splitlines()


def test_every_import_works():
    assert len(IMPORTS) > 1590
    missing = []
    for line in IMPORTS:
        module, _, name = line.partition(" ")
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            missing.append(line)
    assert missing == []
