"""Random access to lines of text and JSON lines files, optionally gzipped, and to Parquet rows.

Line boundaries are indexed once (see `weft.input.file_cache`), so reading a line is one read, and
the state of an iterator is one number. Blank lines are skipped, and so is the mark of UTF-8 that
some programs write first. Parquet compresses groups of many
rows, so reading a row costs as much as its group: the file is converted once to Arrow's own format,
and mapped into memory.
"""

import codecs
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from weft._lazy import import_extra
from weft.errors import InputReadError
from weft.input import formats
from weft.input.file_cache import cached_bytes
from weft.input.records import read_errors
from weft.serialization.untrusted import open_file, parse_json

_CHUNK = 16 * 2**20
_NEWLINE, _RETURN = b"\n\r"
_IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\v\f"))
# A file that is one JSON array is parsed as a whole, which takes several times its size of memory.
_MAX_ARRAY_BYTES = 2**28
_MAX_RECORD_BYTES = 2**27


class LineFile:
    r"""Lines of one file, without their ends; item i is the i-th line that is not blank.

    Args:
        path: A text file with lines ending in `\n` or `\r\n`; gzipped if its name ends with `.gz`.

    Raises InputReadError if it cannot be read.
    """

    def __init__(self, path: str):
        self.path = path
        self.fingerprint = file_fingerprint(path)
        self.num_bytes = os.path.getsize(path)

    def __reduce__(self):
        # A worker process reopens the file, and maps the index again.
        return type(self), (self.path,)

    def __len__(self) -> int:
        return len(self._line_bounds)

    def __getitem__(self, index: int) -> Any:
        return self.line(index)

    def line(self, index: int) -> bytes:
        """Returns the bytes of a record's line."""
        start, end = (int(x) for x in self._line_bounds[index])
        return self._read(start, end)

    def line_number(self, index: int) -> int:
        """Returns the number of a record's line in the file, from 1. Reads everything before it."""
        end, at, newlines = int(self._line_bounds[index][0]), 0, 0
        while at < end:
            chunk = self._read(at, min(at + _CHUNK, end))
            newlines, at = newlines + chunk.count(b"\n"), at + len(chunk)
        return newlines + 1

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return f"line {self.line_number(index)} of {self.path}"

    def _read(self, start: int, end: int) -> bytes:
        if self._decompressed is not None:
            return self._decompressed[start:end].tobytes()
        # Not mapped: truncating a mapped file kills the reader. Not kept open: a dataset may have
        # more files than a process may open.
        try:
            with open_file(self.path, buffering=0) as file:
                data = os.pread(file.fileno(), end - start, start)
        except OSError as error:
            raise InputReadError(
                f"cannot read {self.path} ({error.strerror or error}); it existed when the "
                "dataset was created"
            ) from error
        if len(data) != end - start:
            raise InputReadError(
                f"{self.path} ends before byte {end}: it was changed while it was read; do not "
                "change the files of a run, and start it again"
            )
        return data

    @cached_property
    def _decompressed(self) -> np.ndarray | None:
        if not formats.is_gzipped(self.path):
            return None

        def unpack(out: BinaryIO) -> None:
            with read_errors(f"{self.path} cannot be decompressed"):
                formats.unpack(self.path, out)

        at_most = formats.most_unpacked_bytes(self.path)
        return cached_bytes("unpacked", self.fingerprint, unpack, num_bytes=at_most)

    @cached_property
    def _line_bounds(self) -> np.ndarray:
        """`Int64[np.ndarray, "lines 2"]`: first byte of each line, and end of its last."""
        size = self._size

        def find(out: BinaryIO) -> None:
            mark = self._read(0, min(len(codecs.BOM_UTF8), size))
            begin = len(mark) if mark == codecs.BOM_UTF8 else 0
            # `seen` counts the bytes that are not blank, `before` those before the current line.
            start, last, seen, before = begin, b"\n", 0, 0
            for at in range(begin, size, _CHUNK):
                # Includes the byte before, to detect a `\r` before the first newline.
                data = last + self._read(at, min(at + _CHUNK, size))
                chunk, last = np.frombuffer(data, np.uint8), data[-1:]
                newlines = np.flatnonzero(chunk[1:] == _NEWLINE)
                ends = newlines + at
                starts = np.concatenate([[start], ends + 1])
                ends = ends - (chunk[newlines] == _RETURN)
                counts = seen + np.cumsum(~_IS_BLANK[chunk[1:]])
                counts_at_ends = np.concatenate([[before], counts[newlines]])
                start, seen, before = int(starts[-1]), int(counts[-1]), int(counts_at_ends[-1])
                bounds = np.stack([starts[:-1], ends], axis=1).astype(np.int64)
                out.write(bounds[np.diff(counts_at_ends) > 0].tobytes())
            if seen > before:
                out.write(np.array([start, size], np.int64).tobytes())

        index = cached_bytes("lines", self.fingerprint, find, num_bytes=size)
        return index.view(np.int64).reshape(-1, 2)

    @cached_property
    def _size(self) -> int:
        """Number of bytes, decompressed."""
        return self.num_bytes if self._decompressed is None else len(self._decompressed)


