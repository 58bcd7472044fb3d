"""Bytes as tokens: ids 0 to 255 are the bytes themselves, and two more ids that no text contains.

Because a token is a byte, a model's bits per byte follow from its cross-entropy exactly, with no
text normalized away.
"""

from collections.abc import Sequence

import numpy as np


class ByteTokenizer:
    """Text to byte ids and back.

    Attributes:
        eos_id: 256, starts each document and ends the last one.
        pad_id: 257, fills what is not text; it is never a target that counts.
        vocab_size: 258.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!").tolist()
    [195, 169, 33]
    >>> tokenizer.decode([256, 195, 169, 33, 257])
    'é!'
    """

    eos_id = 256
    pad_id = 257
    vocab_size = 258

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, without any end: `Int32[np.ndarray, "bytes"]`."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without `eos_id` and `pad_id`; what is not UTF-8 shows as U+FFFD."""
        values = np.asarray(ids).reshape(-1)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
