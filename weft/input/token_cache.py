"""Token streams of whole datasets, computed once.

With the stream, sequences are arithmetic on an index (`weft.input.packing`): an iterator's state is
one number for any number of processes, and no step waits for a tokenizer. Tokens of large files are
stored in the user's cache folder, see `weft.input.file_cache`.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from weft.errors import EmptyCorpusError, InputDatasetError, InputReadError
from weft.input import file_cache, tokenizers
from weft.input.records import Records, describe_record

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20
_LOG_SECONDS = 30.0


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

    tokens = file_cache.cached_bytes("tokens", (data, ids, text_key), tokenize, num_bytes=num_bytes)
    return tokens.view(dtype)


def _batches_of_tokens(
    documents: Records, tokenizer: tokenizers.Tokenizer, text_key: str
) -> Iterator[Sequence[np.ndarray]]:
    """Tokenizes many documents at a time, as some tokenizers use all cores for them."""
    encode_batch = getattr(tokenizer, "encode_batch", None)
    texts: list[str | bytes] = []
    first = size = 0
    logged = time.monotonic()
    for index in range(len(documents)):
        record = documents[index]
        if record is not None:
            try:
                texts.append(document_text(record, text_key))
            except InputDatasetError as error:
                raise InputReadError(f"{describe_record(documents, index)}: {error}") from error
            size += len(texts[-1])
        if size < _BATCH_CHARACTERS and index + 1 < len(documents):
            continue
        try:
            yield encode_batch(texts) if encode_batch else [tokenizer.encode(t) for t in texts]
        except Exception:
            _raise_for_document(documents, tokenizer, text_key, range(first, index + 1))
            raise
        texts, first, size = [], index + 1, 0
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("tokenized %d of %d documents", index + 1, len(documents))


def _raise_for_document(
    documents: Records, tokenizer: tokenizers.Tokenizer, text_key: str, indices: range
) -> None:
    for index in indices:
        record = documents[index]
        if record is None:
            continue
        try:
            tokenizer.encode(document_text(record, text_key))
        except Exception as error:
            raise InputReadError(
                f"{describe_record(documents, index)} cannot be tokenized: {type(error).__name__}: "
                f"{error}; fix its text or leave it out"
            ) from error
