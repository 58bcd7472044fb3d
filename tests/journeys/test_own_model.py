"""What someone does who has a model and the page `docs/any-model.md`."""

import json
import signal
import sys

import pytest

from tests.pages import ROOT, programs
from tests.weft_process import finish, newest_step, wait_for_save, weft_processes
from weft.cli import main

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]


@pytest.fixture
def lab(tmp_path):
    """A folder with the page's whole file."""
    page = next(p.block.text for p in programs(ROOT / "docs" / "any-model.md"))
    assert "class Net(nnx.Module)" in page and "def recipe(" in page
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "my_model.py").write_text(page, encoding="utf-8")
    return folder


@pytest.fixture
def start(python_server, tmp_path):
    with weft_processes(python_server, XDG_CONFIG_HOME=str(tmp_path / "settings")) as start:
        yield lambda cwd, *words: start(*words, cwd=cwd)


@pytest.fixture
def said(monkeypatch, tmp_path, capsys):
    """Runs a command in this process, which forgets the file; what it prints."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))

    def run(cwd, *words, code=0):
        paths = sys.path[:]
        monkeypatch.chdir(cwd)
        try:
            assert main(list(words)) == code
        finally:
            sys.path[:] = paths
            sys.modules.pop("my_model", None)
        return capsys.readouterr().out

    return run


def test_own_model_in_a_file(lab, start, said, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = str(lab / "runs" / "my_model")
    recipe = "my_model.py:recipe"

    assert "width=64" in said(lab, "recipes", recipe)
    assert "hidden" in said(lab, "tabulate", recipe, "width=32")

    # Stopped by a signal, and resumed.
    saves = "checkpointer.save_policy.n=5"
    training = start(lab, "train", recipe, "width=32", "steps=1000000", saves)
    wait_for_save(run, training)
    training.send_signal(signal.SIGTERM)
    finish(training, code=143)
    saved = newest_step(run)
    out = said(lab, "train", recipe, "width=32", f"steps={saved + 5}")
    assert f"{saved + 5}" in out and (lab / "runs" / "my_model" / "report.html").exists()
    assert newest_step(run) == saved + 5

    # From another directory, the run finds its recipe.
    shown = said(elsewhere, "config", "show", run)
    assert "config_for_class(my_model.Net)" in shown and "width=32" in shown
    changes = said(elsewhere, "config", "diff", run, f"{lab}/{recipe}", code=1)
    assert "model.width: 32 → 64" in changes
    said(elsewhere, "export", run, "--to", "net.safetensors")
    assert (elsewhere / "net.safetensors").exists()
    said(elsewhere, "train", run, f"max_step={saved + 8}")
    record = json.loads((lab / "runs" / "my_model" / "run.json").read_text(encoding="utf-8"))
    assert record["recipe"]["words"][-1] == f"max_step={saved + 8}"
