"""Random-access datasets of records in files.

    documents = json_lines_dataset("data/*.jsonl.gz")
    documents[7]["text"]

They are Grain `MapDataset`s whose errors name the file and the record, see `weft.input.records`.
The state of an iterator is one number, also after shuffles. Files are listed when the dataset is
created, and must not change while it is used. For ArrayRecord files see
`weft.input.grain.array_record_dataset`.
"""

import functools
import gzip
import zlib
from collections.abc import Sequence
from typing import Literal

from weft.errors import InputReadError
from weft.input.corpus import text_fault
from weft.input.line_files import JsonLinesFile, LineFile, file_fingerprint
from weft.input.records import NamedSource, RecordDataset, matching_files
from weft.input.table_files import ParquetFile
from weft.serialization.foreign import open_file


def text_dataset(
    paths: str | Sequence[str], *, document: Literal["file", "line"] = "file"
) -> RecordDataset:
    """Returns documents of plain text, as `{"text": bytes}`.

    Args:
        paths: Files and glob patterns; `.gz` files are decompressed.
        document: Whether a document is a whole file, or a nonempty line.

    Raises:
        InputReadError: If a path or pattern matches no file, or a file or document cannot be read.

    >>> import json
    >>> documents = text_dataset(json.__path__[0] + "/*.py")
    >>> documents.describe(0).endswith("json/__init__.py"), len(documents[0]["text"]) > 1000
    (True, True)
    """
    files = matching_files(paths)
    source = NamedSource(files, LineFile) if document == "line" else _WholeFiles(files)
    return RecordDataset(_Texts(source))


def json_lines_dataset(paths: str | Sequence[str]) -> RecordDataset:
    """Returns the values of files with one JSON value per line.

    Args:
        paths: Files and glob patterns; `.gz` files are decompressed.

    Raises:
        InputReadError: If a path or pattern matches no file, or a file cannot be read; on access,
            with file, line and column, if a line is not JSON.
    """
    return RecordDataset(NamedSource(matching_files(paths), JsonLinesFile))


def parquet_dataset(
    paths: str | Sequence[str], *, columns: Sequence[str] | None = None
) -> RecordDataset:
    """Returns the rows of Parquet files, as dicts of Python values. Needs the extra `parquet`.

    Raises:
        InputReadError: If a path or pattern matches no file, or a file is not a Parquet file or
            lacks a column.
        MissingExtraError: If pyarrow is not installed.
    """
    open_file = functools.partial(ParquetFile, columns=columns)
    return RecordDataset(NamedSource(matching_files(paths), open_file))


class _WholeFiles:
    """Source of whole files as records."""

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)
        self._states = [file_fingerprint(path) for path in self._paths]
        self.fingerprint = ("files", *self._states)
        self.num_bytes = sum(size for _, size, _ in self._states)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"{len(self)} files"

    def __getitem__(self, index: int) -> bytes:
        path = self._paths[index]
        try:
            with open_file(path) as file:
                data = file.read()
            data = gzip.decompress(data) if path.endswith(".gz") else data
        except (OSError, EOFError, zlib.error) as error:
            what = getattr(error, "strerror", None) or error
            raise InputReadError(f"cannot read {path} ({what}); fix it, or leave it out") from error
        return data

    def describe(self, index: int) -> str:
        return self._paths[index]


class _Texts:
    """Source that wraps bytes in records with the key `text`, like JSON and Parquet records."""

    def __init__(self, source):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return repr(self._source)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        data = self._source[index]
        fault = text_fault(data)
        if fault is not None:
            raise InputReadError(f"{self.describe(index)} {fault}")
        return {"text": data}

    def describe(self, index: int) -> str:
        return self._source.describe(index)

    @property
    def fingerprint(self) -> tuple | None:
        return self._source.fingerprint

    @property
    def num_bytes(self) -> int | None:
        return self._source.num_bytes
