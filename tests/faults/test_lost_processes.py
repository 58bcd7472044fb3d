"""A process that dies, fails or hangs takes the others with it, in seconds and by its name."""

import signal
import time

import pytest

pytestmark = pytest.mark.long

BOUND_SECONDS = 25.0


def ends(process, since):
    """The exit code of a process that has to end soon."""
    code = process.code(timeout=BOUND_SECONDS)
    assert time.monotonic() - since < BOUND_SECONDS
    return code


def test_one_that_is_killed_is_named_by_the_other(start):
    first, second = start("stepping")
    second.wait_for("here stepping")
    second.send(signal.SIGKILL)
    assert ends(first, time.monotonic()) not in (0, -signal.SIGKILL)
    assert "process 1 of 2 (host " in first.told and f"pid {second.pid})" in first.told
    assert "has ended without a word, killed or crashed" in first.told


def test_one_whose_input_fails_has_all_save_and_is_named(start):
    first, second = start("failing")
    steps = [process.done() for process in (first, second)]
    assert [s["steps"] for s in steps] == [[s["saved"][0]] for s in steps]
    assert steps[0]["saved"] == steps[1]["saved"] != []
    now = time.monotonic()
    assert ends(first, now) == ends(second, now) == 2
    failure = "InputReadError: data/part-3.txt, record 17: not UTF-8"
    assert failure in second.told and "has failed" not in second.told
    assert "weft: process 1 of 2 has failed: InputReadError: trainer.input" in first.told
    assert failure in first.told and "What was trained until then is saved." in first.told


def test_one_that_hangs_shows_where_and_is_named_by_the_other(start):
    first, second = start("hanging")
    second.wait_for("here hanging")
    now = time.monotonic()
    assert ends(second, now) == -signal.SIGABRT
    assert "No progress for" in second.told and "while waiting for the input of" in second.told
    assert "in _disturb" in second.told  # where it hangs
    assert ends(first, now) != 0
    assert f"pid {second.pid}) has" in first.told
