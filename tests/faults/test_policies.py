"""Several processes skip, rewind and stop as one, and leave their compilers when asked to stop."""

import signal
import time

import pytest

from tests.faults.conftest import concurrent

pytestmark = pytest.mark.long

# Of a save that is under way, and of a machine that is busy.
GRACE_SECONDS = 30.0


def done(processes, phase):
    """Returns the report of the processes, which is the same except for their clocks."""
    told = [process.done() for process in processes]
    beside = {"time": None, "left_compiler": None}
    assert told[0] | beside == told[1] | beside
    assert told[0]["phase"] == phase
    return told[0] | {name: max(t[name] for t in told) for name in beside}


@concurrent
def test_processes_agree_and_abandon_compilers(start):
    processes = start("policies")
    first = done(processes, "policies")
    # The third batch is skipped, the seventh leads back to step 4, and two in a row are too many.
    assert first["steps"] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert (first["policy"]["skipped"], first["policy"]["rewinds"]) == (3, 1)
    assert first["finite"] and first["bits"] and first["checkpoints"] == [4]
    assert first["error"].startswith("step 8 is undefined: its loss is 0.")
    assert (
        "In the backward pass the first module with an undefined gradient is "
        "trainer.model.rooted.root, a Root (__call__). Undefined gradients, in backward order: "
        "rooted/params/linear/kernel. Parameters undefined by its update: "
        "rooted/params/linear/kernel. 2 consecutive steps were skipped."
    ) in first["error"]

    # One signal to one of them, while both compile.
    processes[1].wait_for("here drawing")
    now = time.monotonic()
    processes[1].send(signal.SIGTERM)
    drawing = done(processes, "drawing")
    assert drawing["left_compiler"] and drawing["time"] - now < GRACE_SECONDS
    assert drawing["ended"] == [0, "SIGTERM"]
    assert drawing["checkpoints"] == drawing["saved"] == drawing["steps"] == []

    processes[1].wait_for("here evaluating")
    now = time.monotonic()
    processes[1].send(signal.SIGTERM)
    evaluating = done(processes, "evaluating")
    assert evaluating["left_compiler"] and evaluating["time"] - now < GRACE_SECONDS
    assert evaluating["ended"] == [1, "SIGTERM"] and evaluating["evaluated"] == []
    assert evaluating["checkpoints"] == evaluating["saved"] == [1]
    assert [process.code() for process in processes] == [0, 0]

    for process in processes:
        assert (
            "step 3 is undefined: its loss is nan. The batch has undefined numbers in x. The first "
            "module with an undefined output is trainer.model.rooted.linear, a Linear (__call__). "
            "Parameters undefined by its update: rooted/params/linear/kernel, scale. The step is "
            "skipped"
        ) in process.told
        assert "the loss of step 7 is" in process.told
        assert "rewind 1 of 3." in process.told
