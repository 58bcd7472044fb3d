"""Local checkpoints of whole runs, also of two processes, where one is killed."""

import contextlib
import os
import shutil
import time

import jax
import numpy as np
import pytest

from tests.launch import rows_seen
from tests.sockets import free_port
from tests.weft_process import PATIENCE_SECONDS, finish, newest_step, weft_processes
from weft.cli.configs import load_config
from weft.trainer import read_params
from weft.trainer.hooks import Hook

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

_RECIPE = f"{rows_seen.__file__}:recipe"
_WORDS = [
    "dir=run",
    "compilation_cache_dir=cache",
    "checkpointer.save_policy.n=1000000",
    "checkpointer.local_dir=memory",
    "checkpointer.local_every_n_steps=2",
]


class Fails(Hook):
    """Hook that fails after step 7, and remembers from where the run continued."""

    def on_start(self, trainer, resumed_from):
        self.resumed_from = resumed_from

    def on_step(self, step, outputs, batch):
        if step == 7:
            raise KeyError("x")


def run_here(directory, *words, listener=None):
    words = [f"dir={directory}", *words]
    cfg = load_config(_RECIPE, words)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run(progress=False, listener=listener)


def test_run_continues_with_the_same_bits_and_a_fresh_one_begins_anew(tmp_path, caplog):
    words = ["checkpointer.save_policy.n=1000000", "max_step=12"]
    local_words = [f"checkpointer.local_dir={tmp_path}/memory"]
    local_words.append("checkpointer.local_every_n_steps=2")
    run_here(tmp_path / "whole", *words)
    for resumed_from in (None, 6):
        fails = Fails()
        with pytest.raises(KeyError):
            run_here(tmp_path / "run", *words, *local_words, listener=fails)
        assert fails.resumed_from == resumed_from
    saved = tmp_path / "memory_before"
    shutil.copytree(tmp_path / "memory", saved)
    run_here(tmp_path / "run", *words, *local_words)
    params = [read_params(str(tmp_path / name)).params for name in ("run", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *params)

    (tmp_path / "run").rename(tmp_path / "old")  # as --fresh does
    shutil.rmtree(tmp_path / "memory")
    saved.rename(tmp_path / "memory")
    caplog.clear()
    fails = Fails()
    with pytest.raises(KeyError):
        run_here(tmp_path / "run", *words, *local_words, listener=fails)
    assert fails.resumed_from is None
    assert "is of another run" in caplog.text

    # Without a durable checkpoint, the directory is free for another config.
    with pytest.raises(KeyError):
        run_here(tmp_path / "run", "seed=3", *words, *local_words, listener=fails)
    assert fails.resumed_from is None


@pytest.fixture
def start(python_server, tmp_path):
    """Starts two processes of a run, and returns them."""
    with contextlib.ExitStack() as stack:

        def start_both(*words):
            together = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
                "JAX_NUM_PROCESSES": "2",
                "WEFT_RENDEZVOUS_TOKEN": os.urandom(8).hex(),
            }
            processes = []
            for index in range(2):
                variables = {**together, "JAX_PROCESS_ID": str(index)}
                launch = stack.enter_context(weft_processes(python_server, tmp_path, **variables))
                processes.append(launch("train", _RECIPE, *_WORDS, *words))
            return processes

        yield start_both


def local_steps(tmp_path, index):
    names = [path.name for path in tmp_path.glob(f"memory/*/process_{index}_of_2/step_*")]
    return {int(name[5:]) for name in names if name[5:].isdigit()}


def test_run_of_two_processes_continues_from_what_both_have(start, tmp_path):
    processes = start("max_step=1000000")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while max(local_steps(tmp_path, 0) & local_steps(tmp_path, 1), default=0) < 6:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.01)
    processes[1].kill()
    for process in processes:
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode != 0, out
    assert newest_step(tmp_path / "run") == 0
    common_steps = sorted(local_steps(tmp_path, 0) & local_steps(tmp_path, 1))
    if len(common_steps) == 2:
        # One that only one process has is not used.
        (lost,) = tmp_path.glob(f"memory/*/process_1_of_2/step_{common_steps.pop():08d}")
        shutil.rmtree(lost)

    last = common_steps[-1] + 5
    outs = [finish(process) for process in start(f"max_step={last}")]
    assert f"resuming from step {common_steps[-1]}\n" in outs[0]
    assert not any(local_steps(tmp_path, index) for index in (0, 1))
    assert newest_step(tmp_path / "run") == last

    run_here(tmp_path / "whole", f"max_step={last}", "checkpointer.save_policy.n=1000000")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        read_params(str(tmp_path / "run")).params,
        read_params(str(tmp_path / "whole")).params,
    )
    rows = rows_seen.rows_by_step(tmp_path / "run")
    expected_rows = rows_seen.rows_by_step(tmp_path / "whole")
    assert {step: seen for step, seen in rows.items() if step <= last} == expected_rows
