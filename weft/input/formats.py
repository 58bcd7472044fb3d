"""Formats of data files, by the suffixes of their names.

Capitals do not matter, and `.gz` may follow the suffix of JSON or of text. A file with a suffix
that is not here is text. Tables and other formats that Weft does not read are refused: a model
would learn their commas and quotes as text.
"""

import codecs
import gzip
import io
import os
from typing import BinaryIO, Literal

from weft.errors import InputReadError
from weft.serialization.untrusted import memory_bytes, open_file

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
        *(
            ".csv",
            ".tsv",
            ".xls",
            ".xlsx",
            ".ods",
            ".arrow",
            ".avro",
            ".feather",
            ".orc",
        ),
        *(
            ".doc",
            ".docx",
            ".odt",
            ".pdf",
            ".rtf",
            ".arrayrecord",
            ".array_record",
            ".tfrecord",
        ),
        *(
            ".pickle",
            ".pkl",
            ".npy",
            ".npz",
            ".safetensors",
            ".pt",
            ".h5",
            ".db",
            ".sqlite",
        ),
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


# Texts become 3 to 20 times smaller; a file of zeros, a thousand times.
_MOST_TIMES = 200
_ALWAYS_UNPACKED = 2**26
_CHUNK = 2**24


def most_unpacked_bytes(path: str) -> int:
    """Returns the size up to which a gzipped file is unpacked."""
    return max(_ALWAYS_UNPACKED, _MOST_TIMES * os.path.getsize(path))


def unpack(path: str, out: BinaryIO) -> None:
    """Unpacks a gzipped file.

    Raises OSError, EOFError or zlib.error if it is damaged, or becomes more than 200 times larger.
    """
    at_most, size = most_unpacked_bytes(path), 0
    with open_file(path) as file, gzip.open(file) as packed:
        while chunk := packed.read(_CHUNK):
            size += len(chunk)
            if size > at_most:
                raise gzip.BadGzipFile(
                    f"it becomes larger than {at_most:,} bytes; unpack it yourself if that is "
                    "right, for example with `gunzip`"
                )
            out.write(chunk)


def read_whole(path: str) -> bytes:
    """Returns the contents of a file of text, unpacked if it is gzipped; for errors see `unpack`.

    Raises OSError also if it is larger than the memory of this machine.
    """
    if is_gzipped(path):
        unpacked = io.BytesIO()
        unpack(path, unpacked)
        return unpacked.getvalue()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > memory_bytes():
            raise OSError(
                f"it has {size:,} bytes, more than the memory of this machine"
            )
        return file.read()


def format_of(path: str) -> Format:
    """Returns what a file holds, by its name.

    Raises InputReadError for a format that is not read.

    >>> format_of("a.jsonl"), format_of("b.NDJSON.gz"), format_of("c.txt")
    ('json', 'json', 'text')
    """
    suffix = suffix_of(path)
    if suffix in _UNREAD:
        raise InputReadError(
            f"{path} is a {suffix} file, a format that is not read: convert it to JSON lines or "
            "Parquet, leave it out, or call it .txt if it is text"
        )
    return _FORMATS.get(suffix, "text")


def check_format(path: str, expected: Format) -> None:
    """Raises an InputReadError if the name of a file says that it holds something else.

    JSON may also be in files of other names, such as `.txt`.
    """
    file_format = format_of(path)
    if file_format not in (expected, "text"):
        raise InputReadError(
            f"{path} is read with {_READERS[file_format]}, not with {_READERS[expected]}, by its "
            f"suffix {suffix_of(path)}; call it .txt if it is text"
        )


def without_mark(data: bytes) -> bytes:
    """Returns the bytes of a text without the mark of UTF-8 that some programs write first."""
    return data.removeprefix(codecs.BOM_UTF8)
