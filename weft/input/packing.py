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
from typing import Protocol

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
    eos = np.array([eos_id])
    parts = [eos]
    largest_id = eos_id
    for document in documents:
        parts += [document, eos]
        largest_id = max(largest_id, int(document.max(initial=0)))
    return np.concatenate(
        parts, dtype=np.min_scalar_type(largest_id), casting="unsafe"
    )


class ByteCorrections:
    """Collects where tokens of a stream have other numbers of bytes than `token_num_bytes`.

    >>> corrections = ByteCorrections(np.array([2, 1]))
    >>> corrections.add(np.array([0, 1]), np.array([1, 1]))
    >>> corrections.rows().tolist()
    [[1, -1]]
    """

    def __init__(self, token_num_bytes: np.ndarray, *, position: int = 1):
        self._token_num_bytes = token_num_bytes
        self._rows = [NO_CORRECTIONS]
        # Of the next document: in a whole stream, after the first `eos`.
        self._position = position
        self.is_known = True

    def add(self, ids: np.ndarray, num_bytes: np.ndarray | None) -> None:
        """Adds the next document.

        Args:
            num_bytes: The result of `weft.input.tokenizers.text_num_bytes`.
        """
        self.is_known &= num_bytes is not None
        if num_bytes is not None:
            differences = num_bytes - self._token_num_bytes[ids]
            index = np.flatnonzero(differences)
            rows = np.stack(
                [index + self._position, differences[index]], axis=1
            )
            self._rows.append(rows.astype(np.int64))
        self._position += len(ids) + 1

    def rows(self) -> np.ndarray | None:
        """Returns `Int64[np.ndarray, "corrections 2"]`, positions and differences.

        None if the numbers of a document are not known.
        """
        if not self.is_known:
            return None
        return np.concatenate(self._rows)


class Sequences(Protocol):
    """Interface of random-access sources of sequences of one length.

    Attributes:
        corrections: None if the batches of `take` have no `target_num_bytes`.
    """

    sequence_length: int
    corrections: np.ndarray | None

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns several sequences as one batch."""
        ...


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
    corrections: np.ndarray | None = dataclasses.field(
        default_factory=lambda: NO_CORRECTIONS
    )

    def __post_init__(self) -> None:
        self._stride = (
            self.sequence_length if self.stride is None else self.stride
        )
        if not 1 <= self._stride <= self.sequence_length:
            raise InputDatasetError(
                f"windows of {self.sequence_length} tokens cannot have stride={self.stride}; use a "
                f"number from 1 to {self.sequence_length}"
            )
        # Every sequence but the first repeats this many targets of the one before.
        self._overlap = self.sequence_length - self._stride
        num_targets = max(len(self.stream) - 1, 0)
        num_sequences, num_left_over = divmod(
            max(num_targets - self._overlap, 0), self._stride
        )
        has_partial = num_left_over > 0 or (
            num_sequences == 0 and num_targets > 0
        )
        if has_partial and not self.drop_remainder:
            num_sequences += 1
        if num_sequences == 0:
            raise EmptyCorpusError(
                f"{num_targets} tokens do not fill one sequence of {self.sequence_length}; "
                "add text or reduce sequence_length"
            )
        self._num_sequences = num_sequences
        self._num_examples = min(
            num_sequences, self.max_examples or num_sequences
        )
        multiple = self.pad_to_multiple_of
        self._num_padded = -(-self._num_examples // multiple) * multiple

    def __len__(self) -> int:
        return self._num_padded

    def __repr__(self) -> str:
        return f"PackedSequences({len(self)} of {self.sequence_length} tokens)"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch = self.take(np.array([index]))
        return {name: rows[0] for name, rows in batch.items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns several examples as one batch, with a first axis `batch`.

        Raises IndexError for an index out of range.
        """
        if np.any((indices < 0) | (indices >= len(self))):
            raise IndexError(f"examples {indices.tolist()} of {len(self)}")
        # Examples are evenly spaced over the sequences; those that pad lie beyond the stream.
        sequences = indices * self._num_sequences // self._num_examples
        starts = sequences * self._stride
        starts = np.where(
            indices < self._num_examples, starts, len(self.stream)
        )
        positions = starts[:, None] + np.arange(
            self.sequence_length + 1
        )  # (batch, length + 1)
        tokens = np.take(self.stream, positions, mode="clip").astype(np.int32)
        pad_id = np.int32(self.pad_id)
        # The stream's last token is only a target; as an input it would predict padding.
        is_input = positions[:, 1:] < len(self.stream)
        inputs = np.where(is_input, tokens[:, :-1], pad_id)
        live_targets = is_input.copy()
        live_targets[starts > 0, : self._overlap] = False
        targets = np.where(live_targets, tokens[:, 1:], pad_id)
        batch = {
            "input_ids": inputs,
            "target_labels": targets,
            "live_targets": live_targets,
        }
        if self.corrections is not None:
            first_target = starts + 1 + np.where(starts > 0, self._overlap, 0)
            end = positions[:, -1] + 1
            num_bytes = self._table_num_bytes(targets, live_targets)
            num_bytes += _corrections_between(
                self.corrections, first_target, end
            )
            batch["target_num_bytes"] = num_bytes.astype(np.int32)
        if self.segments:
            batch |= self._segment_features(inputs, is_input)
        return batch

    def _table_num_bytes(
        self, targets: np.ndarray, live_targets: np.ndarray
    ) -> np.ndarray:
        """Returns the bytes of each example's targets, without corrections."""
        is_text = live_targets & (targets != self.eos_id)
        if self.token_num_bytes is None:
            return np.sum(is_text, axis=1)
        return np.sum(
            np.where(is_text, self.token_num_bytes[targets], 0), axis=1
        )

    def _segment_features(
        self, inputs: np.ndarray, is_input: np.ndarray
    ) -> dict[str, np.ndarray]:
        is_start = inputs == self.eos_id
        is_start[:, 0] = True  # a sequence may begin inside a document
        segment_ids = np.cumsum(is_start, axis=1, dtype=np.int32)
        index = np.arange(self.sequence_length, dtype=np.int32)
        segment_start = np.maximum.accumulate(
            np.where(is_start, index, 0), axis=1
        )
        return {
            "input_segment_ids": np.where(is_input, segment_ids, 0),
            "input_positions": np.where(is_input, index - segment_start, 0),
        }


def _corrections_between(
    corrections: np.ndarray, first: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Returns the sum of the corrections at positions from `first` to before `end`."""
    positions, differences = corrections.T
    cumulative = np.concatenate([[0], np.cumsum(differences)])
    first_row, end_row = np.searchsorted(positions, [first, end])
    return cumulative[end_row] - cumulative[first_row]
