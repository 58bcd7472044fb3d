"""Real processes train one model: they are killed, started again, stopped, and become one."""

import json
import os
import signal
import time

import numpy as np
import pytest

from tests.weft_process import PATIENCE_SECONDS, children, finish, weft_processes
from weft.cli.configs import load_config
from weft.trainer.hooks import Hook

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

_OVERRIDES = [
    "evalers={}",
    "checkpointer.save_policy.n=5",
    "learner.optimizer.inner.learning_rate.max_step=60",
]
_EVERY_STEP = "summary_writer.writers.json_lines.write_every_n_steps=1"


@pytest.fixture
def launch(python_server, tmp_path):
    """Starts `weft launch local -n 2 … own.py:recipe dir=run …`, where the file has lm-tiny."""
    (tmp_path / "own.py").write_text(
        "from weft.recipes.lm import lm_tiny as recipe\n", encoding="utf-8"
    )
    with weft_processes(python_server, tmp_path) as start:
        yield lambda *words: start("launch", "local", "-n", "2", *words, *_OVERRIDES, _EVERY_STEP)


def saved_steps(run_dir):
    return sorted(
        int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_????????")
    )


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(found >= step for found in saved_steps(run_dir)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(run_dir):
    lines = (
        (run_dir / "summaries/train_train/summaries.jsonl").read_text(encoding="utf-8").splitlines()
    )
    records = map(json.loads, lines)
    return {r["step"]: r["values"]["loss"] for r in records if "loss" in r.get("values", {})}


def train_here(run_dir, max_step):
    """Returns one process, this one, trains to a step; returns the step that it went on from."""

    class Seen(Hook):
        def on_start(self, trainer, resumed_from):
            self.resumed_from = resumed_from

    words = [f"dir={run_dir}", f"max_step={max_step}", *_OVERRIDES, _EVERY_STEP]
    seen = Seen()
    load_config("lm-tiny", words).instantiate(parent=None).run(listener=seen)
    return seen.resumed_from


def test_two_processes_are_killed_and_resumed_as_one(launch, tmp_path):
    run_dir = tmp_path / "run"

    # One is killed: the other ends with it, and both are started again.
    process = launch("--job", "max_tries=2", "own.py:recipe", "dir=run", "max_step=1000000")
    wait_for_step(run_dir, 5, process)
    (second,) = [pid for pid, index in children(process.pid).items() if index == 1]
    os.kill(second, signal.SIGKILL)
    wait_for_step(run_dir, max(saved_steps(run_dir)) + 5, process)

    # On a stop request both stop after the same step, which is saved.
    process.send_signal(signal.SIGTERM)
    out = finish(process, 143)
    assert f"process 1 of 2 (pid {second}) was ended by SIGKILL" in out
    assert "restarting all processes" in out and "resuming from step" in out
    assert "stopped by SIGTERM; exit codes: process 0: 143, process 1: 143" in out
    (line,) = [line for line in out.splitlines() if line.startswith("[0] stopped by SIGTERM")]
    stopped = int(line.split("after step ")[1].split(",")[0].replace(",", ""))
    assert saved_steps(run_dir)[-1] == stopped
    # One speaks for all.
    assert not [line for line in out.splitlines() if line.startswith("[1] step")]

    # One process resumes from a checkpoint of two.
    assert train_here(run_dir, stopped + 2) == stopped
    starts = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["starts"]
    assert [start["processes"] for start in starts] == [2, 2, 1]
    together = losses(run_dir)
    assert together.keys() == set(range(1, stopped + 3))
    # Two processes match one: the parts of a batch add up to the batch.
    train_here(tmp_path / "alone", 3)
    alone = losses(tmp_path / "alone")
    np.testing.assert_allclose(
        [together[i] for i in (1, 2, 3)], [alone[i] for i in (1, 2, 3)], rtol=1e-4
    )
