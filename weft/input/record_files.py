"""Random access to lines of text and JSON lines files, optionally gzipped, and to Parquet rows.

Line boundaries are indexed once (see `weft.input.file_cache`), so reading a line is one read, and
the state of an iterator is one number. Blank lines are skipped, and so is the mark of UTF-8 that
some programs write first. Parquet compresses groups of many
rows, so reading a row costs as much as its group: the file is converted once to Arrow's own format,
and mapped into memory.
"""

import codecs
import functools
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from weft._lazy import import_extra
from weft.errors import InputReadError
from weft.input import file_cache, formats
from weft.input.file_cache import (
    cached_bytes,
    cached_file,
    cached_size,
    open_cached_file,
)
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
        _, self.num_bytes, _ = self.fingerprint
        self._files: LineFiles | None = None

    def __reduce__(self):
        # A worker process reopens the file, and maps the index again.
        if self._files is not None:
            return LineFiles.__call__, (self._files, self.path)
        return type(self), (self.path,)

    def share_index(self, files: "LineFiles") -> None:
        """Takes the bounds of the lines from the index of several files."""
        self._files = files

    def __len__(self) -> int:
        return len(self._line_bounds)

    def __getitem__(self, index: int) -> Any:
        return self.line(index)

    def line(self, index: int) -> bytes:
        """Returns the bytes of a record's line."""
        start, end = self._bounds(index)
        return self._read(start, end)

    def _bounds(self, index: int) -> tuple[int, int]:
        start, end = self._line_bounds[index].tolist()
        return start, end

    def line_number(self, index: int) -> int:
        """Returns the number of a record's line in the file, from 1. Reads everything before it."""
        line_start, _ = self._bounds(index)
        num_newlines = 0
        for start in range(0, line_start, _CHUNK):
            chunk = self._read(start, min(start + _CHUNK, line_start))
            num_newlines += chunk.count(b"\n")
        return num_newlines + 1

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return f"line {self.line_number(index)} of {self.path}"

    def _read(self, start: int, end: int) -> bytes:
        if isinstance(self._contents, np.ndarray):
            return self._contents[start:end].tobytes()
        # Not mapped: truncating a mapped file kills the reader. Not kept open: a dataset may have
        # more files than a process may open.
        try:
            with open_file(self._contents, buffering=0) as file:
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
    def _contents(self) -> str | np.ndarray:
        """Path of the file, decompressed; of a small one that is compressed, its bytes."""
        if not formats.is_gzipped(self.path):
            return self.path

        def unpack(out: BinaryIO) -> None:
            with read_errors(f"{self.path} cannot be decompressed"):
                formats.unpack(self.path, out)

        at_most = formats.most_unpacked_bytes(self.path)
        if self._files is None and at_most <= file_cache.MAX_BYTES_IN_MEMORY:
            return cached_bytes(
                "unpacked", self.fingerprint, unpack, num_bytes=at_most
            )
        return cached_file("unpacked", self.fingerprint, unpack)

    @cached_property
    def _line_bounds(self) -> np.ndarray:
        """`Int64[np.ndarray, "lines 2"]`: first byte of each line, and end of its last."""
        if self._files is not None:
            return self._files.line_bounds(self.path)
        index = cached_bytes(
            "lines", self.fingerprint, self.write_bounds, num_bytes=self._size
        )
        return index.view(np.int64).reshape(-1, 2)

    def has_lines(self, line_bounds: np.ndarray) -> bool:
        """Returns whether each line is a record, given the bounds of the lines."""
        return True

    def write_bounds(self, out: BinaryIO) -> None:
        """Writes the bounds of lines, one chunk of the file after the other."""
        size = self._size
        mark = self._read(0, min(len(codecs.BOM_UTF8), size))
        text_start = len(mark) if mark == codecs.BOM_UTF8 else 0
        line_start = text_start
        last_byte = b"\n"
        # Bytes that are not blank, up to the end of the chunk and up to the start of the line.
        num_inked = num_inked_at_line = 0
        for chunk_start in range(text_start, size, _CHUNK):
            # Begins with the byte before, to detect a `\r` before the first newline.
            data = last_byte + self._read(
                chunk_start, min(chunk_start + _CHUNK, size)
            )
            last_byte = data[-1:]
            codes = np.frombuffer(data, np.uint8)
            newlines = np.flatnonzero(codes[1:] == _NEWLINE)
            newline_positions = newlines + chunk_start
            starts = np.concatenate([[line_start], newline_positions + 1])
            ends = newline_positions - (codes[newlines] == _RETURN)
            bounds = np.stack([starts[:-1], ends], axis=1).astype(np.int64)
            inked = num_inked + np.cumsum(~_IS_BLANK[codes[1:]])
            inked_at_lines = np.concatenate(
                [[num_inked_at_line], inked[newlines]]
            )
            is_blank = np.diff(inked_at_lines) == 0
            out.write(bounds[~is_blank].tobytes())
            line_start = int(starts[-1])
            num_inked = int(inked[-1])
            num_inked_at_line = int(inked_at_lines[-1])
        if num_inked > num_inked_at_line:
            out.write(np.array([line_start, size], np.int64).tobytes())

    @cached_property
    def _size(self) -> int:
        """Number of bytes, decompressed."""
        if isinstance(self._contents, np.ndarray):
            return len(self._contents)
        if self._contents == self.path:
            return self.num_bytes
        return cached_size(self._contents)


