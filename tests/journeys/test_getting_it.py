"""Someone gets Weft as the start page tells it, and runs what its pages call."""

import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.docs.test_docs import PAGES
from tests.pages import ROOT, blocks

INDEX = ROOT / "docs" / "index.md"
ADDRESS = "https://code.example.org/lab/weft"


def commands_of(block):
    """Returns the commands of a console block, without their comments."""
    return [line.removeprefix("$ ").partition("  #")[0] for line in block.text.splitlines()]


def in_shell(command, cwd, **variables):
    """Returns what a command prints."""
    done = subprocess.run(
        command, shell=True, cwd=cwd, env=variables or None, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a copy of the repository, `weft`, and `packages` installed from it."""
    folder = tmp_path_factory.mktemp("lab")
    getting, installing, *_ = (block for block in blocks(INDEX) if block.language == "console")
    clone, enter = commands_of(getting)
    in_shell(clone.replace("REPOSITORY", f"'{ROOT}'"), folder)
    copy = folder / enter.removeprefix("cd ")
    # Of the packages that it needs, the tests have those that pip would get.
    install, *_ = commands_of(installing)
    pip = f"{sys.executable} -m uv --quiet pip"
    options = "--no-deps --no-build-isolation --offline"
    in_shell(f"{install.replace('pip', pip, 1)} {options} --target {folder}/packages", copy)
    return folder


def test_the_install_line_of_the_page_gives_weft(folder):
    program = (
        "import weft; from importlib.metadata import version; "
        "print(weft.__file__, version('weft-jax') == weft.__version__)"
    )
    python = f'{sys.executable} -W error -c "{program}"'
    told = in_shell(python, folder, PYTHONPATH=str(folder / "packages"))
    assert told.split() == [str(folder / "packages/weft/__init__.py"), "True"]
    assert (folder / "packages/bin/weft").exists()


def test_the_other_distribution_is_named(folder):
    (folder / "stranger/weft-3.1.dist-info").mkdir(parents=True)
    path = f"{folder}/packages:{folder}/stranger"
    told = in_shell(f'{sys.executable} -c "import weft"', folder, PYTHONPATH=path)
    assert "weft-3.1 is installed in" in told and "`pip uninstall weft`" in told


def test_a_copy_has_what_the_pages_call(folder):
    copy = folder / "weft"
    makefile = (copy / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    calls = set()
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        calls.update(re.findall(r"(?:`|\$ )make ([a-z-]+)", text))
        for example in re.findall(r"python (examples/\w+\.py)", text):
            assert (copy / example).exists(), (page, example)
    assert len(calls) > 3 and calls <= targets


@pytest.mark.parametrize("variable", [ADDRESS, f"{ADDRESS}.git", "https://me:key@" + ADDRESS[8:]])
def test_the_address_is_an_argument_of_the_build(variable, monkeypatch):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    spec = importlib.util.spec_from_file_location("sources", ROOT / "docs" / "sources.py")
    sources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sources)
    monkeypatch.setenv("REPOSITORY", variable)
    config = SimpleNamespace(repo_url=None, theme={"features": []}, extra={})
    sources.on_config(config)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = sources.on_page_markdown(INDEX.read_text(encoding="utf-8"), page=page, config=config)
    assert config.edit_uri == f"{ADDRESS}/edit/main/docs/"
    assert f"$ git clone {ADDRESS} weft" in text and "git clone REPOSITORY" not in text
