"""A run of four processes loses one, continues with three, and with four again.

`make soak` kills processes of `weft launch local -n 3:4` at random, a sixth of WEFT_SOAK_KILLS
times.
"""

import contextlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.launch import rows_seen
from tests.sockets import free_port
from tests.weft_process import (
    PATIENCE_SECONDS,
    children,
    finish,
    newest_step,
    wait_for_save,
    weft_processes,
)
from weft.cli.configs import load_config
from weft.trainer import read_params

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

_RECIPE = f"{rows_seen.__file__}:recipe"
_WORDS = ["dir=run", "compilation_cache_dir=cache"]
_ENDLESS = "max_step=1000000"


@pytest.fixture
def start(python_server, tmp_path):
    """Starts so many processes of a run, and returns them."""
    with contextlib.ExitStack() as stack:

        def start_processes(count, *words):
            together = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
                "JAX_NUM_PROCESSES": str(count),
                "WEFT_RENDEZVOUS_TOKEN": os.urandom(8).hex(),
            }
            processes = []
            for index in range(count):
                variables = {**together, "JAX_PROCESS_ID": str(index)}
                launch = stack.enter_context(weft_processes(python_server, tmp_path, **variables))
                processes.append(launch("train", _RECIPE, *_WORDS, *words))
            return processes

        yield start_processes


def assert_as_uninterrupted(run_dir, whole_dir):
    """Asserts that a run has ended as one that runs here in one process."""
    step = newest_step(run_dir)
    words = [f"dir={whole_dir}", f"max_step={step}", "checkpointer.save_policy.n=1000000"]
    cfg = load_config(_RECIPE, words)
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run(progress=False)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        read_params(str(run_dir)).params,
        read_params(str(whole_dir)).params,
    )
    rows = rows_seen.rows_by_step(run_dir)
    assert {n: found for n, found in rows.items() if n <= step} == rows_seen.rows_by_step(whole_dir)


def starts_of(run_dir):
    record = json.loads(Path(run_dir, "run.json").read_text(encoding="utf-8"))
    return record["starts"]


def test_run_goes_on_with_three_of_four_processes_and_with_four(start, tmp_path):
    run_dir = tmp_path / "run"
    chance = random.Random()
    outs = []
    for count in (4, 3):
        processes = start(count, _ENDLESS)
        wait_for_save(run_dir, processes[0], after=newest_step(run_dir))
        time.sleep(chance.uniform(0, 0.2))
        killed = chance.choice(processes)
        killed.kill()
        for process in processes:
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode != 0, out
            outs.append(out)
    processes = start(4, f"max_step={newest_step(run_dir) + 4}")
    outs.append("".join([finish(process) for process in processes]))

    assert "changed    processes 4 → 3, devices 4 × cpu → 3 × cpu" in outs[4]
    assert "mesh data=4 → data=3, microbatches 1 → 2" in outs[4]
    assert "mesh data=3 → data=4, microbatches 2 → 1" in outs[-1]
    assert [one["processes"] for one in starts_of(run_dir)] == [4, 3, 4]
    assert_as_uninterrupted(run_dir, tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.skipif("WEFT_SOAK_KILLS" not in os.environ, reason="runs by `make soak`")
def test_launcher_shrinks_and_grows_a_run(python_server, tmp_path, capsys):
    kills = -(-int(os.environ["WEFT_SOAK_KILLS"]) // 6)
    run_dir = tmp_path / "run"
    chance = random.Random(0)
    jobs = [f"max_tries={kills + 1}", "rejoin_seconds=40"]
    options = [word for job in jobs for word in ("--job", job)]
    words = [_RECIPE, *_WORDS, _ENDLESS]
    with weft_processes(python_server, tmp_path) as launch:
        launcher = launch("launch", "local", "-n", "3:4", *options, *words)
        for _ in range(kills):
            wait_for_save(run_dir, launcher, after=newest_step(run_dir))
            time.sleep(chance.uniform(0, 30))
            found = children(launcher.pid)
            if found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(list(found)), signal.SIGKILL)
            time.sleep(5)  # the others end
        wait_for_save(run_dir, launcher, after=newest_step(run_dir))
        launcher.send_signal(signal.SIGTERM)
        out = finish(launcher, 143)
    counts = [one["processes"] for one in starts_of(run_dir)]
    with capsys.disabled():
        print(f"\n{kills} kills; processes of the starts: {counts}")
    assert set(counts) == {3, 4}
    assert re.search(r"restarting with 3 of 4 processes", out)
    assert_as_uninterrupted(run_dir, tmp_path / "whole")
