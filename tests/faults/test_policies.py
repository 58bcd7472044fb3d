"""Several processes skip, rewind and stop as one, and leave their compilers when asked to stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PATIENCE_SECONDS = 120.0
# Of a save that is under way, and of a machine that is busy.
GRACE_SECONDS = 30.0
PROGRAM = Path(__file__).with_name("policies.py")


@pytest.fixture
def processes(tmp_path):
    """Two processes of `policies.py`; whatever runs at the end is killed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = {
        **os.environ,
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    started = []
    for i in range(2):
        with open(tmp_path / f"stderr_{i}", "w") as errors:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(tmp_path / "run")],
                    env=env | {"JAX_PROCESS_ID": str(i)},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
    timer = threading.Timer(PATIENCE_SECONDS, lambda: [p.kill() for p in started])
    timer.start()
    yield started
    timer.cancel()
    for process in started:
        with process:
            process.kill()


def wait_for(process, start):
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start)
    raise AssertionError(f"the process has ended before it said {start!r}")


def done(processes, phase):
    """What the processes say of a run, which is the same but for their clocks."""
    told = [json.loads(wait_for(process, "done")) for process in processes]
    beside = {"time": None, "still_compiling": None}
    assert told[0] | beside == told[1] | beside
    assert told[0]["phase"] == phase
    return told[0] | {name: max(t[name] for t in told) for name in beside}


def test_processes_decide_alike_and_leave_their_compilers(processes, tmp_path):
    first = done(processes, "policies")
    # The third batch is skipped, the seventh leads back to step 4, and two in a row are too many.
    assert first["steps"] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert (first["policy"]["skipped"], first["policy"]["rewinds"]) == (3, 1)
    assert first["finite"] and first["bits"] and first["checkpoints"] == [4]
    assert first["error"].startswith("step 8 is undefined: its loss is 0.")
    assert (
        "In the backward pass the first module with an undefined gradient is "
        "trainer.model.rooted.root, a Root (__call__); the parameters are, in its order, "
        "rooted/params/linear/kernel. It would have made undefined: rooted/params/linear/kernel. "
        "It is the 2. in a row that had to be skipped."
    ) in first["error"]

    # One signal to one of them, while both compile.
    wait_for(processes[1], "here evaluating")
    now = time.monotonic()
    processes[1].send_signal(signal.SIGTERM)
    evaluating = done(processes, "evaluating")
    assert evaluating["still_compiling"] and evaluating["time"] - now < GRACE_SECONDS
    assert evaluating["ended"] == [2, "SIGTERM"] and evaluating["evaluated"] == []
    assert evaluating["checkpoints"] == evaluating["saved"] == [2]

    wait_for(processes[1], "here drawing")
    now = time.monotonic()
    processes[1].send_signal(signal.SIGTERM)
    drawing = done(processes, "drawing")
    assert drawing["still_compiling"] and drawing["time"] - now < GRACE_SECONDS
    assert drawing["ended"] == [0, "SIGTERM"]
    assert drawing["checkpoints"] == drawing["saved"] == drawing["steps"] == []
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0]

    for i in range(2):
        told = (tmp_path / f"stderr_{i}").read_text()
        assert (
            "step 3 is undefined: its loss is nan. The batch has undefined numbers in x. The first "
            "module with an undefined output is trainer.model.rooted.linear, a Linear (__call__). "
            "It would have made undefined: rooted/params/linear/kernel, scale. The step is skipped"
        ) in told
        assert "the loss of step 7 is" in told and "for the 1. time of at most 3." in told