class JsonLinesFile(LineFile):
    """JSON values of a file with one value per line, or of one array or object as a whole."""

    def __len__(self) -> int:
        return super().__len__() if self._whole is None else len(self._whole)

    def __getitem__(self, index: int) -> Any:
        if self._whole is not None:
            return parse_json(self._whole[index])
        start, end = (int(x) for x in self._line_bounds[index])
        if end - start > _MAX_RECORD_BYTES:
            raise InputReadError(
                f"{self.describe(index)} has {end - start:,} bytes, and a record may have "
                f"{_MAX_RECORD_BYTES:,}; divide it into several"
            )
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

    def describe(self, index: int) -> str:
        if self._whole is not None:
            return f"record {index} of {self.path}"
        return super().describe(index)

    @cached_property
    def _whole(self) -> list[bytes] | None:
        """The records of a file that is one array, or one object in several lines; else None.

        An array in one line is one record, unless all of its values are objects.
        """
        bounds = self._line_bounds
        if not len(bounds):
            return None
        start, end = (int(x) for x in bounds[0])
        opening = self._read(start, min(end, start + 100)).lstrip()[:1]
        if opening not in (b"[", b"{"):
            return None
        try:
            first = self._value(start, end, opening)
        except ValueError:  # the first line is a part of it
            return self._of_several_lines(start, opening)
        is_array = isinstance(first, list) and all(isinstance(x, dict) for x in first)
        return _as_lines(first) if is_array and first and len(bounds) == 1 else None

    def _of_several_lines(self, start: int, opening: bytes) -> list[bytes] | None:
        try:
            value = self._value(start, self._size, opening)
        except ValueError as error:
            if opening == b"{":  # the error of the line says more
                return None
            raise InputReadError(
                f"{self.path} begins like one JSON array, and is none: {error}; mend it, or write "
                "one whole JSON value in each line"
            ) from error
        return _as_lines(value if isinstance(value, list) else [value])

    def _value(self, start: int, end: int, opening: bytes) -> Any:
        """Returns the JSON value of a part of the file; raises ValueError if it is none."""
        if end - start <= _MAX_ARRAY_BYTES:
            return parse_json(self._read(start, end))
        if opening == b"{":
            raise ValueError("it is too large to be one object")
        raise InputReadError(
            f"{self.path} begins like one JSON array, of {end - start:,} bytes; arrays are read up "
            f"to {_MAX_ARRAY_BYTES:,}: convert it to JSON lines, for example with `jq -c '.[]'`"
        )


def _as_lines(values: list[Any]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def file_fingerprint(path: str) -> tuple[str, int, int]:
    """Returns the identity of a file's contents: real path, size and modification time.

    Raises InputReadError if the file does not exist.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputReadError(
            f"cannot open {path} ({error.strerror or error}); pass the path of an existing file"
        ) from error
    return os.path.realpath(path), status.st_size, status.st_mtime_ns


_ROWS_PER_BATCH = 1024


class ParquetFile:
    """Rows of one file, as dicts of Python values.

    Raises:
        InputReadError: If it is not a Parquet file, or lacks a column.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(self, path: str, columns: Sequence[str] | None = None):
        self.path, self._columns = path, None if columns is None else list(columns)
        self.fingerprint = (*file_fingerprint(path), *(columns or ()))
        with self._opened() as file:
            self._num_rows = file.metadata.num_rows
            self.num_bytes = sum(
                file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)
            )
            names = file.schema_arrow.names
            missing = [name for name in self._columns or () if name not in names]
        if missing:
            raise InputReadError(
                f"{path} has no column {missing[0]!r}; it has {names}: change columns"
            )

    def __reduce__(self):
        return type(self), (self.path, self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self._reader.get_batch(index // _ROWS_PER_BATCH)
        return batch.slice(index % _ROWS_PER_BATCH, 1).to_pylist()[0]

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return f"row {index} of {self.path}"

    def _opened(self) -> Any:
        parquet = import_extra(
            "pyarrow.parquet", "parquet", needed_by="reading Parquet", package="pyarrow"
        )
        with read_errors(f"{self.path} is not a Parquet file"):
            return parquet.ParquetFile(self.path)

    @cached_property
    def _reader(self) -> Any:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        def unpack(out: BinaryIO) -> None:
            with self._opened() as file:
                schema = file.schema_arrow
                if self._columns is not None:
                    schema = pa.schema([schema.field(name) for name in self._columns])
                with pa.ipc.new_file(out, schema) as writer:
                    for table in self._tables(file):
                        writer.write_table(table, max_chunksize=_ROWS_PER_BATCH)

        data = cached_bytes("parquet", self.fingerprint, unpack, num_bytes=self.num_bytes)
        return pa.ipc.open_file(pa.py_buffer(data))

    def _tables(self, file: Any):
        """Yields tables of equal sizes, so that a row's number determines its table."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        rest = None
        for group in range(file.num_row_groups):
            with read_errors(f"row group {group} of {self.path} cannot be read"):
                table = file.read_row_group(group, columns=self._columns)
            table = table if rest is None else pa.concat_tables([rest, table])
            whole = len(table) // _ROWS_PER_BATCH * _ROWS_PER_BATCH
            rest = table.slice(whole)
            yield table.slice(0, whole).combine_chunks()
        if rest is not None:
            yield rest.combine_chunks()
