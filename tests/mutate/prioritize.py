"""A pytest plugin: runs the tests first that name what is mutated, in NAMES, the nearest first."""

import inspect
import os
import re

import pytest

NAMES = "WEFT_MUTATED_NAMES"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [re.compile(rf"\b{name}\b") for name in os.environ[NAMES].split()]

    def rank(item: pytest.Item) -> int:
        text = _source(item)
        return next((at for at, name in enumerate(names) if name.search(text)), len(names))

    items.sort(key=rank)


def _source(item: pytest.Item) -> str:
    if isinstance(item, pytest.DoctestItem):
        return f"{item.name} {item.dtest.docstring}"
    assert isinstance(item, pytest.Function)
    return f"{item.name} {inspect.getsource(item.function)}"
