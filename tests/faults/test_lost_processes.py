"""A process that dies, fails or hangs takes the others with it, in seconds and by its name."""

import signal
import socket
import time

import pytest

from tests.faults.conftest import concurrent, starting

pytestmark = pytest.mark.long

BOUND_SECONDS = 40.0


def ends(process, since):
    """Returns the exit code of a process that has to end soon."""
    code = process.code(timeout=BOUND_SECONDS)
    assert time.monotonic() - since < BOUND_SECONDS
    return code


@concurrent
def test_four_processes_stop_resume_and_detect_freeze(start):
    with starting:
        processes = start("waiting", "stepping", num=4, WEFT_HEARTBEAT_TIMEOUT_SECONDS="8")
        processes[3].wait_for("here waiting")
    processes[3].send(signal.SIGTERM)
    done = [process.done() for process in processes]
    ((step, reason),) = {tuple(d["ended"]) for d in done}
    assert reason == "SIGTERM" and {tuple(d["steps"]) for d in done} == {(step,)}

    processes[3].wait_for("here stepping")
    processes[1].send(signal.SIGSTOP)
    now = time.monotonic()
    frozen = f"pid {processes[1].pid}) has sent nothing for"
    assert ends(processes[0], now) != 0
    assert frozen in processes[0].told
    for process in (processes[2], processes[3]):
        assert ends(process, now) != 0
        assert frozen in process.told


# Joined by Weft, and by a program that knows JAX alone.
@pytest.mark.parametrize(
    ("killed", "variables"),
    [
        pytest.param(1, {"JOINED_BY_JAX": "1"}, id="the last, joined by JAX"),
        pytest.param(0, {}, id="the first", marks=pytest.mark.soak),
        pytest.param(1, {}, id="the last", marks=pytest.mark.soak),
    ],
)
@concurrent
def test_killed_process_is_named(start, killed, variables):
    with starting:
        processes = start("stepping", **variables)
        processes[1].wait_for("here stepping")
    victim, other = processes[killed], processes[1 - killed]
    victim.send(signal.SIGKILL)
    assert ends(other, time.monotonic()) not in (0, -signal.SIGKILL)
    assert f"process {killed} of 2 (host " in other.told and f"pid {victim.pid})" in other.told
    assert "has ended without notice, killed or crashed" in other.told


@concurrent
def test_process_missing_at_first_step_is_named(start):
    with starting:
        first, second, absent = start("absent", num=3)
        absent.wait_for("here absent")
    now = time.monotonic()
    for process in (first, second):
        assert ends(process, now) == 1
        assert (
            f"weft: not ready within 5 s: process 2 of 3 (host {socket.gethostname()}, pid "
            f"{absent.pid}), which is waiting for the input of step 1. All others were waiting. "
            "If it is not frozen, its log has the stacks of its threads."
        ) in process.told
    assert ends(absent, now) != 0
    assert "in _disturb" in absent.told  # where it is


@concurrent
def test_wait_for_unstarted_process_is_bounded(start):
    with starting:
        first, absent = start("unstarted", JOINED_BY_JAX="1")
        absent.wait_for("here unstarted")
    assert ends(first, time.monotonic()) == 1
    assert (
        "weft: process 0 of 2 waited for the other processes of its run, and some did not come "
        "within 5 s."
    ) in first.told
    assert ends(absent, time.monotonic()) != 0


@concurrent
def test_process_hanging_in_restore_is_named(start):
    with starting:
        first, hanging = start("ending", "restoring")
        hanging.wait_for("here restoring")
    now = time.monotonic()
    assert ends(first, now) == 1
    assert (
        f"weft: not ready within 12 s: process 1 of 2 (host {socket.gethostname()}, pid "
        f"{hanging.pid}), which is restoring the checkpoint. All others were waiting."
    ) in first.told
    assert ends(hanging, now) != 0
    assert "in restore_from_dir" in hanging.told  # where it is


@concurrent
def test_failed_input_saves_on_all_and_is_named(start):
    with starting:
        first, second = start("failing")
        steps = [process.done() for process in (first, second)]
    assert [s["steps"] for s in steps] == [[s["saved"][0]] for s in steps]
    assert steps[0]["saved"] == steps[1]["saved"] != []
    now = time.monotonic()
    assert ends(first, now) == ends(second, now) == 1
    failure = "InputReadError: data/part-3.txt, record 17: not UTF-8"
    assert failure in second.told and "has failed" not in second.told
    assert "weft: process 1 of 2 has failed: InputReadError: trainer.input" in first.told
    assert failure in first.told and "The training up to this point is saved." in first.told


@concurrent
def test_hanging_process_prints_stack_and_is_named(start):
    with starting:
        first, second = start("hanging")
        second.wait_for("here hanging")
    now = time.monotonic()
    assert ends(second, now) == -signal.SIGABRT
    assert "No progress for" in second.told and "while waiting for the input of" in second.told
    assert "in _disturb" in second.told  # where it hangs
    assert ends(first, now) != 0
    assert f"pid {second.pid}) has" in first.told
