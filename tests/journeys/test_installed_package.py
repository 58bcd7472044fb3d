"""A package that registers recipes, as `docs/any-model.md` tells: it has nothing but its files."""

import sys

import pytest

from tests.pages import ROOT, programs
from weft.cli import main

FILES = {
    "my_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n",
    "my_package-1.0.dist-info/entry_points.txt": (
        "[weft.recipes]\ndigits-net = my_package.recipes:recipe\n"
        "broken-net = my_package.missing:recipe\n"
    ),
    "my_package/__init__.py": "",
    "my_package/recipes.py": next(p.block.text for p in programs(ROOT / "docs" / "any-model.md")),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages, as `pip install --target` leaves it."""
    for name, text in FILES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def said(capsys, *words, code=0):
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_registered_recipe(installed, capsys):
    assert "digits-net" in said(capsys, "recipes")
    assert "width=64" in said(capsys, "recipes", "digits-net")
    said(capsys, "train", "digits-net", "width=8", "steps=2", "batch_size=16", "dir=run")
    assert "my_package.recipes.Net" in said(capsys, "config", "show", "run")
    assert "hidden" in said(capsys, "tabulate", "run")
    err = said(capsys, "train", "digits-nte", code=2)
    assert "unknown recipe 'digits-nte'. Did you mean 'digits-net' or" in err
    err = said(capsys, "train", "broken-net", code=2)
    assert "there is no module 'my_package.missing'" in err
