"""Processes that differ end before the first step, and say in what."""

import pytest

from tests.faults.conftest import concurrent, starting

pytestmark = pytest.mark.long

EXPECTED = {
    "another learning rate": "learner.optimizer.learning_rate is 0.5, there 0.001",
    "another seed": "seed is 7, there 0",
    "another max_step": "max_step is 9, there 3",
    "another save policy": "checkpointer.save_policy.n is 2, there absent",
    "another corpus": "input.paths is a.jsonl of 3 bytes with the SHA-256 ",
    "another directory": "-elsewhere, there ",
    "another key": "the key of the run is [0, 1], there [0, 0]",
}


@concurrent
def test_processes_that_differ_end_and_name_the_field(start):
    with starting:
        processes = start("disagreement")
        done = [process.done() for process in processes]
    for name, expected in EXPECTED.items():
        texts = {d["error"] for d in done}
        assert {d["scenario"] for d in done} == {name}
        assert {d["step"] for d in done} == {0}
        (text,) = texts  # both say the same
        assert text.startswith("ProcessesDifferError: process 1 of 2 differs from process 0:\n  ")
        assert expected in text and "Start all processes of a run with the same command" in text
        done = [process.done() for process in processes]
    assert [(d["error"], d["step"]) for d in done] == [("", 3), ("", 3)]
    assert [process.code() for process in processes] == [0, 0]
