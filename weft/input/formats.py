"""Formats of data files, by the suffixes of their names.

Capitals do not matter, and `.gz` may follow the suffix of JSON or of text. A file with a suffix
that is not here is text. Tables and other formats that Weft does not read are refused: a model
would learn their commas and quotes as text.
"""

import codecs
import os
from typing import Literal

from weft.errors import InputReadError

Format = Literal["text", "json", "parquet"]
"""What a file holds: text, JSON values (one in each line, or all in one array), or Parquet."""

_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".json", ".jsonl", ".jsonlines", ".ndjson"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_READERS: dict[Format, str] = {
    "text": "text_dataset",
    "json": "json_lines_dataset",
    "parquet": "parquet_dataset",
}
_UNREAD = frozenset(
    (
        *(".csv", ".tsv", ".xls", ".xlsx", ".ods", ".arrow", ".avro", ".feather", ".orc"),
        *(".doc", ".docx", ".odt", ".pdf", ".rtf", ".arrayrecord", ".array_record", ".tfrecord"),
        *(".pickle", ".pkl", ".npy", ".npz", ".safetensors", ".pt", ".h5", ".db", ".sqlite"),
    )
)


def suffix_of(path: str) -> str:
    """Returns the suffix of a file's name in small letters, without `.gz`.

    >>> suffix_of("data/Part.JSONL.gz"), suffix_of("notes")
    ('.jsonl', '')
    """
    name = os.path.basename(path).lower().removesuffix(".gz")
    return os.path.splitext(name)[1]


def is_gzipped(path: str) -> bool:
    """Returns whether a file's name ends with `.gz`."""
    return path.lower().endswith(".gz")


def format_of(path: str) -> Format:
    """Returns what a file holds, by its name.

    Raises InputReadError for a format that is not read.

    >>> format_of("a.jsonl"), format_of("b.NDJSON.gz"), format_of("c.txt")
    ('json', 'json', 'text')
    """
    suffix = suffix_of(path)
    if suffix in _UNREAD:
        raise InputReadError(
            f"{path} would be learnt as text, and {suffix} files are another format: convert it to "
            "JSON lines or Parquet, leave it out, or call it .txt if it is text"
        )
    return _FORMATS.get(suffix, "text")


def check_format(path: str, wanted: Format) -> None:
    """Raises an InputReadError if the name of a file says that it holds something else.

    JSON may also be in files of other names, such as `.txt`.
    """
    found = format_of(path)
    if found != wanted and not (found == "text" and wanted != "text"):
        raise InputReadError(
            f"{path} is read with {_READERS[found]}, not with {_READERS[wanted]}, by its suffix "
            f"{suffix_of(path)}; call it .txt if it is text"
        )


def without_mark(data: bytes) -> bytes:
    """Returns the bytes of a text without the mark of UTF-8 that some programs write first."""
    return data.removeprefix(codecs.BOM_UTF8)
