"""Texts that an earlier version wrote are read: of recipes, of each class, and of other values.

The files in golden/ were written by the version before the packages were rearranged. They are never
written again: a name in them that has moved belongs in the table of moved names.
"""

from pathlib import Path

import pytest

from weft.config import from_text, to_text
from weft.config.text_read import read_value
from weft.config.text_write import value_text

GOLDEN = Path(__file__).parent / "golden"
ALLOW = ("weft",)  # launchers and writers to services too, which a text may name only if allowed


def texts(name, separator):
    return (GOLDEN / name).read_text(encoding="utf-8").strip().split(separator)


@pytest.mark.parametrize("recipe", ["digits", "lm-lora", "lm-moe", "lm-nnx"])
def test_the_config_of_a_recipe(recipe):
    (text,) = texts(f"{recipe}.txt", "\n\n")
    cfg = from_text(text)
    assert from_text(to_text(cfg)) == cfg


def test_the_config_of_each_class():
    found = [from_text(text, allow=ALLOW) for text in texts("classes.txt", "\n\n")]
    assert len(found) == 232
    for cfg in found:
        assert from_text(to_text(cfg), allow=ALLOW) == cfg


@pytest.mark.parametrize("text", texts("values.txt", "\n"))
def test_a_value(text):
    value = read_value(text)
    again = read_value(value_text(value))
    assert again == value and type(again) is type(value)
