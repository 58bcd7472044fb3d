"""Caches of data derived from large files: line indexes, token streams and others.

Small data is recomputed in memory at each start. Large data is written to the user's cache folder,
under a hash of everything it depends on, and mapped into memory. Processes that need the same data
wait for the one that computes it. Only complete files are moved into place.

With the token stream of a dataset, sequences are arithmetic on an index (`weft.input.packing`): an
iterator's state is one number for any number of processes, and no step waits for a tokenizer.
"""

import fcntl
import hashlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.errors import EmptyCorpusError, InputDatasetError, InputReadError
from weft.input import tokenizers
from weft.input.records import Records, describe_record

logger = logging.getLogger(__name__)

MAX_BYTES_IN_MEMORY = 64 * 2**20
_BATCH_CHARACTERS = 2**20
_LOG_SECONDS = 30.0


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


def document_text(record: object, text_key: str) -> str | bytes:
    """Returns the text of a record.

    Raises InputDatasetError if the record has no such text.
    """
    if not isinstance(record, Mapping):
        raise InputDatasetError(
            f"the record is of type {type(record).__name__}; expected a dict with {text_key!r}"
        )
    if text_key not in record:
        raise InputDatasetError(
            f"the record has no {text_key!r}, it has {sorted(record)}; name one of these, as "
            "text_key or in vocab"
        )
    text = record[text_key]
    if not isinstance(text, str | bytes):
        raise InputDatasetError(
            f"{text_key!r} of the record is of type {type(text).__name__}; expected a string"
        )
    return text


def tokenize_documents(
    documents: Records, tokenizer: tokenizers.Tokenizer, *, text_key: str = "text"
) -> np.ndarray:
    """Computes the `weft.input.packing.token_stream` of a dataset.

    Documents of known files, without mapped functions, are tokenized once, and large results are
    cached. Others are tokenized in memory at each start.

    Returns `UInt16[np.ndarray, "stream"]`, or `UInt32` for more than 65,536 ids.

    Raises:
        EmptyCorpusError: If there are no documents.
        InputReadError: If a document cannot be read or has no text; names the document.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> tokenize_documents([{"text": "ab"}, {"text": "c"}], ByteTokenizer()).tolist()
    [256, 97, 98, 256, 99, 256]
    """
    if not len(documents):
        raise EmptyCorpusError(f"{documents} has no documents; pass files that contain records")
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    data = getattr(documents, "fingerprint", None)
    ids = getattr(tokenizer, "fingerprint", None)
    num_bytes = getattr(documents, "num_bytes", None) if data and ids else 0

    def tokenize(out: BinaryIO) -> None:
        eos = np.array([tokenizer.eos_id], dtype).tobytes()
        out.write(eos)
        for batch in _batches_of_tokens(documents, tokenizer, text_key):
            for tokens in batch:
                out.write(tokens.astype(dtype).tobytes())
                out.write(eos)

    tokens = cached_bytes("tokens", (data, ids, text_key), tokenize, num_bytes=num_bytes)
    return tokens.view(dtype)


def _batches_of_tokens(
    documents: Records, tokenizer: tokenizers.Tokenizer, text_key: str
) -> Iterator[Sequence[np.ndarray]]:
    """Tokenizes many documents at a time, as some tokenizers use all cores for them."""
    encode_batch = getattr(tokenizer, "encode_batch", lambda texts: map(tokenizer.encode, texts))
    texts: dict[int, str | bytes] = {}
    size, logged = 0, time.monotonic()
    for index in range(len(documents)):
        record = documents[index]
        if record is not None:
            try:
                texts[index] = document_text(record, text_key)
            except InputDatasetError as error:
                raise InputReadError(f"{describe_record(documents, index)}: {error}") from error
            size += len(texts[index])
        if size < _BATCH_CHARACTERS and index + 1 < len(documents):
            continue
        try:
            tokens = list(encode_batch(list(texts.values())))
        except Exception:
            _raise_for_document(documents, tokenizer, texts)
            raise
        yield tokens
        texts, size = {}, 0
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("tokenized %d of %d documents", index + 1, len(documents))


def _raise_for_document(
    documents: Records, tokenizer: tokenizers.Tokenizer, texts: Mapping[int, str | bytes]
) -> None:
    for index, text in texts.items():
        try:
            tokenizer.encode(text)
        except Exception as error:
            raise InputReadError(
                f"{describe_record(documents, index)} cannot be tokenized: {type(error).__name__}: "
                f"{error}; fix its text or leave it out"
            ) from error