class LineFiles:
    """Opens the files of one dataset, which have one index of lines if they are large together.

    Otherwise, small files would add up in memory; and of large ones, each index that is mapped
    takes one of the about 1,000 files that a process may open.

    Args:
        open_file: Opens a path, such as `JsonLinesFile`.
    """

    def __init__(
        self, paths: Sequence[str], open_file: Callable[[str], LineFile]
    ):
        self._paths, self._open_file = list(paths), open_file

    def __reduce__(self):
        return type(self), (self._paths, self._open_file)

    def __call__(self, path: str) -> LineFile:
        """Returns one of the files."""
        return self._files[path]

    @cached_property
    def _files(self) -> dict[str, LineFile]:
        files = {path: self._open_file(path) for path in self._paths}
        num_bytes = sum(file.num_bytes for file in files.values())
        if len(files) > 1 and num_bytes > file_cache.MAX_BYTES_IN_MEMORY:
            for file in files.values():
                file.share_index(self)
        return files

    def line_bounds(self, path: str) -> np.ndarray:
        """Returns `Int64[np.ndarray, "lines 2"]`, the bounds of the lines of one of the files."""
        return self._index.bounds[self._index.lines_of_path[path]]

    def has_lines(self, path: str) -> bool:
        """Returns `LineFile.has_lines` of one of the files, which is not opened for it."""
        return self._index.has_lines[path]

    @cached_property
    def _index(self) -> "_LinesOfFiles":
        fingerprints = [file.fingerprint for file in self._files.values()]
        data = cached_bytes(
            "line_indexes", (2, *fingerprints), self._write, num_bytes=None
        )
        numbers = data.view(np.int64)
        num_files = len(self._files)
        ends = np.cumsum(numbers[-2 * num_files : -num_files]).tolist()
        lines = map(slice, [0, *ends], ends)
        return _LinesOfFiles(
            numbers[: -2 * num_files].reshape(-1, 2),
            dict(zip(self._files, lines, strict=False)),
            dict(
                zip(
                    self._files,
                    numbers[-num_files:].astype(bool).tolist(),
                    strict=True,
                )
            ),
        )

    def _write(self, out: BinaryIO) -> None:
        """Writes the bounds of all lines, the numbers of lines, and which files have lines."""
        num_lines = []
        has_lines = []
        for file in self._files.values():
            start = out.tell()
            file.write_bounds(out)
            out.seek(start)
            bounds = np.frombuffer(out.read(), np.int64).reshape(-1, 2)
            num_lines.append(len(bounds))
            has_lines.append(file.has_lines(bounds))
        out.write(np.array([num_lines, has_lines], np.int64).tobytes())


class _LinesOfFiles(NamedTuple):
    """Index of the lines of several files.

    Attributes:
        bounds: `Int64[np.ndarray, "lines 2"]`, of all lines.
        lines_of_path: where in them those of each file are.
        has_lines: by path.
    """

    bounds: np.ndarray
    lines_of_path: dict[str, slice]
    has_lines: dict[str, bool]


