"""Tokenizers, and bytes as tokens.

For bytes, ids 0 to 255 are the bytes, and two more ids are special. A model's bits per byte then
follow exactly from its cross-entropy. For trained tokenizers see `weft.input.text_tokenizers`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Interface of tokenizers.

    Optional members are `encode_batch`, a faster `encode` of a list of texts; and `fingerprint`, a
    string that changes with the ids of texts, which enables caching of tokens.

    Attributes:
        eos_id: Separates documents; never an id of text.
        pad_id: Padding; never an id of text.
        vocab_size: Exclusive upper bound of all ids.
        token_num_bytes: `Int[np.ndarray, "vocab"]`, bytes of text of each token.
    """

    eos_id: int
    pad_id: int
    vocab_size: int
    token_num_bytes: np.ndarray

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes a text, without an end."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, without `eos_id` and `pad_id`."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids are bytes.

    Attributes:
        eos_id: 256, at the start of each document and after the last one.
        pad_id: 257; never counts as a target.
        vocab_size: 258.
        token_num_bytes: 1 for each byte, 0 for the other two.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!").tolist()
    [195, 169, 33]
    >>> tokenizer.decode([256, 195, 169, 33, 257])
    'é!'
    """

    eos_id = 256
    pad_id = 257
    vocab_size = 258
    token_num_bytes = (np.arange(vocab_size) < eos_id).astype(np.int32)
    fingerprint = "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes a text as `Int32[np.ndarray, "bytes"]`, without an end."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, without `eos_id` and `pad_id`; invalid UTF-8 becomes U+FFFD."""
        values = np.asarray(ids).reshape(-1)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
