"""The counts of `make house`, each on a source that was counted by hand."""

import ast
from pathlib import Path

import pytest

import weft
from tests.house.call_paths import paths
from tests.house.sources import Source, cycles, import_graph, is_any, sources

TEXT = '''"""A module.

Of two paragraphs.
"""

import os  # a comment
from a import (
    b,
    c,
)

__all__ = [
    "f",
]


# A comment.
def f(x: int, *args: "Any", y=None, **kwargs: Any) -> Any:
    """Documented."""
    from a.b import d

    text = """not
    a docstring"""
    return _once(x), text, d


def _once(x):
    return _twice(_twice(x))


def _twice(x): ...
'''


@pytest.fixture
def source():
    return Source("a.here", TEXT, ast.parse(TEXT))


def test_lines(source):
    assert len(source.docstring_lines()) == 5
    assert len(source.import_lines()) == 9
    assert len(source.code_lines()) == 16


def test_helpers_used_once(source):
    assert list(source.small_helpers()) == ["_once"]


def test_any_annotations(source):
    assert [is_any(note) for note in source.parameters()] == [False, False, True]


def test_import_cycles():
    imports = {"a": "import a.b", "a.b": "from a.c import x", "a.c": "def f(): from a import b"}
    graph = import_graph(Source(name, text, ast.parse(text)) for name, text in imports.items())
    assert graph == {"a": {"a.b"}, "a.b": {"a.c"}, "a.c": {"a.b"}}
    assert cycles(graph) == [{"a.b", "a.c"}]


def test_each_call_path_has_frames():
    assert all(1 < len(frames) < 60 for _, frames in paths())


def test_no_import_cycles():
    files = sources(Path(weft.__file__).parent)
    assert cycles(import_graph(files)) == []
