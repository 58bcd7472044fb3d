"""Packages offer the names of their stubs, and names of earlier versions lead to those of today."""

import importlib
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import weft
from weft._lazy import _flax_paths, _moved_names, current_name, defining_name, public_name

ROOT = Path(weft.__file__).parent
PACKAGES = sorted(
    ".".join(("weft", *stub.parent.relative_to(ROOT).parts)) for stub in ROOT.rglob("__init__.pyi")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_stub_names_exist(package):
    found = importlib.import_module(package)
    for name in found.__all__:
        assert getattr(found, name) is not None
        assert name in dir(found)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_submodule_does_not_replace_the_function_of_its_name():
    code = "import weft.nnx.display, weft.nnx; assert callable(weft.nnx.display), weft.nnx.display"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_are_loaded_on_first_use():
    code = "import sys, weft; assert 'jax' not in sys.modules; weft.nnx.Linear, weft.linen.Dense"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_package_of_the_trainer_names_the_extra():
    code = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "grain" else find(name, *args)
import importlib.util, weft.errors, weft.trainer
assert importlib.util.find_spec("grain") is None  # as others ask
for module in ("weft.trainer.fit", "weft.recipes.lm", "weft:fit", "weft.input.text"):
    try:
        module, _, name = module.partition(":")
        getattr(importlib.import_module(module), name)
    except weft.errors.MissingExtraError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert " needs the package grain" in line
        assert "install it with `pip install 'weft[train]'`" in line


def test_moved_names_resolve():
    for old, new in _moved_names().items():
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
    assert here.isdisjoint(_moved_names())


@pytest.mark.parametrize(
    ("module", "name", "public"),
    [
        ("weft.config.config", "ConfigBase", "weft.config.ConfigBase"),
        ("weft.nnx.module", "Module.sow", "weft.nnx.Module.sow"),
        ("weft._lazy", "public_name", "weft._lazy.public_name"),
        ("optax", "adam", "optax.adam"),
    ],
)
def test_public_names(module, name, public):
    assert public_name(module, name) == public
    assert defining_name(public) == f"{module}.{name}"


def test_paths_of_flax_resolve():
    for module, (elsewhere, places) in _flax_paths().items():
        found = importlib.import_module(module)
        for place in places:
            pkgutil.resolve_name(place)
        for name, place in elsewhere.items():
            assert getattr(found, name) is pkgutil.resolve_name(place), f"{module}.{name}"
            assert name in dir(found) or module in PACKAGES
