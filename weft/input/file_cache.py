"""What is made of large files once and then mapped into memory: line indexes, tokens.

A made thing is bytes. Small ones are made anew in memory at each start. Large ones are written to
the user's cache folder, under a name that is a hash of all that they depend on, so a changed file
gets a new one. Processes that want the same at the same time wait for the one that makes it. It is
moved into place when it is complete, so a killed process leaves none that is half made.
"""

import fcntl
import hashlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.errors import InputReadError

logger = logging.getLogger(__name__)

SMALL = 64 * 2**20


def cache_folder() -> Path:
    """`weft` in the folder that `XDG_CACHE_HOME` names, or else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def made_once(
    kind: str, key: object, make: Callable[[BinaryIO], None], *, num_bytes: int | None
) -> np.ndarray:
    """The bytes that `make` writes, in memory or mapped from a file of the cache folder.

    Args:
        kind: What they are, in one word: the name of a folder.
        key: All that they depend on; its `repr` names the file.
        make: Writes them to the binary file that it is given. An error of what it reads must not be
            an `OSError`, which is taken for one of the cache folder.
        num_bytes: About how many these are. None: not known, which counts as many.

    Returns:
        `UInt8[np.ndarray, "bytes"]`, read-only.

    Raises:
        InputReadError: If the cache folder cannot be written.
    """
    if num_bytes is not None and num_bytes <= SMALL:
        memory = io.BytesIO()
        make(memory)
        return np.frombuffer(memory.getvalue(), np.uint8)
    folder = cache_folder() / kind
    path = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:40]
    with _says_where(path):
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                if not path.exists():
                    _make(path, make)
        return _map(str(path), np.uint8)


class _Mapped(np.memmap):
    """A mapped file, which a worker process gets as the file's name and not as its bytes."""

    def __reduce__(self):
        # None is the file of what was computed from it; a part of it is smaller.
        path = self.filename
        if path is None or self.ndim != 1 or self.nbytes != os.path.getsize(path):
            return np.asarray(self).__reduce__()
        return _map, (str(path), self.dtype)


def _map(path: str, dtype: np.typing.DTypeLike) -> np.ndarray:
    if not os.path.getsize(path):
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return _Mapped(path, dtype, "r")


def _make(path: Path, make: Callable[[BinaryIO], None]) -> None:
    start = time.monotonic()
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            make(file)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    seconds = time.monotonic() - start
    logger.info("made %s (%d bytes) in %.1f s", path, path.stat().st_size, seconds)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time through. The lock of one that dies is free."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _says_where(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputReadError(
            f"cannot keep {path} ({error.strerror or error}); make the folder writable, or set "
            "XDG_CACHE_HOME to one that is, with room for what is read"
        ) from error
