"""Paths of Flax and AXLearn, and names of earlier versions, lead to the objects of this version."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import weft
from weft.compat.door import MODULES, current_name, new_names
from weft.compat.flax.paths import flax_modules

ROOT = Path(weft.__file__).parent
# Modules that programs of Flax and AXLearn import, with the names that they take from each.
PUBLIC_NAMES = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8")


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
    paths = dict(MODULES)
    for name in ("checkpoints", "common_utils", "train_state"):
        paths[f"weft.training.{name}"] = f"weft.compat.flax.training.{name}"
    for path, module in paths.items():
        stub = ROOT.joinpath(*path.split(".")[1:], "__init__.pyi")
        if path != "weft.training":
            (line,) = ast.parse(stub.read_text(encoding="utf-8")).body
            assert isinstance(line, ast.ImportFrom) and line.module == module, path
            assert [alias.name for alias in line.names] == ["*"]


def test_moved_names_resolve():
    for old, new in new_names().items():
        module, _, name = new.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (AttributeError, ImportError):
            found = importlib.import_module(new)
        if isinstance(found, types.ModuleType):
            assert found.__name__ == new, old
        assert current_name(new) == new, "a new name is not an old one"


def test_moved_names_are_attributes_before_any_import():
    # As in `weft.linen.pooling.avg_pool`, in a process where nothing else has imported the module.
    program = """
import operator, types, weft
from weft.compat.door import new_names
missing = []
for name in new_names():
    *modules, attribute = name.removeprefix("weft.").split(".")
    owner = operator.attrgetter(".".join(modules))(weft) if modules else weft
    # A package may have a function with the name of its module, as in `weft.nnx.display`.
    if not isinstance(owner, types.FunctionType) and not hasattr(owner, attribute):
        missing.append(name)
assert not missing, missing
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_moved_names_shadow_no_module():
    here = {m.name for m in pkgutil.walk_packages([str(ROOT)], "weft.")}
    assert here.isdisjoint(new_names())


def test_paths_of_flax_resolve():
    for path, (elsewhere, modules) in flax_modules().items():
        found = importlib.import_module(path)
        for module in modules:
            pkgutil.resolve_name(module)
        for name, place in elsewhere.items():
            assert getattr(found, name) is pkgutil.resolve_name(place), f"{path}.{name}"
            assert name in dir(found) or hasattr(found, "__all__")


def test_names_of_flax_and_axlearn_have_their_paths():
    lines = PUBLIC_NAMES.splitlines()
    missing = []
    for module, *names in map(str.split, lines):
        found = importlib.import_module(module)
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    assert missing == []
    assert len(lines) > 60


def test_nothing_else_imports_the_modules_here():
    paths = {*MODULES, "weft.compat"}
    dotted_name = re.compile(r"(weft(?:\.\w+)*)(?::\w+)?")
    # The command `weft run-as-flax` names the path as a program would.
    users = {"weft/cli/__init__.py", "weft/cli/arguments.py"}
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT.parent).as_posix()
        if name.startswith("weft/compat/") or name == "weft/__init__.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = dotted_name.fullmatch(node.value)
                named = [text[1]] if text else []
            for target in named:
                if any(f"{target}.".startswith(f"{path}.") for path in paths):
                    found.append((name, target))
    assert {place for place in found if place != (place[0], "weft.as_flax")} == set()
    assert {name for name, target in found if target == "weft.as_flax"} == users
