"""Caches of data derived from large files: line indexes, token streams and others.

Small data is recomputed in memory at each start. Large data is written to the user's cache folder,
under a hash of everything it depends on, and mapped into memory. Processes that need the same data
wait for the one that computes it, or compute parts of it each. Only complete files are moved into
place, and a digest at their end is checked before they are used: a damaged one is made again.

With the token stream of a dataset, sequences are arithmetic on an index (`weft.input.packing`): an
iterator's state is one number for any number of processes, and no step waits for a tokenizer.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import logging
import math
import os
import random
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
_PART_BYTES = 2**26
_MOST_PARTS = 1000
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
        return open_cached_file(path)


def open_cached_file(path: str) -> np.ndarray:
    """Returns the bytes of a `cached_file`, mapped: `UInt8[np.ndarray, "bytes"]`, read-only."""
    return _open_memmap(path, np.uint8)


def cached_file(
    kind: str, key: object, make: Callable[[BinaryIO], None]
) -> str:
    """Returns the path of a file in the cache folder with the bytes that `make` writes.

    Of its end, `cached_size` does not count what the cache needs. See `cached_bytes`.
    """
    folder = cache_folder() / kind
    name = _name_of(key)
    with _write_errors(folder / name):
        if not _is_whole(folder, name):
            os.makedirs(folder, exist_ok=True)
            with _lock(folder, name, fcntl.LOCK_EX):
                if not _is_whole(folder, name):
                    _write_file(folder, name, make)
    return str(folder / name)


def _name_of(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:40]


@contextlib.contextmanager
def _lock(folder: Path, name: str, operation: int) -> Iterator[None]:
    """Locks what one process makes at a time, also if that process dies."""
    path = Directory(str(folder)).open_to_change(f"{name}.lock")
    with open(path, "wb") as lock:
        fcntl.flock(lock, operation)
        yield


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputReadError(
            f"cannot write {path} ({error.strerror or error}); make the folder writable, or set "
            "XDG_CACHE_HOME to a writable one with enough space"
        ) from error


class CachedParts:
    """Parts of cached data, which the processes that need the data make together.

    Each makes those that no other has begun, from a random one on, and then waits for the others.
    They may be on several machines, if these have the same cache folder.

    Args:
        make: Writes a part, by its number, like that of `cached_bytes`.
    """

    def __init__(
        self,
        kind: str,
        key: object,
        number: int,
        make: Callable[[int, BinaryIO], None],
    ):
        self._folder = cache_folder() / kind
        self._names = [_name_of((key, number, i)) for i in range(number)]
        self._make = make

    def make(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Makes the parts, unless they exist.

        Args:
            until: Whether they are no longer needed.

        Raises InputReadError if the cache folder cannot be written.
        """
        first = random.randrange(len(self._names))
        unmade = [*self._names[first:], *self._names[:first]]
        with _write_errors(self._folder):
            os.makedirs(self._folder, exist_ok=True)
            for operation in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
                of_others = []
                for name in unmade:
                    try:
                        self._make_one(name, operation, until)
                    except BlockingIOError:
                        of_others.append(name)
                unmade = of_others

    def _make_one(
        self, name: str, operation: int, until: Callable[[], bool]
    ) -> None:
        with _lock(self._folder, name, operation):
            if not until() and not _is_whole(self._folder, name):
                make = functools.partial(self._make, self._names.index(name))
                _write_file(self._folder, name, make)

    def contents(self) -> Iterator[np.ndarray]:
        """Yields the bytes of each part, made if it is missing."""
        self.make()
        for name in self._names:
            yield _open_memmap(str(self._folder / name), np.uint8)

    def remove(self) -> None:
        """Removes the parts, if they exist."""
        for name in self._names:
            for file in (name, f"{name}.lock"):
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / file)


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


def keeps_tokens(documents: Records, tokenizer: tokenizers.Tokenizer) -> bool:
    """Returns whether the tokens of large documents are cached: they are identified by files."""
    fingerprints = [
        getattr(part, "fingerprint", None) for part in (documents, tokenizer)
    ]
    return None not in fingerprints


