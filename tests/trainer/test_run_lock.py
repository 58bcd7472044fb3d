"""The lock of a run's directory: real processes that are killed, frozen, or on other machines."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest

from tests.pages import ROOT
from weft.errors import RunDirError, RunDirMovedError, RunDirTakenError
from weft.trainer import run_lock as lib
from weft.trainer.run_lock import LOCK_FILE, move_aside, run_lock

# Holds a directory until it is killed; sees only the file system, so it starts quickly.
HOLDER = """
import os, signal, sys
from weft.trainer import run_lock as lib
lib._BEAT_SECONDS = 0.05
if sys.argv[2:] == ["elsewhere"]:
    lib._machine = lambda: "elsewhere"
    lib._try_lock = lambda fd: None
with lib.run_lock(sys.argv[1]) as lock:
    print("held", flush=True)
    for line in sys.stdin:
        try:
            lock.check()
            print("free to write", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lib, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lib, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(lib, "_SILENT_POLLS", 5)
    monkeypatch.setattr(lib, "_POLLS_PER_MESSAGE", 2)


@pytest.fixture
def nobody_answers(monkeypatch):
    """Shortens the watch of a file that no process keeps."""
    monkeypatch.setattr(lib, "_POLL_SECONDS", 0.01)


@pytest.fixture
def hold():
    """Starts processes that hold a directory; those that are left at the end are killed."""
    holders = []

    def start(directory, *words):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory), *words],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        holders.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in holders:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def ask(process):
    """Returns what a holder says about its lock."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def write_record(directory, *, machine="elsewhere"):
    directory.mkdir(exist_ok=True)
    record = {"host": "gpu07", "pid": 4711, "started": "yesterday", "machine": machine}
    (directory / LOCK_FILE).write_text(json.dumps({**record, "token": "0"}), encoding="utf-8")


@contextlib.contextmanager
def without_locks(monkeypatch, number=errno.ENOLCK):
    def flock(fd, operation):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        yield


def test_directory_is_left_as_it_was(tmp_path):
    with run_lock(str(tmp_path / "a" / "b")) as lock:
        assert os.listdir(tmp_path / "a" / "b") == [LOCK_FILE]
        lock.check()
        with run_lock(f"{tmp_path}/a/../a/b") as same:
            assert same is lock
        lock.check()
    assert os.listdir(tmp_path) == []
    with run_lock(str(tmp_path)):
        (tmp_path / "kept").touch()
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.long
def test_second_process_is_refused_until_the_first_is_killed(tmp_path, hold):
    first = hold(tmp_path)
    for _ in range(2):
        with pytest.raises(RunDirError) as caught, run_lock(str(tmp_path)):
            pass
        text = rf"in use by a run on host \S+, pid {first.pid}, started \d{{4}}-.*dir='\S+-2'\.$"
        assert re.search(text, str(caught.value))
        assert caught.value.free_dir == f"{tmp_path}-2"
    first.send_signal(signal.SIGSTOP)  # on this machine, silence does not free it
    time.sleep(0.6)
    with pytest.raises(RunDirError, match=r"It has been frozen for \d s"), run_lock(str(tmp_path)):
        pass
    first.kill()
    first.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with run_lock(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_owner_on_another_machine_is_watched(tmp_path, hold, caplog):
    first = hold(tmp_path, "elsewhere")
    with pytest.raises(RunDirError, match=f"pid {first.pid}"), run_lock(str(tmp_path)):
        pass
    assert "Waiting 0.5 s to see whether it is alive" in caplog.text
    assert lib.is_in_use(str(tmp_path))
    first.send_signal(signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)  # it may still have been setting the file's time
    with run_lock(str(tmp_path)) as lock:
        first.send_signal(signal.SIGCONT)
        said = ask(first)
        assert said.startswith("RunDirTakenError") and f"pid {os.getpid()}" in said
        first.stdin.close()
        first.wait()
        lock.check()
        assert (tmp_path / LOCK_FILE).exists()  # the first has not removed what is not its own


@pytest.mark.usefixtures("nobody_answers")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks(number, tmp_path, monkeypatch, caplog):
    with without_locks(monkeypatch, number), run_lock(str(tmp_path / "free")):
        assert not caplog.text
    write_record(tmp_path, machine=lib._machine())
    with without_locks(monkeypatch, number), run_lock(str(tmp_path)) as lock:
        assert "was last used by a run on host gpu07, pid 4711" in caplog.text
        lock.check()
    assert os.listdir(tmp_path) == []


def test_record_of_another_machine_expires_whatever_its_time(tmp_path, caplog):
    write_record(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (4e9, 4e9))  # its clock is in the future
    start = time.monotonic()
    with run_lock(str(tmp_path)):
        assert time.monotonic() - start > 0.5
        assert lib.is_in_use(str(tmp_path))
    waits = [float(re.search("Waiting (.*) s to see", r.getMessage())[1]) for r in caplog.records]
    assert waits == sorted(waits, reverse=True) and len(waits) > 1, "with the rest of the time"
    assert not lib.is_in_use(str(tmp_path))
    assert caplog.records[0].levelno == logging.WARNING and "gpu07" in caplog.text


def test_record_of_this_machine_counts_for_nothing_without_its_lock(tmp_path, caplog):
    write_record(tmp_path, machine=lib._machine())
    with run_lock(str(tmp_path)):
        assert not caplog.text


@pytest.mark.usefixtures("nobody_answers")
@pytest.mark.parametrize("data", [b"{", b"\xff" * 9000, b"[" * 5000, b"[1]"])
def test_damaged_record_expires(data, tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(data)
    with run_lock(str(tmp_path)) as lock:
        lock.check()
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text(encoding="utf-8")


@pytest.mark.usefixtures("nobody_answers")
def test_read_only_record_of_another_user_is_replaced(tmp_path, monkeypatch):
    write_record(tmp_path)
    file, open_file = (tmp_path / LOCK_FILE).stat().st_ino, os.open

    def open_as_another_user(path, flags, mode=0o777, *, dir_fd=None):
        fd = open_file(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_RDWR and os.fstat(fd).st_ino == file:
            os.close(fd)
            raise PermissionError(errno.EACCES, "Permission denied")
        return fd

    monkeypatch.setattr(os, "open", open_as_another_user)  # root may write everything
    # While the file is open, the next one cannot have its number.
    with open(tmp_path / LOCK_FILE, encoding="utf-8"), run_lock(str(tmp_path)) as lock:
        lock.check()
        assert (tmp_path / LOCK_FILE).stat().st_ino != file


def test_taken_directory_is_noticed_by_the_heartbeat(tmp_path):
    with run_lock(str(tmp_path)) as lock:
        write_record(tmp_path)
        deadline = time.monotonic() + 10
        with pytest.raises(RunDirTakenError, match="was taken by a run on host gpu07, pid 4711"):
            while time.monotonic() < deadline:
                lock.check()
    assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == 4711


def test_renamed_directory_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.trainer.run_lock._BEAT_SECONDS", 0.01)
    with run_lock(str(tmp_path / "run")) as lock:
        lock.check_now()
        os.rename(tmp_path / "run", tmp_path / "elsewhere")
        os.mkdir(tmp_path / "run")  # as a writer of summaries may do
        found = f"run' was renamed to '{tmp_path}/elsewhere' while this run was writing to it"
        with pytest.raises(RunDirMovedError, match=re.escape(found)):
            lock.check_now()
        os.rmdir(tmp_path / "run")
        os.rename(tmp_path / "elsewhere", tmp_path / "run")
        lock.check_now()
        shutil.rmtree(tmp_path / "run")
        deadline = time.monotonic() + 10
        with pytest.raises(RunDirMovedError, match=r"run' was removed while this run was writing"):
            while time.monotonic() < deadline:
                lock.check()
    assert not (tmp_path / "run").exists()


def test_forked_child_does_not_keep_the_lock(tmp_path):
    ready, parent = os.pipe(), os.pipe()
    with run_lock(str(tmp_path)):
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks
            child = os.fork()
        if child == 0:
            os.close(parent[1])
            os.write(ready[1], b"!")
            os.read(parent[0], 1)  # until its parent closes the pipe
            os._exit(0)
        os.read(ready[0], 1)
        os.replace(tmp_path / LOCK_FILE, tmp_path / "file")
    with open(tmp_path / "file", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(parent[1])
    os.waitpid(child, 0)
    for end in (*ready, parent[0]):
        os.close(end)


def test_run_is_moved_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert move_aside("runs/lm") is None
    for n in (1, 2):
        (tmp_path / "runs" / "lm" / "checkpoints" / "step_00000001").mkdir(parents=True)
        assert move_aside("runs/lm/") == f"runs/lm.{n}"
    assert sorted(os.listdir("runs")) == ["lm.1", "lm.2"]
    assert os.listdir("runs/lm.2") == ["checkpoints"]
    with pytest.raises(RunDirError, match="is not the directory of a run"):
        move_aside("runs")


def test_directory_in_use_is_not_moved(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    fd = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    write_record(tmp_path, machine=lib._machine())
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(RunDirError, match="in use by a run on host gpu07, pid 4711"):
        move_aside(str(tmp_path))
    os.close(fd)
    assert (tmp_path / "checkpoints").exists()
