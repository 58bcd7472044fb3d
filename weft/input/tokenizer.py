"""Tokenizers: what turns text into ids, and bytes as tokens.

With bytes, ids 0 to 255 are the bytes themselves, and two more ids stand for what no text contains.
Because a token is a byte, a model's bits per byte follow from its cross-entropy exactly, with no
text normalized away. `weft.input.text_tokenizers` reads the files of trained tokenizers.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What sources, and what generates text, ask of a tokenizer.

    It may also have `encode_batch`, from a list of texts to a list of ids, where that is quicker;
    and `fingerprint`, a string that changes when the ids of a text do: with it, the tokens of a
    large text are kept between runs.

    Attributes:
        eos_id: Separates documents; no text gives it.
        pad_id: Fills what is not text; no text gives it.
        vocab_size: Ids are below it, `eos_id` and `pad_id` as well.
        token_num_bytes: `Int[np.ndarray, "vocab"]`, of how many bytes of text each token is.
    """

    eos_id: int
    pad_id: int
    vocab_size: int
    token_num_bytes: np.ndarray

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, without any end."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without `eos_id` and `pad_id`."""
        ...


class ByteTokenizer:
    """Text to byte ids and back.

    Attributes:
        eos_id: 256, starts each document and ends the last one.
        pad_id: 257, fills what is not text; it is never a target that counts.
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
        """The ids of a text, without any end: `Int32[np.ndarray, "bytes"]`."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without `eos_id` and `pad_id`; what is not UTF-8 shows as U+FFFD."""
        values = np.asarray(ids).reshape(-1)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
