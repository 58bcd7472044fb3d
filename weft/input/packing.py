"""Packing of documents into sequences of one length, with random access.

The documents form one stream, with `eos` before each and after the last:

    stream   eos a b c eos d e eos
    input 0  eos a b c              targets  a b c eos
    input 1  eos d e                targets  d e eos

Sequence i reads `stream[i * n : i * n + n + 1]`, so every token but the first `eos` is a target
exactly once. Sequences are independent, so an iterator's state is one integer.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from weft.errors import EmptyCorpusError, InputDatasetError

UNKNOWN_NUM_BYTES = -1
"""`target_num_bytes` where the ids of a text do not decode to it."""
NO_CORRECTIONS = np.zeros((0, 2), np.int64)


def token_stream(documents: Iterable[np.ndarray], *, eos_id: int) -> np.ndarray:
    """Concatenates documents, with `eos_id` before each and after the last.

    The result is `Int[np.ndarray, "stream"]`, of the smallest dtype that holds the ids.

    Args:
        documents: Token ids, each `Int[np.ndarray, "tokens"]`.
        eos_id: Separator id, which no document may contain.

    >>> token_stream([np.array([1, 2]), np.array([3])], eos_id=9).tolist()
    [9, 1, 2, 9, 3, 9]
    """
    parts: list[np.ndarray] = [np.array([eos_id])]
    for document in documents:
        parts += [document, parts[0]]
    largest = max(int(part.max(initial=0)) for part in parts)
    return np.concatenate(parts, dtype=np.min_scalar_type(largest), casting="unsafe")


class ByteCorrections:
    """Collects where tokens of a stream have other numbers of bytes than `token_num_bytes`.

    >>> corrections = ByteCorrections(np.array([2, 1]))
    >>> corrections.add(np.array([0, 1]), np.array([1, 1]))
    >>> corrections.rows().tolist()
    [[1, -1]]
    """

    def __init__(self, token_num_bytes: np.ndarray):
        self._table = token_num_bytes
        self._rows, self._position = [NO_CORRECTIONS], 1
        self.is_known = True

    def add(self, ids: np.ndarray, num_bytes: np.ndarray | None) -> None:
        """Adds the next document.

        Args:
            num_bytes: The result of `weft.input.tokenizers.text_num_bytes`.
        """
        self.is_known &= num_bytes is not None
        if num_bytes is not None:
            differences = num_bytes - self._table[ids]
            places = np.flatnonzero(differences)
            rows = np.stack([places + self._position, differences[places]], axis=1)
            self._rows.append(rows.astype(np.int64))
        self._position += len(ids) + 1

    def rows(self) -> np.ndarray | None:
        """Returns `Int64[np.ndarray, "corrections 2"]`, positions and differences.

        None if the numbers of a document are not known.
        """
        return np.concatenate(self._rows) if self.is_known else None


@dataclasses.dataclass(eq=False, repr=False)
class PackedSequences:
    """Random-access source of language-model examples, cut from a token stream.

    An example is a dict of
        input_ids: `Int32["length"]`.
        target_labels: `Int32["length"]`, the token after each input, or `pad_id`.
        live_targets: `Bool["length"]`, which targets count. Padding is known by its position:
            `pad_id` may be the id of another token, such as `eos_id`.
        target_num_bytes: `Int32[""]`, bytes of text of the targets, without `eos_id` and `pad_id`.
            Bits per byte = summed cross-entropy / summed target_num_bytes / ln 2. Missing if
            `corrections` is None.
        input_segment_ids: `Int32["length"]`, documents numbered from 1; 0 for padding.
        input_positions: `Int32["length"]`, positions within the segment.

    Args:
        stream: Result of `token_stream`.
        pad_id: Id to pad with.
        drop_remainder: Whether to drop a last, partial sequence (training) or pad it (evaluation).
        pad_to_multiple_of: Pads the number of examples to a multiple of this.
        max_examples: Maximum number of examples, evenly spaced over the stream.
        stride: Tokens from the start of a sequence to that of the next, from 1 to
            `sequence_length`, the default. If less, targets of earlier sequences are `pad_id`, so
            that each is still a target once, after at least `sequence_length - stride` inputs.
        token_num_bytes: `Int[np.ndarray, "vocab"]`, bytes of text of each token; None for one each.
        corrections: `Int64[np.ndarray, "corrections 2"]`, increasing positions in the stream whose
            tokens have another number of bytes, and by how much; see `ByteCorrections`. None if
            the numbers are not known.

    Raises:
        EmptyCorpusError: If there is no sequence.
        InputDatasetError: If the stride is out of range.

    >>> stream = np.array([9, 1, 2, 9, 3, 9])
    >>> source = PackedSequences(stream, sequence_length=4, eos_id=9, pad_id=0)
    >>> len(source), source[1]["input_ids"].tolist(), source[1]["target_labels"].tolist()
    (2, [3, 0, 0, 0], [9, 0, 0, 0])
    """

    stream: np.ndarray
    _: dataclasses.KW_ONLY
    sequence_length: int
    eos_id: int
    pad_id: int
    drop_remainder: bool = False
    pad_to_multiple_of: int = 1
    segments: bool = False
    max_examples: int | None = None
    stride: int | None = None
    token_num_bytes: np.ndarray | None = None
    corrections: np.ndarray | None = dataclasses.field(default_factory=lambda: NO_CORRECTIONS)

    def __post_init__(self) -> None:
        self._stride = self.sequence_length if self.stride is None else self.stride
        if not 1 <= self._stride <= self.sequence_length:
            raise InputDatasetError(
                f"windows of {self.sequence_length} tokens cannot have stride={self.stride}; use a "
                f"number from 1 to {self.sequence_length}"
            )
        num_targets = len(self.stream) - 1
        # The first sequence has `overlap` more new targets than the others.
        overlap = self.sequence_length - self._stride
        whole, rest = divmod(max(num_targets - overlap, 0), self._stride)
        partial = rest or (not whole and num_targets > 0)
        available = whole if self.drop_remainder or not partial else whole + 1
        if available < 1:
            raise EmptyCorpusError(
                f"{max(num_targets, 0)} tokens do not fill one sequence of {self.sequence_length}; "
                "add text or reduce sequence_length"
            )
        self._available = available
        self._num_examples = min(available, self.max_examples or available)
        multiple = self.pad_to_multiple_of
        self._num_padded = -(-self._num_examples // multiple) * multiple

    def __len__(self) -> int:
        return self._num_padded

    def __repr__(self) -> str:
        return f"PackedSequences({len(self)} of {self.sequence_length} tokens)"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: rows[0] for name, rows in self.take(np.array([index])).items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns several examples as one batch, with a first axis `batch`.

        Raises IndexError for an index out of range.
        """
        if np.any((indices < 0) | (indices >= len(self))):
            raise IndexError(f"examples {indices.tolist()} of {len(self)}")
        starts = indices * self._available // self._num_examples * self._stride
        starts = np.where(indices < self._num_examples, starts, len(self.stream))
        at = starts[:, None] + np.arange(self.sequence_length + 1)
        tokens = np.take(self.stream, at, mode="clip").astype(np.int32)
        # The stream's last token is only a target; as an input it would predict padding.
        is_input = at[:, 1:] < len(self.stream)
        inputs = np.where(is_input, tokens[:, :-1], np.int32(self.pad_id))
        live_targets = is_input.copy()
        overlap = self.sequence_length - self._stride
        live_targets[starts > 0, :overlap] = False
        targets = np.where(live_targets, tokens[:, 1:], np.int32(self.pad_id))
        batch = {"input_ids": inputs, "target_labels": targets, "live_targets": live_targets}
        if self.corrections is not None:
            first = starts + 1 + np.where(starts > 0, overlap, 0)
            corrections = self._corrections_in(self.corrections, first, at[:, -1] + 1)
            batch["target_num_bytes"] = (self._num_bytes(batch) + corrections).astype(np.int32)
        return batch | self._segment_features(inputs, is_input) if self.segments else batch

    def _num_bytes(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        targets = batch["target_labels"]
        text = batch["live_targets"] & (targets != self.eos_id)
        if self.token_num_bytes is not None:
            text = np.where(text, self.token_num_bytes[targets], 0)
        return np.sum(text, axis=1)

    def _corrections_in(
        self, corrections: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """Returns the sum of the corrections at positions from `first` to before `end`."""
        totals = np.concatenate([[0], np.cumsum(corrections[:, 1])])
        before, until = np.searchsorted(corrections[:, 0], [first, end])
        return totals[until] - totals[before]

    def _segment_features(self, inputs: np.ndarray, live: np.ndarray) -> dict[str, np.ndarray]:
        starts = inputs == self.eos_id
        starts[:, 0] = True  # a sequence may begin inside a document
        index = np.arange(self.sequence_length, dtype=np.int32)
        segment_start = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        return {
            "input_segment_ids": np.where(live, np.cumsum(starts, axis=1, dtype=np.int32), 0),
            "input_positions": np.where(live, index - segment_start, 0),
        }
