"""Files of lines by index: plain text and JSON lines, also compressed by gzip.

Where each line begins and ends is found once (see `weft.input.file_cache`), so any line is one
read, and nothing but a number need be remembered to go on. A line that holds nothing is no record.
"""

import gzip
import json
import os
import shutil
import zlib
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from weft.errors import InputReadError
from weft.input.file_cache import made_once
from weft.serialization.foreign import open_file, parse_json

_CHUNK = 16 * 2**20
_NEWLINE, _RETURN = b"\n\r"
# How much a gzipped text may grow to, about; it is the limit of what is unpacked in memory.
_GZIP_FACTOR = 8


class LineFile:
    r"""The lines of one file, without their ends: item i is the i-th line that is not empty.

    Args:
        path: A file of text in which lines end with `\n` or `\r\n`; gzipped if it ends with
            `.gz`.

    Raises:
        InputReadError: If it cannot be read.
    """

    def __init__(self, path: str):
        self.path = path
        self.fingerprint = file_fingerprint(path)
        self.num_bytes = os.path.getsize(path)

    def __reduce__(self):
        # A worker process opens the file, and maps the index, anew.
        return type(self), (self.path,)

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: int) -> Any:
        return self.line(index)

    def line(self, index: int) -> bytes:
        """The bytes of a record's line."""
        start, end = (int(x) for x in self._bounds[index])
        return self._read(start, end)

    def line_number(self, index: int) -> int:
        """Which line of the file it is, from 1. Reads all that is before it."""
        end, at, newlines = int(self._bounds[index][0]), 0, 0
        while at < end:
            chunk = self._read(at, min(at + _CHUNK, end))
            newlines, at = newlines + chunk.count(b"\n"), at + len(chunk)
        return newlines + 1

    def describe(self, index: int) -> str:
        """What to call a record in a message."""
        return f"line {self.line_number(index)} of {self.path}"

    def _read(self, start: int, end: int) -> bytes:
        if self._unpacked is not None:
            return self._unpacked[start:end].tobytes()
        # Not mapped: a file that is cut short while it is mapped kills the process that reads it.
        # Not kept open: a dataset may have more files than a process may open.
        try:
            with open_file(self.path, buffering=0) as file:
                data = os.pread(file.fileno(), end - start, start)
        except OSError as error:
            raise InputReadError(
                f"cannot read {self.path} ({error.strerror or error}); it was there when the "
                "dataset was made"
            ) from error
        if len(data) != end - start:
            raise InputReadError(
                f"{self.path} ends before byte {end}: it was changed while it was read; do not "
                "change the files of a run, and start it again"
            )
        return data

    @cached_property
    def _unpacked(self) -> np.ndarray | None:
        if not self.path.endswith(".gz"):
            return None

        def unpack(out: BinaryIO) -> None:
            with gzip.open(self.path) as packed:
                try:
                    shutil.copyfileobj(packed, out, _CHUNK)
                except (OSError, EOFError, zlib.error) as error:
                    raise InputReadError(f"{self.path} cannot be unpacked: {error}") from error

        num_bytes = _GZIP_FACTOR * self.num_bytes
        return made_once("unpacked", self.fingerprint, unpack, num_bytes=num_bytes)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """`Int64[np.ndarray, "lines 2"]`: the first byte of each line, and that after its last."""
        size = self.num_bytes if self._unpacked is None else len(self._unpacked)

        def find(out: BinaryIO) -> None:
            start, last = 0, b"\n"
            for at in range(0, size, _CHUNK):
                # With the byte before, so that a `\r` before the first newline is seen as well.
                data = last + self._read(at, min(at + _CHUNK, size))
                chunk, last = np.frombuffer(data, np.uint8), data[-1:]
                newlines = np.flatnonzero(chunk[1:] == _NEWLINE)
                ends = newlines + at
                starts = np.concatenate([[start], ends + 1])
                ends = ends - (chunk[newlines] == _RETURN)
                start = int(starts[-1])
                bounds = np.stack([starts[:-1], ends], axis=1).astype(np.int64)
                out.write(bounds[ends > starts[:-1]].tobytes())
            if start < size:
                out.write(np.array([start, size], np.int64).tobytes())

        index = made_once("lines", self.fingerprint, find, num_bytes=size)
        return index.view(np.int64).reshape(-1, 2)


class JsonLinesFile(LineFile):
    """The JSON values of a file that has one in each line."""

    def __getitem__(self, index: int) -> Any:
        line = self.line(index)
        try:
            return parse_json(line)
        except ValueError as error:
            column, what = 1, str(error)
            if isinstance(error, json.JSONDecodeError):
                column, what = error.colno, error.msg
            elif isinstance(error, UnicodeDecodeError):
                column, what = error.start + 1, error.reason
            shown = line.decode(errors="replace")[max(column - 21, 0) : column + 19]
            raise InputReadError(
                f"{self.path}, line {self.line_number(index)}, column {column}: {what}, in "
                f"{shown!r}; a JSON lines file has one whole JSON value in each line"
            ) from error


def file_fingerprint(path: str) -> tuple[str, int, int]:
    """What tells one state of a file from another: real path, size and time of change.

    Raises:
        InputReadError: If there is no such file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputReadError(
            f"cannot open {path} ({error.strerror or error}); give the path of a file that exists"
        ) from error
    return os.path.realpath(path), status.st_size, status.st_mtime_ns
