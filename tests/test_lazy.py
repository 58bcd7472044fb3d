"""Packages offer the names of their stubs, and name the extra of a package that is missing."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft._lazy import defining_name, public_name

ROOT = Path(weft.__file__).parent
# A stub alone is a path that `weft.compat` leads on.
PACKAGES = sorted(
    ".".join(("weft", *stub.parent.relative_to(ROOT).parts))
    for stub in ROOT.rglob("__init__.pyi")
    if stub.with_suffix(".py").exists()
)


@pytest.mark.parametrize("package", PACKAGES)
def test_stub_names_exist(package):
    found = importlib.import_module(package)
    for name in found.__all__:
        assert getattr(found, name) is not None
        assert name in dir(found)
    with pytest.raises(AttributeError, match=r"module 'weft[.\w]*' has no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_packages_are_loaded_on_first_use():
    code = """
import sys, weft
assert "jax" not in sys.modules
import weft.nnx.display
assert callable(weft.nnx.display), "the submodule has replaced the function of its name"
weft.nnx.Linear, weft.linen.Dense
"""
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
        assert "install it with `pip install 'weft-jax[train]'`" in line


@pytest.mark.parametrize(
    ("module", "name", "public"),
    [
        ("weft.config.config", "ConfigBase", "weft.config.ConfigBase"),
        ("weft.nnx.module", "Module.sow", "weft.nnx.Module.sow"),
        ("weft._lazy", "public_name", "weft._lazy.public_name"),
        ("weft.compat.flax.io", "GFile", "weft.io.GFile"),
        ("weft.compat.axlearn.utils", "shapes", "weft.utils.shapes"),
        ("optax", "adam", "optax.adam"),
    ],
)
def test_public_names(module, name, public):
    assert public_name(module, name) == public
    assert defining_name(public) == f"{module}.{name}"
