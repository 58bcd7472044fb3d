"""Public names of `weft.core`, imported lazily."""

import subprocess
import sys

import pytest

import weft.core

_ALONE = """
import sys
import weft.core.spmd
print(sorted(m for m in sys.modules if m.startswith("weft.core.")))
from weft.core import Scope, nn
print(Scope.__module__, nn.__name__)
"""


def test_submodules_are_imported_lazily():
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.splitlines() == [
        "['weft.core.axis_rules', 'weft.core.spmd']",
        "weft.core.scope weft.compat.flax.core_nn",
    ]


def test_all_names_exist():
    for name in weft.core.__all__:
        assert getattr(weft.core, name) is not None
    assert set(weft.core.__all__) <= set(dir(weft.core))
    with pytest.raises(AttributeError, match=r"module 'weft\.core' has no attribute 'scopes'"):
        weft.core.scopes  # noqa: B018
