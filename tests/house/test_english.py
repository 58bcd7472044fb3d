"""The check of the project's English, on sentences that it accepts and refuses."""

import pytest

from tests.house.english import check


@pytest.mark.parametrize(
    "text",
    [
        "# What it costs is said elsewhere.",
        "# The value, of\n# which there is one.",
        'raise ValueError("x is no array")',
        '"""Docs.\n\nThe axes are likewise named.\n"""',
        '"""Paddings; see the module docstring."""',
    ],
)
def test_odd_words_are_found(text):
    assert len(list(check("tests/a.py", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "# The behaviour of neighbors.",
        '"""Normalises groups."""',
        'raise ValueError("x is misspelt")',
    ],
)
def test_british_spellings_are_found_outside_of_tests(text):
    assert len(list(check("examples/a.py", text))) == 1
    assert list(check("tests/a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "# There is no such file, and the mesh is no longer used.",
        "# Besides, anyone can read it.",
        "beside = anew = 1",
        "# `tree_serialise_leaves`, of another library, takes four hours of analysis.",
        'def f():\n    """The value."""',
    ],
)
def test_plain_words_are_not(text):
    assert list(check("docs/a.py", text)) == []


def test_words_of_pages_are_found_with_their_lines():
    assert list(check("docs/a.md", "# A\n\nIt goes on.")) == ["docs/a.md:3: 'goes on'"]


@pytest.mark.parametrize(
    ("doc", "finds"),
    [
        ("Returns the value.", 0),
        ("The value.", 1),
        ("What it returns.", 1),
        ("This returns the value.", 1),
    ],
)
def test_docstrings_of_functions_begin_with_a_verb(doc, finds):
    assert len(list(check("weft/a.py", f'def f():\n    """{doc}"""'))) == finds


def test_property_and_class_docstrings_may_begin_with_a_noun():
    text = '''
class A:
    """Array with a name."""

    @property
    def b(self):
        """The name."""
'''
    assert list(check("weft/a.py", text)) == []