def tokenize_documents(
    documents: Records,
    tokenizer: tokenizers.Tokenizer,
    *,
    text_key: str = "text",
) -> TokenizedDocuments:
    """Computes the `weft.input.packing.token_stream` of a dataset.

    Documents of known files, without mapped functions, are tokenized once, and large results are
    cached. Processes with the same cache folder that need them at the same time tokenize a part
    each. Others are tokenized in memory at each start.

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
    if num_bytes is not None and num_bytes <= MAX_BYTES_IN_MEMORY:
        memory = io.BytesIO()
        _write_tokens(
            memory, documents, range(len(documents)), tokenizer, text_key
        )
        content = np.frombuffer(memory.getvalue(), np.uint8)
        return _tokens_of(content, dtype)

    key = (data, ids, text_key)
    # At least one document in each, and not more files than a folder should have.
    num_parts = min(_parts_of(num_bytes), len(documents))
    starts = np.linspace(0, len(documents), num_parts + 1).astype(int).tolist()

    def write_part(number: int, out: BinaryIO) -> None:
        indices = range(starts[number], starts[number + 1])
        _write_tokens(out, documents, indices, tokenizer, text_key)

    parts = CachedParts("token_parts", key, num_parts, write_part)

    def write_stream(out: BinaryIO) -> None:
        for content in parts.contents():
            out.write(_tokens_of(content, dtype).stream.data)

    def write_corrections(out: BinaryIO) -> None:
        all_corrections = []
        num_tokens = 0
        for content in parts.contents():
            tokens = _tokens_of(content, dtype)
            if tokens.corrections is None:
                out.write(_UNKNOWN)
                return
            shift = np.array([num_tokens, 0])
            all_corrections.append(tokens.corrections + shift)
            num_tokens += len(tokens.stream)
        out.write(np.concatenate(all_corrections).tobytes())

    name = _name_of(key)
    files = [cache_folder() / kind / name for kind in ("tokens", "token_bytes")]

    def is_made() -> bool:
        return all(map(os.path.exists, files))

    if not is_made():
        _log_shared_work(len(documents))
        parts.make(until=is_made)
    stream = cached_bytes("tokens", key, write_stream, num_bytes=None)
    rows = cached_bytes("token_bytes", key, write_corrections, num_bytes=None)
    parts.remove()
    corrections = None
    if len(rows) != len(_UNKNOWN):
        corrections = np.frombuffer(rows, np.int64).reshape(-1, 2)
    return TokenizedDocuments(stream.view(dtype), corrections)


def _log_shared_work(num_documents: int) -> None:
    """Says which processes of a run tokenize parts of the same documents."""
    # Local, since this module is also used by commands that do without JAX.
    import jax

    # Only where a run has been set up: the number of processes starts the devices.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    logger.info(
        "tokenizing %d documents with the other processes that have the cache folder %s. Of %d "
        "processes in all, those on hosts with folders of their own do the same work again: set "
        "XDG_CACHE_HOME to a folder that all hosts share, or tokenize on one host before and copy "
        "the folder to the others",
        num_documents,
        cache_folder(),
        jax.process_count(),
    )


_UNKNOWN = b"?"
"""Cached instead of the corrections if they are not known."""


def _parts_of(num_bytes: int | None) -> int:
    """Returns in how many parts documents are tokenized."""
    if num_bytes is None:
        return 1
    return min(math.ceil(num_bytes / _PART_BYTES), _MOST_PARTS)


def _write_tokens(
    out: BinaryIO,
    documents: Records,
    indices: range,
    tokenizer: tokenizers.Tokenizer,
    text_key: str,
) -> None:
    """Writes the tokens of some documents, their corrections, and the number of these."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    eos = np.array([tokenizer.eos_id], dtype).tobytes()
    # Every document ends with `eos`, and only the first of all begins with it.
    is_first = indices.start == 0
    corrections = packing.ByteCorrections(
        tokenizer.token_num_bytes, position=int(is_first)
    )
    if is_first:
        out.write(eos)
    for text, tokens in _tokenized(documents, indices, tokenizer, text_key):
        out.write(tokens.astype(dtype).tobytes())
        out.write(eos)
        if corrections.is_known:
            corrections.add(
                tokens, tokenizers.text_num_bytes(tokenizer, text, tokens)
            )
    rows = corrections.rows()
    num_rows = -1
    if rows is not None:
        out.write(rows.tobytes())
        num_rows = len(rows)
    out.write(np.array([num_rows], np.int64).tobytes())


def _tokens_of(content: np.ndarray, dtype: type) -> TokenizedDocuments:
    """Returns what `_write_tokens` has written."""
    (num_rows,) = np.frombuffer(content[-8:].tobytes(), np.int64).tolist()
    start = len(content) - 8 - 16 * max(num_rows, 0)
    corrections = None
    if num_rows >= 0:
        rows = np.frombuffer(content[start:-8].tobytes(), np.int64)
        corrections = rows.reshape(-1, 2)
    return TokenizedDocuments(content[:start].view(dtype), corrections)


def _tokenized(
    documents: Records,
    indices: range,
    tokenizer: tokenizers.Tokenizer,
    text_key: str,
) -> Iterator[tuple[str | bytes, np.ndarray]]:
    """Yields texts and their ids; tokenizes many at a time, as some tokenizers use all cores."""
    encode_batch = getattr(
        tokenizer, "encode_batch", lambda texts: map(tokenizer.encode, texts)
    )
    texts: dict[int, str | bytes] = {}
    size, logged = 0, time.monotonic()
    for index in indices:
        record = documents[index]
        if record is not None:
            try:
                texts[index] = document_text(record, text_key)
            except InputDatasetError as error:
                raise InputReadError(
                    f"{describe_record(documents, index)}: {error}"
                ) from error
            size += len(texts[index])
        if size < _BATCH_CHARACTERS and index + 1 < indices.stop:
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
                "tokenized %d of %d documents",
                index + 1 - indices.start,
                len(indices),
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
