import errno
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from weft.errors import InputReadError
from weft.input import file_cache
from weft.input.file_cache import cache_folder, made_once


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "weft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_folder()) == "/home/someone/.cache/weft"


@pytest.mark.parametrize("num_bytes", [3, None, 10**9], ids=str)
def test_makes_what_is_large_once_and_what_is_small_in_memory(cache, num_bytes):
    calls = []

    def make(out):
        calls.append(out)
        out.write(b"a")
        out.write(b"bc")

    for _ in range(2):
        assert made_once("kind", ("key", 1), make, num_bytes=num_bytes).tobytes() == b"abc"
    is_large = num_bytes != 3
    assert len(calls) == (1 if is_large else 2)
    assert isinstance(made_once("kind", ("key", 1), make, num_bytes=None), np.memmap)
    made_once("kind", ("key", 2), make, num_bytes=None)
    assert len(list((cache / "weft" / "kind").glob("*.lock"))) == 2


def test_what_is_mapped_is_pickled_as_the_name_of_its_file():
    numbers = np.arange(10_000, dtype=np.int32)
    made = made_once("kind", "numbers", lambda out: out.write(numbers.tobytes()), num_bytes=None)
    made = made.view(np.int32)
    data = pickle.dumps(made)
    assert len(data) < 500
    np.testing.assert_array_equal(pickle.loads(data), numbers)
    # What is no longer the file goes as it is.
    for part in (made[5:9], made[::2], made + 1):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), part)
    with pytest.raises(ValueError, match="read-only"):
        made[0] = 1


def test_nothing_is_also_something():
    assert made_once("kind", "empty", lambda out: None, num_bytes=None).tobytes() == b""
    assert made_once("kind", "empty", lambda out: None, num_bytes=0).tobytes() == b""


def test_what_fails_leaves_nothing(cache):
    def make(out):
        out.write(b"half")
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        made_once("kind", "key", make, num_bytes=None)
    assert [p.suffix for p in (cache / "weft" / "kind").iterdir()] == [".lock"]
    whole = made_once("kind", "key", lambda out: out.write(b"whole"), num_bytes=None)
    assert whole.tobytes() == b"whole"


def test_a_folder_that_cannot_be_written(cache, monkeypatch):
    (cache / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(
        InputReadError, match=r"cannot write \S+/file/weft/kind/\w+ .*set XDG_CACHE_HOME to a"
    ):
        made_once("kind", "key", lambda out: None, num_bytes=None)


def test_a_full_disk_is_said():
    def make(out):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InputReadError, match=r"\(No space left on device\); make the folder"):
        made_once("kind", "key", make, num_bytes=None)


def test_a_second_process_waits_for_the_first(cache):
    program = """
        from weft.input.file_cache import made_once
        def make(out):
            print("making", flush=True)
            input()
            out.write(b"by the other process")
        made_once("kind", "key", make, num_bytes=None)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "making\n"
        made = []
        waiting = threading.Thread(
            target=lambda: made.append(
                made_once("kind", "key", lambda out: out.write(b"mine"), num_bytes=None)
            )
        )
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive() and not made
        other.communicate("\n", timeout=60)
        waiting.join(timeout=60)
    assert made[0].tobytes() == b"by the other process"
    assert other.returncode == 0


def test_the_limit_is_a_number_of_bytes():
    assert file_cache.SMALL == 64 * 2**20
