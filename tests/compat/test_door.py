"""Paths of Flax and AXLearn, and names of earlier versions, lead to the objects of this version."""

import ast
import importlib
import pkgutil
import types
from pathlib import Path

import pytest

import weft
from weft.compat.door import MODULES
from weft.compat.flax.paths import flax_modules
from weft.compat.moved import current_name, moved_names

ROOT = Path(weft.__file__).parent


@pytest.mark.parametrize("path", MODULES)
def test_path_leads_to_the_module_itself(path):
    found = importlib.import_module(path) if path != "weft.as_flax" else weft
    parent, _, name = path.rpartition(".")
    if found is not weft:
        assert found is importlib.import_module(MODULES[path])
        assert getattr(importlib.import_module(parent), name) is found
        assert found.__spec__.name == found.__name__ == MODULES[path]


def test_submodules_have_both_paths():
    from weft.compat.flax.training import train_state
    from weft.training import train_state as usual

    assert usual is train_state is importlib.import_module("weft.training.train_state")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'weft\.training\.nothing'"):
        importlib.import_module("weft.training.nothing")


def test_type_checkers_find_what_a_path_leads_to():
    paths = {**MODULES, "weft.axlearn_metrics": None}
    for name in ("checkpoints", "common_utils", "train_state"):
        paths[f"weft.training.{name}"] = f"weft.compat.flax.training.{name}"
    for path, module in paths.items():
        stub = ROOT.joinpath(*path.split(".")[1:], "__init__.pyi")
        if module is not None and path != "weft.training":
            (line,) = ast.parse(stub.read_text(encoding="utf-8")).body
            assert isinstance(line, ast.ImportFrom) and line.module == module, path
            assert [alias.name for alias in line.names] == ["*"]


def test_moved_names_resolve():
    for old, new in moved_names().items():
        module, _, name = new.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (AttributeError, ImportError):
            found = importlib.import_module(new)
        if isinstance(found, types.ModuleType):
            assert found.__name__ == new, old
        assert current_name(new) == new, "a new name is not an old one"


def test_moved_names_shadow_no_module():
    here = {m.name for m in pkgutil.walk_packages([str(ROOT)], "weft.")}
    assert here.isdisjoint(moved_names())


def test_paths_of_flax_resolve():
    for path, (elsewhere, modules) in flax_modules().items():
        found = importlib.import_module(path)
        for module in modules:
            pkgutil.resolve_name(module)
        for name, place in elsewhere.items():
            assert getattr(found, name) is pkgutil.resolve_name(place), f"{path}.{name}"
            assert name in dir(found) or hasattr(found, "__all__")
