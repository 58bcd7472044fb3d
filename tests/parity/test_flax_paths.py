"""Every import path of Flax leads to the object of the public name."""

import importlib
import operator
import subprocess
import sys
import types
from pathlib import Path

import pytest

import weft

LINES = Path(__file__).with_name("flax_paths.txt").read_text(encoding="utf-8").splitlines()
PATHS = {module: names for module, *names in map(str.split, LINES)}
LEFT_OUT = Path(__file__).parents[2].joinpath("docs/coverage.md").read_text(encoding="utf-8")
# Names that a reader of Flax's documentation finds, by which the other paths are compared.
PUBLIC = ("flax.linen", "flax.nnx", "flax.core", "flax.struct", "flax.typing", "flax.nnx.bridge")


def find(module, name):
    return getattr(importlib.import_module(module), name, None)


@pytest.mark.parametrize("module", PATHS)
def test_names_exist(module):
    ours = module.replace("flax", "weft", 1)
    for name in PATHS[module]:
        listed = f"`{ours}.{name}`" in LEFT_OUT
        assert (find(ours, name) is None) == listed, f"{ours}.{name}"


@pytest.mark.parametrize("module", PATHS)
@pytest.mark.filterwarnings("ignore")
def test_paths_lead_to_the_public_objects(module):
    if "tensor" in module:
        pytest.skip("Flax needs TensorFlow for it")
    for name in PATHS[module]:
        theirs = find(module, name)
        if not isinstance(theirs, type | types.FunctionType) or theirs.__module__ == "builtins":
            continue
        for public in PUBLIC:
            if find(public, name) is theirs:
                ours = (find(m.replace("flax", "weft", 1), name) for m in (module, public))
                assert next(ours) is next(ours), f"{module}.{name}"


def test_modules_are_attributes_on_first_use():
    paths = [module.removeprefix("flax.") for module in PATHS if "." in module]
    code = f"import operator, weft; operator.attrgetter(*{paths})(weft)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_that_are_attributes_have_the_names_of_their_paths():
    # As in `nn.activation.compact`, without an import of that module.
    for module, names in PATHS.items():
        found = operator.attrgetter(*module.split(".", 1)[1:])(weft) if "." in module else weft
        ours = module.replace("flax", "weft", 1)
        known = [name for name in names if find(ours, name) is not None]
        assert [name for name in known if not hasattr(found, name)] == [], module


def test_version():
    assert find("weft.version", "__version__") == find("weft", "__version__")


def test_attributes_of_modules_of_flax():
    linear = importlib.import_module("weft.linen.batch_apply")
    assert "BatchApply" in dir(linear)
    with pytest.raises(AttributeError, match=r"module 'weft.linen.batch_apply' has no .*'nothing'"):
        linear.nothing  # noqa: B018
