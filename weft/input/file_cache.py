"""Cache of data derived from large files, such as line indexes and tokens.

Small data is recomputed in memory at each start. Large data is written to the user's cache folder,
under a hash of everything it depends on, and mapped into memory. Processes that need the same data
wait for the one that computes it. Only complete files are moved into place.
"""

import fcntl
import hashlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.errors import InputReadError

logger = logging.getLogger(__name__)

MAX_BYTES_IN_MEMORY = 64 * 2**20


def cache_folder() -> Path:
    """Returns the folder `weft` in `XDG_CACHE_HOME`, or else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def cached_bytes(
    kind: str, key: object, make: Callable[[BinaryIO], None], *, num_bytes: int | None
) -> np.ndarray:
    """Returns the bytes that `make` writes, in memory or mapped from the cache folder.

    Args:
        key: Everything the bytes depend on; its `repr` determines the file name.
        make: Writes the bytes to a binary file. Its read errors must not be an `OSError`, which
            would be attributed to the cache folder.
        num_bytes: Approximate size. None: unknown, treated as large.

    Returns `UInt8[np.ndarray, "bytes"]`, read-only.

    Raises InputReadError if the cache folder cannot be written.
    """
    if num_bytes is not None and num_bytes <= MAX_BYTES_IN_MEMORY:
        memory = io.BytesIO()
        make(memory)
        return np.frombuffer(memory.getvalue(), np.uint8)
    folder = cache_folder() / kind
    path = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:40]
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # The lock is released when its process dies.
            with open(path.with_suffix(".lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _write_file(path, make)
        return _open_memmap(str(path), np.uint8)
    except OSError as error:
        raise InputReadError(
            f"cannot write {path} ({error.strerror or error}); make the folder writable, or "
            "set XDG_CACHE_HOME to a writable one with enough space"
        ) from error


class _CachedMemmap(np.memmap):
    """Mapped file that is pickled for worker processes as its name, not its bytes."""

    def __reduce__(self):
        # The file is None for computed arrays; slices are smaller.
        path = self.filename
        if path is None or self.ndim != 1 or self.nbytes != os.path.getsize(path):
            return np.asarray(self).__reduce__()
        return _open_memmap, (str(path), self.dtype)


def _open_memmap(path: str, dtype: np.typing.DTypeLike) -> np.ndarray:
    if not os.path.getsize(path):
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return _CachedMemmap(path, dtype, "r")


def _write_file(path: Path, make: Callable[[BinaryIO], None]) -> None:
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
