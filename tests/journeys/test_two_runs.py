"""Two runs that want one directory, and how runs end: messages and exit codes as a user sees them.

Each test types the commands of the documentation in an empty folder.
"""

import json
import os
import re
import shlex
import signal

import pytest

from tests.weft_process import finish, wait_for_save, weft_processes
from weft.cli import main

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

SHORT = ["lm-tiny", "max_step=1", "evalers={}", "model.decoder.transformer.num_layers=1"]

MODELS = """
import jax.numpy as jnp
import numpy as np
from weft.hierarchy import BaseModel, ParameterSpec
from weft.input.in_memory import ArrayInput, Arrays
from weft.recipes.lm import trainer_config


class Line(BaseModel):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec(shape=(1, 1), mesh_axes=(None, None))}

    def forward(self, input_batch):
        return jnp.mean((input_batch["x"] @ self.state["weight"] - 1) ** 2), {}


class Broken(Line):
    def forward(self, input_batch):
        raise ValueError("the mistake is here")


class Undefined(Line):
    def forward(self, input_batch):
        loss, aux = super().forward(input_batch)
        return loss / 0.0 - loss / 0.0, aux


def recipe(model, max_step=10):
    data = ArrayInput.default_config().set(
        arrays=Arrays({"x": np.ones((8, 1), np.float32)}), global_batch_size=8
    )
    cfg = trainer_config(
        "runs/mine",
        model=model.default_config(),
        train_input=data,
        held_out_input=data,
        max_step=max_step,
        peak_lr=0.1,
        eval_every=100,
        save_every=100,
    )
    cfg.learner.optimizer = cfg.learner.optimizer.inner
    return cfg


def line():
    return recipe(Line)


def broken():
    return recipe(Broken)


def undefined():
    return recipe(Undefined)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Returns an empty folder in which all commands are typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(python_server):
    with weft_processes(python_server) as start:
        yield start


def suggested(text):
    """Returns the words of each `weft` command in a text."""
    return [shlex.split(words) for words in re.findall(r"^  \S*weft (.*)$", text, re.MULTILINE)]


def test_second_run_is_refused_and_the_first_one_continues(start, folder, capsys):
    first = start("train", "lm-tiny", "dir=run", "max_step=1000000", "evalers={}")
    wait_for_save("run", first)
    for options in ([], ["--fresh"]):
        assert main(["train", *options, "lm-tiny", "dir=run", "seed=1"]) == 2
        err = capsys.readouterr().err
        host = os.uname().nodename
        assert f"weft: dir='run' is in use by a run on host {host}, pid {first.pid}, " in err
        assert "such as dir='run-2'" in err and ", started 20" in err
        assert suggested(err) == [["train", *options, "lm-tiny", "seed=1", "dir=run-2"]]
    assert main(["launch", "local", "-n", "2", "lm-tiny", "dir=run", "evalers={}"]) == 2
    assert "in use by a run" in capsys.readouterr().err
    assert os.listdir(folder) == ["run"]
    assert main(["inspect", "run"]) == 0  # which only reads
    assert main(["report", "run"]) == 0
    assert "not ended" in (folder / "run/report.html").read_text(encoding="utf-8")

    first.kill()  # leaves no lock behind
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert main(["report", "run"]) == 0
    assert "killed or lost: no end was written" in (folder / "run/report.html").read_text(
        encoding="utf-8"
    )
    second = start("train", "lm-tiny", "dir=run", "max_step=1000000", "evalers={}")
    for line in second.stdout:
        if line.startswith("run "):
            assert "resuming from step" in line
            break
    second.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM after step" in finish(second, 143)
    assert "run.lock" not in os.listdir("run")
    assert len(json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))["starts"]) == 2


def test_other_config_gets_the_differences_and_commands_that_work(folder, capsys):
    assert main(["train", *SHORT, "dir=runs/a"]) == 0
    other = ["train", *SHORT, "seed=1"]
    capsys.readouterr()
    assert main([*other, "dir=runs/a"]) == 2
    err = capsys.readouterr().err
    assert "dir='runs/a' belongs to a run with another config" in err and "seed: 0 → 1" in err
    another, fresh = suggested(err)
    assert another == [*other, "dir=runs/a-2"]
    assert fresh == ["train", "--fresh", *SHORT, "seed=1", "dir=runs/a"]
    assert main(another) == 0
    assert main(fresh) == 0
    assert "moved the earlier run from runs/a to runs/a.1" in capsys.readouterr().out
    assert sorted(os.listdir("runs")) == ["a", "a-2", "a.1"]
    seeds = {
        name: "seed=1" in (folder / "runs" / name / "config.txt").read_text(encoding="utf-8")
        for name in ("a", "a.1")
    }
    assert seeds == {"a": True, "a.1": False}


def test_own_data_after_the_default_run(folder, capsys):
    (folder / "notes").mkdir()
    for n in range(20):
        (folder / "notes" / f"{n}.txt").write_text(
            f"{n} is a number of apples.\n" * 20, encoding="utf-8"
        )
    assert main(["train", *SHORT]) == 0
    words = ["data_dir=notes", "input.source.corpus.held_out_fraction=0.3"]
    assert main(["train", *SHORT, *words]) == 0
    assert sorted(os.listdir("runs")) == ["lm-tiny", "lm-tiny-notes"]


def test_failed_runs_end_with_exit_code_1(folder, start, capsys):
    (folder / "lines_model.py").write_text(MODELS, encoding="utf-8")
    assert main(["train", "lines_model.py:undefined"]) == 1
    assert "weft: the loss after step 1 is nan" in capsys.readouterr().err
    # No checkpoint was saved, so the directory is free for another config.
    broken = start("train", "lines_model.py:broken")
    out = finish(broken, 1)
    assert 'raise ValueError("the mistake is here")' in out and "lines_model.py" in out
    assert main(["train", "lines_model.py:line"]) == 0
    assert main(["train", "lines_model.py:undefined"]) == 2  # now it belongs to that one
