"""Caches of data derived from large files: line indexes, token streams and others.

Small data is recomputed in memory at each start. Large data is written to the user's cache folder,
under a hash of everything it depends on, and mapped into memory. Processes that need the same data
wait for the one that computes it. Only complete files are moved into place, and a digest at their
end is checked before they are used: a damaged one is made again.

With the token stream of a dataset, sequences are arithmetic on an index (`weft.input.packing`): an
iterator's state is one number for any number of processes, and no step waits for a tokenizer.
"""

import dataclasses
import fcntl
import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weft._lazy import import_extra
from weft.errors import (
    EmptyCorpusError,
    FileRefusedError,
    InputDatasetError,
    InputReadError,
)
from weft.input import packing, tokenizers
from weft.input.records import Records, describe_record, read_errors
from weft.serialization.directory import Directory

logger = logging.getLogger(__name__)

MAX_BYTES_IN_MEMORY = 64 * 2**20
_BATCH_CHARACTERS = 2**20
_LOG_SECONDS = 30.0


def cache_folder() -> Path:
    """Returns the folder `weft` in `XDG_CACHE_HOME`, or else in `~/.cache`.

    Raises InputReadError if there is no such variable, and the user has no home directory.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise InputReadError(
            "large data has no place to be kept, because the user has no home directory; set "
            "XDG_CACHE_HOME to a folder that only this user can write"
        )
    return Path(folder, "weft")


def cached_bytes(
    kind: str,
    key: object,
    make: Callable[[BinaryIO], None],
    *,
    num_bytes: int | None,
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
    path = cached_file(kind, key, make)
    with read_errors(f"cannot read {path}"):
        return _open_memmap(path, np.uint8)


def cached_file(
    kind: str, key: object, make: Callable[[BinaryIO], None]
) -> str:
    """Returns the path of a file in the cache folder with the bytes that `make` writes.

    Of its end, `cached_size` does not count what the cache needs. See `cached_bytes`.
    """
    folder = cache_folder() / kind
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:40]
    try:
        if not _is_whole(folder, name):
            os.makedirs(folder, exist_ok=True)
            # The lock is released when its process dies.
            with open(
                Directory(str(folder)).open_to_change(f"{name}.lock"), "wb"
            ) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(folder, name):
                    _write_file(folder, name, make)
    except OSError as error:
        raise InputReadError(
            f"cannot write {folder / name} ({error.strerror or error}); make the folder writable, "
            "or set XDG_CACHE_HOME to a writable one with enough space"
        ) from error
    return str(folder / name)


# The end of a cached file: what it is, and the digest of the bytes before it.
_MARK = b"weft xxh3_128\n"
_END_BYTES = len(_MARK) + 16
_BLOCK_BYTES = 2**20


def _xxh3() -> Any:
    return import_extra(
        "xxhash", "train", needed_by="a cache of large data"
    ).xxh3_128()


def _is_whole(folder: Path, name: str) -> bool:
    """Returns whether there is a cached file, and its bytes are those that were written."""
    try:
        with Directory(str(folder)).open(name) as file:
            num_unread = os.fstat(file.fileno()).st_size - _END_BYTES
            digest = _xxh3()
            while num_unread > 0 and (
                block := file.read(min(num_unread, _BLOCK_BYTES))
            ):
                digest.update(block)
                num_unread -= len(block)
            is_whole = file.read(_END_BYTES) == _MARK + digest.digest()
    except FileNotFoundError:
        return False
    except FileRefusedError:
        is_whole = False
    if not is_whole:
        logger.warning(
            "%s is damaged, or of an earlier version; it is made again",
            folder / name,
        )
    return is_whole


class _CachedMemmap(np.memmap):
    """Mapped file that is pickled for worker processes as its name, not its bytes."""

    def __reduce__(self):
        # The file is None for computed arrays; slices are smaller.
        path = self.filename
        if (
            path is None
            or self.ndim != 1
            or self.nbytes != cached_size(str(path))
        ):
            return np.asarray(self).__reduce__()
        return _open_memmap, (str(path), self.dtype)


def cached_size(path: str) -> int:
    """Returns the number of bytes that were written to a `cached_file`."""
    return os.path.getsize(path) - _END_BYTES


def _open_memmap(path: str, dtype: np.typing.DTypeLike) -> np.ndarray:
    length = cached_size(path) // np.dtype(dtype).itemsize
    if not length:
        return np.empty(0, dtype)  # nothing cannot be mapped
    return _CachedMemmap(path, dtype, "r", shape=(length,))


def _write_file(
    folder: Path, name: str, make: Callable[[BinaryIO], None]
) -> None:
    start = time.monotonic()
    with Directory(str(folder)).replacing(name, mode=0o600) as file:
        make(file)
        digest = _xxh3()
        file.seek(0)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        file.write(_MARK + digest.digest())
    seconds, size = time.monotonic() - start, os.path.getsize(folder / name)
    logger.info("made %s (%d bytes) in %.1f s", folder / name, size, seconds)


def document_text(
    record: object,
    text_key: str,
    *,
    advice: str = "name one of these as text_key",
) -> str | bytes:
    """Returns the text of a record.

    `advice` says in the error about a record without the field how to name another.

    Raises InputDatasetError if the record has no such text.
    """
    if not isinstance(record, Mapping):
        raise InputDatasetError(
            f"the record is of type {type(record).__name__}; expected a dict with {text_key!r}"
        )
    if text_key not in record:
        if not record:
            raise InputDatasetError(
                f"the record is empty; expected one with {text_key!r}"
            )
        raise InputDatasetError(
            f"the record has no {text_key!r}, it has {sorted(map(str, record))}; {advice}"
        )
    text = record[text_key]
    if not isinstance(text, str | bytes):
        raise InputDatasetError(
            f"{text_key!r} of the record is of type {type(text).__name__}; expected a string"
        )
    return text


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """Tokens of documents, as arguments of `weft.input.packing.PackedSequences`.

    Attributes:
        stream: The `token_stream`, `UInt16[np.ndarray, "stream"]`, or `UInt32` for more than 65,536
            ids.
        corrections: The rows of `weft.input.packing.ByteCorrections`.
    """

    stream: np.ndarray
    corrections: np.ndarray | None


def tokenize_documents(
    documents: Records,
    tokenizer: tokenizers.Tokenizer,
    *,
    text_key: str = "text",
) -> TokenizedDocuments:
    """Computes the `weft.input.packing.token_stream` of a dataset.

    Documents of known files, without mapped functions, are tokenized once, and large results are
    cached. Others are tokenized in memory at each start.

    Raises:
        EmptyCorpusError: If there are no documents.
        InputReadError: If a document cannot be read or has no text; names the document.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> tokenize_documents([{"text": "ab"}, {"text": "c"}], ByteTokenizer()).stream.tolist()
    [256, 97, 98, 256, 99, 256]
    """
    if not len(documents):
        raise EmptyCorpusError(
            f"{documents} has no documents; pass files that contain records"
        )
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    data = getattr(documents, "fingerprint", None)
    ids = getattr(tokenizer, "fingerprint", None)
    num_bytes = getattr(documents, "num_bytes", None) if data and ids else 0

    finished_corrections: list[
        packing.ByteCorrections
    ] = []  # one, if tokenized here

    def tokenize(out: BinaryIO) -> None:
        corrections = packing.ByteCorrections(tokenizer.token_num_bytes)
        eos = np.array([tokenizer.eos_id], dtype).tobytes()
        out.write(eos)
        for text, tokens in _tokenized(documents, tokenizer, text_key):
            out.write(tokens.astype(dtype).tobytes())
            out.write(eos)
            if corrections.is_known:
                corrections.add(
                    tokens, tokenizers.text_num_bytes(tokenizer, text, tokens)
                )
        finished_corrections.append(corrections)

    def correct(out: BinaryIO) -> None:
        if (
            not finished_corrections
        ):  # the tokens are of another process, or an earlier one
            with open(os.devnull, "wb") as nothing:
                tokenize(nothing)
        rows = finished_corrections[0].rows()
        out.write(_UNKNOWN if rows is None else rows.tobytes())

    key = (data, ids, text_key)
    stream = cached_bytes("tokens", key, tokenize, num_bytes=num_bytes).view(
        dtype
    )
    rows = cached_bytes("token_bytes", key, correct, num_bytes=num_bytes)
    if len(rows) == len(_UNKNOWN):
        return TokenizedDocuments(stream, None)
    return TokenizedDocuments(
        stream, np.frombuffer(rows, np.int64).reshape(-1, 2)
    )


_UNKNOWN = b"?"
"""Cached instead of the corrections if they are not known."""


def _tokenized(
    documents: Records, tokenizer: tokenizers.Tokenizer, text_key: str
) -> Iterator[tuple[str | bytes, np.ndarray]]:
    """Yields texts and their ids; tokenizes many at a time, as some tokenizers use all cores."""
    encode_batch = getattr(
        tokenizer, "encode_batch", lambda texts: map(tokenizer.encode, texts)
    )
    texts: dict[int, str | bytes] = {}
    size, logged = 0, time.monotonic()
    for index in range(len(documents)):
        record = documents[index]
        if record is not None:
            try:
                texts[index] = document_text(record, text_key)
            except InputDatasetError as error:
                raise InputReadError(
                    f"{describe_record(documents, index)}: {error}"
                ) from error
            size += len(texts[index])
        if size < _BATCH_CHARACTERS and index + 1 < len(documents):
            continue
        try:
            tokens = list(encode_batch(list(texts.values())))
        except Exception:
            _raise_for_document(documents, tokenizer, texts)
            raise
        yield from zip(texts.values(), tokens, strict=True)
        texts, size = {}, 0
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info(
                "tokenized %d of %d documents", index + 1, len(documents)
            )


def _raise_for_document(
    documents: Records,
    tokenizer: tokenizers.Tokenizer,
    texts: Mapping[int, str | bytes],
) -> None:
    for index, text in texts.items():
        try:
            tokenizer.encode(text)
        except Exception as error:
            raise InputReadError(
                f"{describe_record(documents, index)} cannot be tokenized: {type(error).__name__}: "
                f"{error}; fix its text or leave it out"
            ) from error