class JsonLinesFile(LineFile):
    """JSON values of a file with one value per line, or of one array or object as a whole."""

    def __len__(self) -> int:
        if self._whole is None:
            return super().__len__()
        return len(self._whole)

    def __getitem__(self, index: int) -> Any:
        if self._whole is not None:
            return parse_json(self._whole[index])
        start, end = self._bounds(index)
        if end - start > _MAX_RECORD_BYTES:
            raise InputReadError(
                f"{self.describe(index)} has {end - start:,} bytes, and a record may have "
                f"{_MAX_RECORD_BYTES:,}; divide it into several"
            )
        line = self.line(index)
        try:
            return parse_json(line)
        except ValueError as error:
            column, reason = 1, str(error)
            if isinstance(error, json.JSONDecodeError):
                column, reason = error.colno, error.msg
            elif isinstance(error, UnicodeDecodeError):
                column, reason = error.start + 1, error.reason
            text = line.decode(errors="replace")
            excerpt = text[max(column - 21, 0) : column + 19]
            raise InputReadError(
                f"{self.path}, line {self.line_number(index)}, column {column}: {reason}, in "
                f"{excerpt!r}; a JSON lines file has one whole JSON value in each line"
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
        if self._files is not None and self._files.has_lines(self.path):
            return None
        return self._records_of_whole(self._line_bounds)

    def has_lines(self, line_bounds: np.ndarray) -> bool:
        return self._records_of_whole(line_bounds) is None

    def _records_of_whole(self, line_bounds: np.ndarray) -> list[bytes] | None:
        num_lines = len(line_bounds)
        if num_lines == 0:
            return None
        start, end = line_bounds[0].tolist()
        opening = self._read(start, min(end, start + 100)).lstrip()[:1]
        if opening not in (b"[", b"{"):
            return None
        try:
            value = self._value(start, end, opening)
        except ValueError:  # the first line is a part of it
            return self._of_several_lines(start, opening)
        if num_lines > 1 or not isinstance(value, list) or not value:
            return None
        if not all(isinstance(item, dict) for item in value):
            return None
        return _as_lines(value)

    def _of_several_lines(
        self, start: int, opening: bytes
    ) -> list[bytes] | None:
        try:
            value = self._value(start, self._size, opening)
        except ValueError as error:
            if opening == b"{":  # the error of the line says more
                return None
            raise InputReadError(
                f"{self.path} begins like one JSON array, and is none: {error}; mend it, or write "
                "one whole JSON value in each line"
            ) from error
        values = value if isinstance(value, list) else [value]
        return _as_lines(values)

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

    It asks the file system once for each file, as a file server may take a millisecond.

    Raises InputReadError if the file does not exist.
    """
    folder, name = os.path.split(os.path.join(os.getcwd(), path))
    real_path = os.path.join(_real_folder(folder), name)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            real_path = os.path.realpath(path)
            status = os.stat(path)
    except OSError as error:
        raise InputReadError(
            f"cannot open {path} ({error.strerror or error}); pass the path of an existing file"
        ) from error
    return real_path, status.st_size, status.st_mtime_ns


@functools.lru_cache
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


_MOST_ROWS_PER_BATCH = 1024
_BATCH_BYTES = 2**24
_READ_BYTES = 2**20
_MOST_OPEN_FILES = 100


class ParquetFile:
    """Rows of one file, as dicts of Python values.

    Args:
        num_files: How many files its dataset has. Together, these hold up to
            `file_cache.MAX_BYTES_IN_MEMORY` in memory; larger ones are in the cache folder.

    Raises:
        InputReadError: If it is not a Parquet file, or lacks a column.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str] | None = None,
        *,
        num_files: int = 1,
    ):
        self.path = path
        self._columns = None if columns is None else list(columns)
        self._num_files = num_files
        self.fingerprint = (*file_fingerprint(path), *(columns or ()))
        with self._opened() as file:
            self._num_rows = file.metadata.num_rows
            self.num_bytes = 0
            for group in range(file.num_row_groups):
                self.num_bytes += file.metadata.row_group(group).total_byte_size
            names = file.schema_arrow.names
        for column in self._columns or ():
            if column not in names:
                raise InputReadError(
                    f"{path} has no column {column!r}; it has {names}: change columns"
                )
        row_bytes = self.num_bytes / max(self._num_rows, 1)
        num_rows = int(_BATCH_BYTES / max(row_bytes, 1))
        self._rows_per_batch = min(max(num_rows, 1), _MOST_ROWS_PER_BATCH)

    def __reduce__(self):
        opened = functools.partial(type(self), num_files=self._num_files)
        return opened, (self.path, self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch_index, row_index = divmod(index, self._rows_per_batch)
        reader = self._unpacked
        if isinstance(reader, str):
            reader = _unpacked_reader(reader)
        batch = reader.get_batch(batch_index)
        (row,) = batch.slice(row_index, 1).to_pylist()
        return row

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return f"row {index} of {self.path}"

    def _opened(self) -> Any:
        parquet = import_extra(
            "pyarrow.parquet",
            "parquet",
            needed_by="reading Parquet",
            package="pyarrow",
        )
        with read_errors(f"{self.path} is not a Parquet file"):
            # Without a buffer, or with Arrow's own reading ahead, it holds a whole row group.
            return parquet.ParquetFile(
                self.path, buffer_size=_READ_BYTES, pre_buffer=False
            )

    @cached_property
    def _unpacked(self) -> Any:
        """Path of a file with the rows in Arrow's format; of few rows, a reader of them."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        at_most = file_cache.MAX_BYTES_IN_MEMORY // self._num_files
        if self.num_bytes <= at_most:
            memory = io.BytesIO()
            # A column of few different values becomes many times larger than the metadata says.
            if self._unpack(memory, at_most=at_most):
                return pa.ipc.open_file(pa.py_buffer(memory.getvalue()))

        def unpack(out: BinaryIO) -> None:
            self._unpack(out, at_most=sys.maxsize)

        key = (self.fingerprint, self._rows_per_batch)
        return cached_file("parquet", key, unpack)

    def _unpack(self, out: BinaryIO, *, at_most: int) -> bool:
        """Writes the rows in Arrow's format; returns whether they have `at_most` so many bytes."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        with self._opened() as file:
            names = self._columns
            if names is None:
                names = file.schema_arrow.names
            fields = []
            for name in names:
                field = file.schema_arrow.field(name)
                if pa.types.is_dictionary(field.type):
                    # Arrow's format has one dictionary for all batches.
                    field = field.with_type(field.type.value_type)
                fields.append(field)
            schema = pa.schema(fields)
            with pa.ipc.new_file(out, schema) as writer:
                for table in self._tables(file):
                    writer.write_table(
                        table.select(names).cast(schema),
                        max_chunksize=self._rows_per_batch,
                    )
                    if out.tell() > at_most:
                        return False
        return True

    def _tables(self, file: Any) -> Iterator[Any]:
        """Yields tables of equal sizes, so that a row's number determines its table."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        left_over = None
        for table in self._parts(file):
            if left_over is not None:
                table = pa.concat_tables([left_over, table])
            num_whole_rows = (
                len(table) // self._rows_per_batch * self._rows_per_batch
            )
            left_over = table.slice(num_whole_rows)
            yield table.slice(0, num_whole_rows).combine_chunks()
        if left_over is not None:
            yield left_over.combine_chunks()

    def _parts(self, file: Any) -> Iterator[Any]:
        """Yields tables of some rows of a row group, which may be larger than the memory."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        for group in range(file.num_row_groups):
            with read_errors(
                f"row group {group} of {self.path} cannot be read"
            ):
                for batch in file.iter_batches(
                    batch_size=self._rows_per_batch,
                    row_groups=[group],
                    columns=self._columns,
                ):
                    yield pa.Table.from_batches([batch])


@functools.lru_cache(_MOST_OPEN_FILES)
def _unpacked_reader(path: str) -> Any:
    """Returns a reader of a file in the cache folder; each keeps one file open."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    with read_errors(f"cannot read {path}"):
        return pa.ipc.open_file(pa.py_buffer(open_cached_file(path)))
