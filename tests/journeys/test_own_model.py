"""What someone does who has a model and the page `docs/any-model.md`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.flags import xla_flags
from tests.pages import ROOT, programs
from weft.trainer.checkpointer.dirs import step_dirs

pytestmark = pytest.mark.long

_PATIENCE_SECONDS = 300.0


@pytest.fixture
def lab(tmp_path):
    """A folder with the page's whole file."""
    page = next(p.block.text for p in programs(ROOT / "docs" / "any-model.md"))
    assert "class Net(nnx.Module)" in page and "def recipe(" in page
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "my_model.py").write_text(page)
    return folder


@pytest.fixture
def start(tmp_path, tmp_path_factory):
    """Starts `weft` as a process of its own; whatever runs at the end is ended."""
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(),
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(tmp_path / "settings"),
    }
    processes = []

    def weft(cwd, *words):
        command = [sys.executable, "-c", "import sys; from weft.cli import main; sys.exit(main())"]
        process = subprocess.Popen(
            [*command, *words],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield weft
    for process in processes:
        with process:
            process.kill()


def finish(process, *, code=0):
    out, _ = process.communicate(timeout=_PATIENCE_SECONDS)
    assert process.returncode == code, out
    return out


def test_own_model_in_a_file(lab, start, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = str(lab / "runs" / "my_model")
    recipe = "my_model.py:recipe"

    assert "width=64" in finish(start(lab, "recipes", recipe))
    assert "hidden" in finish(start(lab, "tabulate", recipe, "width=32"))
    assert "8 virtual CPU devices" in finish(start(lab, "check", recipe, "--mesh", "data=8"))

    # Stopped by a signal, and resumed.
    saves = "checkpointer.save_policy.n=20"
    training = start(lab, "train", recipe, "width=32", "steps=1000000", saves)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not step_dirs(f"{run}/checkpoints"):
        assert training.poll() is None, training.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    training.send_signal(signal.SIGTERM)
    finish(training, code=143)
    saved = list(step_dirs(f"{run}/checkpoints"))[-1]
    out = finish(start(lab, "train", recipe, "width=32", f"steps={saved + 50}"))
    assert f"{saved + 50}" in out and (lab / "runs" / "my_model" / "report.html").exists()
    assert list(step_dirs(f"{run}/checkpoints"))[-1] == saved + 50

    # From another directory, the run finds its recipe.
    shown = finish(start(elsewhere, "config", "show", run))
    assert "config_for_class(my_model.Net)" in shown and "width=32" in shown
    changes = finish(start(elsewhere, "config", "diff", run, f"{lab}/{recipe}"), code=1)
    assert "model.width: 32 → 64" in changes
    finish(start(elsewhere, "export", run, "--to", "net.safetensors"))
    assert (elsewhere / "net.safetensors").exists()
    finish(start(elsewhere, "train", run, f"max_step={saved + 60}"))
    record = json.loads((lab / "runs" / "my_model" / "run.json").read_text())
    assert record["recipe"]["words"][-1] == f"max_step={saved + 60}"


def test_own_model_on_two_processes(lab, start):
    words = ["-n", "2", "my_model.py:recipe", "dir=runs/two", "steps=40"]
    finish(start(lab, "launch", "local", *words))
    assert list(step_dirs(f"{lab}/runs/two/checkpoints")) == [40]
