"""Threads play the processes; real ones save in test_checkpointer_processes.py."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from weft.trainer import writing_processes as module
from weft.trainer.writing_processes import WritingProcesses


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Makes the processes of three that write one checkpoint."""

    def make(index):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 3)
            patch.setattr(jax, "process_index", lambda: index)
            return WritingProcesses(str(tmp_path))

    return make


def write(process, work=lambda: None):
    with process.written():
        work()


def test_one_process_waits_for_nobody_and_leaves_nothing(tmp_path):
    write(WritingProcesses(str(tmp_path)))
    assert os.listdir(tmp_path) == []


def test_the_first_is_done_when_all_are(process, tmp_path):
    go_on, first, second, third = threading.Event(), *map(process, range(3))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(write, first), pool.submit(write, second, go_on.wait)]
        write(third)
        assert not waiting[0].done()
        go_on.set()
        for future in waiting:
            future.result(timeout=10)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "number"),
    [(OSError(errno.ENOSPC, "No space left"), errno.ENOSPC), (ValueError("bad"), errno.EIO)],
    ids=["full", "other"],
)
def test_the_first_hears_of_anothers_failure(process, error, number):
    def fail():
        raise error

    write(process(1))
    with pytest.raises(type(error)):
        write(process(2), fail)
    with pytest.raises(OSError, match=f"process 2 of 3: {type(error).__name__}: .*") as found:
        write(process(0))
    assert found.value.errno == number


def test_a_process_that_never_comes(process, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 0.05)
    with pytest.raises(
        TimeoutError, match=r"process 1 of 3 has not written its part .* within 0 s"
    ):
        write(process(0))
