"""SIGTERM at any time leads to one checkpoint, on which all processes agree, within seconds."""

import signal
import time

import pytest

from tests.faults.conftest import concurrent, starting

pytestmark = pytest.mark.long

# Of a step, a batch or a save that is under way, and of a machine that is busy.
GRACE_SECONDS = 30.0


def check_stop(processes, phase, before):
    """Returns all have stopped after one step, which was saved once; returns its number."""
    done = [process.done() for process in processes]
    assert [d["fault"] for d in done] == [phase] * len(done)
    steps = {tuple(d["ended"]) for d in done}
    assert len(steps) == 1, done
    ((step, reason),) = steps
    assert reason == "SIGTERM"
    assert max(d["time"] for d in done) - before["time"] < GRACE_SECONDS
    saved = before["steps"]
    for d in done:
        assert d["resumed_from"] == (saved[-1] if saved else None)
        if phase != "saving":
            assert d["steps"] == [*saved, step] and list(d["saved"]) == [step]
        else:  # those that were due before are there as well
            assert d["steps"][-1] == step and d["saved"][-1] == step
            assert len(set(d["saved"])) == len(d["saved"])
    return done[0]


PHASES = ["stepping", "evaluating", "waiting", "saving", "compiling"]


# In short by one process; by four also in test_lost_processes.py.
@pytest.mark.parametrize(
    ("num", "phases"),
    [
        pytest.param(1, ["stepping", "waiting"], id="1, two phases"),
        pytest.param(2, PHASES, id="2"),
        pytest.param(1, PHASES, id="1", marks=pytest.mark.soak),
        pytest.param(4, PHASES, id="4", marks=pytest.mark.soak),
    ],
)
@concurrent
def test_all_processes_stop_in_each_phase(start, num, phases):
    with starting:
        processes = start(*phases, num=num)
        # Only the last waits for its input.
        processes[-1].wait_for(f"here {phases[0]}")
    before = {"steps": []}
    for phase in phases:
        if phase == "compiling":
            before = {"steps": []}  # of a model of its own
        if phase != phases[0]:
            processes[-1].wait_for(f"here {phase}")
        time.sleep(0.2)
        before["time"] = time.monotonic()
        # A scheduler signals all of them, but one must suffice: also one that waits in C++ for the
        # step of the one that waits for its input.
        signaled = processes[-1:]
        if phase == "stepping":
            signaled = processes
        elif phase == "waiting":
            signaled = processes[:1]
        for process in signaled:
            process.send(signal.SIGTERM)
        before = check_stop(processes, phase, before)
    if "compiling" in phases:
        assert before["still_compiling"] and before["ended"] == [0, "SIGTERM"]
    assert [process.code() for process in processes] == [0] * num
