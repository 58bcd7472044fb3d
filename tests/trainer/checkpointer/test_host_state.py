import json
import os

import jax
import numpy as np
import pytest

from weft.errors import CheckpointStateError, CheckpointStructureError
from weft.input.prefetch import PARTS
from weft.serialization import untrusted
from weft.trainer.checkpointer.host_state import (
    RunState,
    maybe_restore_python_savables,
    maybe_save_python_savables,
    write_policy_state,
)


class Iterator:
    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {"next_index": 5, "shards": [1, None, 2.5, "x"]},
        b"\x00\xff bytes",
        {"a": [b"\xff"]},
        3,
        None,
    ],
)
def test_states_round_trip(tmp_path, state):
    paths = ["input_iter", "a/b", "../../x", "ä b"]
    maybe_save_python_savables(
        {**{path: Iterator(state) for path in paths}, "array": np.zeros(3)}, dir=str(tmp_path)
    )
    restored = {path: Iterator("old") for path in paths}
    maybe_restore_python_savables({**restored, "array": np.zeros(3)}, dir=str(tmp_path))
    assert [iterator.state for iterator in restored.values()] == [state] * len(paths)
    # No path writes outside of the directory.
    assert os.listdir(tmp_path) == ["process_0_of_1"]
    assert len(os.listdir(tmp_path / "process_0_of_1")) == len(paths)


def test_other_states_are_rejected(tmp_path):
    with pytest.raises(CheckpointStateError, match=r"'it'.*Iterator.*holds an object of type set"):
        maybe_save_python_savables({"it": Iterator({"s": {1, 2}})}, dir=str(tmp_path))


def test_state_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 50)
    with pytest.raises(ValueError, match=r"'it'.*Iterator, cannot be written: .* at most 50 are"):
        maybe_save_python_savables({"it": Iterator("x" * 50)}, dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"save policy cannot be written: .* at most 50 are"):
        write_policy_state(str(tmp_path), {"best": "x" * 50})
    assert not list(tmp_path.iterdir())


def test_missing_state(tmp_path):
    with pytest.raises(CheckpointStructureError, match="no state of 'it' for process 0 of 1"):
        maybe_restore_python_savables({"it": Iterator()}, dir=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("same", [True, False])
def test_equal_states_restore_on_other_process_counts(tmp_path, monkeypatch, same):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        state = {"next_index": 5 if same else 5 + process}
        maybe_save_python_savables({"it": Iterator(state)}, dir=str(tmp_path))
    monkeypatch.undo()
    restored = Iterator()
    if same:
        maybe_restore_python_savables({"it": restored}, dir=str(tmp_path))
        assert restored.state == {"next_index": 5}
    else:
        with pytest.raises(CheckpointStructureError, match=r"states differ.*number of processes"):
            maybe_restore_python_savables({"it": restored}, dir=str(tmp_path))
        assert restored.state is None


@pytest.mark.parametrize("fault", [None, "part", "kind", "name"])
def test_parts_of_processes_restore_on_other_process_counts(tmp_path, monkeypatch, fault):
    states = [
        {"n": 4, "a": {PARTS: {"0": [1, 2], "1": [3, 4]}}},
        {"n": 4, "a": {PARTS: {"1": [3, 4], "2": [5, 6]}}},
    ]
    if fault == "part":
        states[1]["a"] = {PARTS: {"1": [3, 5]}}
    elif fault == "kind":
        states[1]["a"] = 3
    elif fault == "name":
        states[1]["b"] = 3
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        maybe_save_python_savables({"it": Iterator(states[process])}, dir=str(tmp_path))
    monkeypatch.undo()
    restored = Iterator()
    if fault:
        with pytest.raises(CheckpointStructureError, match="states differ"):
            maybe_restore_python_savables({"it": restored}, dir=str(tmp_path))
        return
    maybe_restore_python_savables({"it": restored}, dir=str(tmp_path))
    assert restored.state == {"n": 4, "a": {PARTS: {"0": [1, 2], "1": [3, 4], "2": [5, 6]}}}


class Counter:
    def __init__(self, count=0):
        self.count = count

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_parts_resume_by_name():
    saved = json.loads(json.dumps(RunState({"a": Counter(3), "gone": Counter(4)}).get_state()))
    a, new = Counter(), Counter(7)
    RunState({"a": a, "new": new, "stateless": print, "none": None}).set_state(saved)
    assert (a.count, new.count) == (3, 7)
