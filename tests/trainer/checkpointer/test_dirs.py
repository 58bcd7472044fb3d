"""

Threads play the processes; real ones save in test_processes.py.
"""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from weft.errors import CheckpointNotFoundError
from weft.trainer.checkpointer import dirs
from weft.trainer.checkpointer import dirs as module
from weft.trainer.checkpointer.dirs import CommitGroup, is_disk_full


def make(base, *names):
    for name in names:
        (base / name).mkdir(parents=True)
        (base / name / "file").write_text(name, encoding="utf-8")


@pytest.mark.parametrize("name", ["step_7", "step_00000007.tmp", "checkpoint", "step_0000000x"])
def test_other_names_are_rejected(name):
    with pytest.raises(CheckpointNotFoundError, match=f"{name}.*a name such as 'step_00000200'"):
        dirs.parse_step_from_dir(f"/run/{name}")


def test_only_directories_of_checkpoints_are_listed_in_order(tmp_path):
    names = ["step_00000100", "step_100000000", "step_00000020", "step_00000030.tmp", "other"]
    make(tmp_path, *names)
    found = dirs.step_dirs(str(tmp_path))
    assert list(found) == [20, 100, 100000000]
    assert found[20] == str(tmp_path / "step_00000020")
    assert dirs.step_dirs(str(tmp_path / "nowhere")) == {}


def test_not_found_error_lists_existing(tmp_path):
    assert "no checkpoint in" in str(dirs.not_found_error(str(tmp_path), 3))
    make(tmp_path, "step_00000100", "step_00000200")
    assert "no checkpoint of step 3 in" in str(dirs.not_found_error(str(tmp_path), 3))
    assert "There are: 100, 200" in str(dirs.not_found_error(str(tmp_path), 3))


def test_publishing_replaces_an_older_one(tmp_path):
    final = str(tmp_path / "step_00000010")
    for content in ("first", "second"):
        make(tmp_path, "step_00000010.tmp")
        (tmp_path / "step_00000010.tmp" / "file").write_text(content, encoding="utf-8")
        assert dirs.temporary_dir(final) == final + ".tmp"
        dirs.commit_dir(final)
        assert os.listdir(tmp_path) == ["step_00000010"]
        assert (tmp_path / "step_00000010" / "file").read_text(encoding="utf-8") == content


def test_renames_are_on_the_disk_before_anything_is_deleted(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        assert os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))
        synced.append(sorted(os.listdir(tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    make(tmp_path, "step_00000010", "step_00000010.tmp")
    dirs.commit_dir(str(tmp_path / "step_00000010"))
    dirs.remove_dir(str(tmp_path / "step_00000010"))
    assert [names[0] for names in synced] == ["step_00000010", "step_00000010.trash"]
    assert [len(names) for names in synced] == [2, 1]


def test_cleanup_after_a_kill(tmp_path):
    make(
        tmp_path,
        "step_00000010",
        "step_00000020.tmp",  # was being written
        "step_00000030.trash",  # was being removed
        "step_00000040.old",  # was being replaced, and the new one had come
        "step_00000040",
        "step_00000050.old",  # was being replaced, and the new one had not come
        "notes.tmp",
    )
    dirs.remove_leftovers(str(tmp_path))
    found = sorted(os.listdir(tmp_path))
    assert found == ["notes.tmp", "step_00000010", "step_00000040", "step_00000050"]
    assert (tmp_path / "step_00000040" / "file").read_text(encoding="utf-8") == "step_00000040"


def test_leftover_files_and_links_are_removed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_00000020.old").symlink_to(tmp_path / "elsewhere")
    for suffix in (".tmp", ".old", ".trash"):
        (tmp_path / f"step_00000010{suffix}").touch()
    dirs.remove_leftovers(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step_00000020"]

    make(tmp_path, "step_00000010", "step_00000010.tmp")
    for suffix in (".old", ".trash"):
        (tmp_path / f"step_00000010{suffix}").touch()
    dirs.commit_dir(str(tmp_path / "step_00000010"))
    dirs.remove_dir(str(tmp_path / "step_00000010"))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step_00000020"]


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Makes the processes of three that write one checkpoint."""

    def make(index):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 3)
            patch.setattr(jax, "process_index", lambda: index)
            return CommitGroup(str(tmp_path))

    return make


def write(process, work=lambda: None):
    with process.barrier():
        work()


def test_first_waits_for_all(process, tmp_path):
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
def test_first_raises_failure_of_others(process, error, number):
    def fail():
        raise error

    write(process(1))
    with pytest.raises(type(error)):
        write(process(2), fail)
    with pytest.raises(OSError, match=f"process 2 of 3: {type(error).__name__}: .*") as found:
        write(process(0))
    assert found.value.errno == number


def test_missing_process(process, monkeypatch):
    monkeypatch.setattr(module, "_BARRIER_SECONDS", 0.05)
    with pytest.raises(
        TimeoutError, match=r"process 1 of 3 has not written its part .* within 0 s"
    ):
        write(process(0))


def caused(cause):
    error = RuntimeError("the save failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EFBIG, "x"), True),
        (ValueError("RESOURCE_EXHAUSTED: [OS error 28: ENOSPC No space left on device]"), True),
        (caused(OSError(errno.ENOSPC, "x")), True),
        (OSError(errno.EIO, "x"), False),
        (caused(PermissionError("not yours")), False),
        (None, False),
    ],
    ids=["ENOSPC", "EDQUOT", "EFBIG", "tensorstore", "cause", "EIO", "permission", "none"],
)
def test_is_disk_full(error, expected):
    assert is_disk_full(error) is expected
