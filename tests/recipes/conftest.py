"""Fixtures for tests of recipes that are not Weft's."""

import importlib
import sys

import pytest


@pytest.fixture
def new_process(tmp_path, monkeypatch):
    """Returns a function that forgets modules of `tmp_path`, as if a process had just started."""
    path = list(sys.path)

    def forget():
        monkeypatch.setattr(sys, "path", list(path))
        importlib.invalidate_caches()
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]

    yield forget
    forget()
