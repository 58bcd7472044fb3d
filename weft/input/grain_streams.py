"""Packing of documents during reading, where each process reads only those of its own rows.

The rows of a global batch are divided into groups, equally many in each, which pack documents of
their own. Of each round of as many documents as there are groups, a group gets one:

    documents      0  1  2  3  4  5  6  7  8  9 10 11    in the order of training
    of group       2  3  0  1  0  1  2  3  3  0  1  2    rotated at random in each round

Without the rotation, a group would read the documents of one dataset only if the period of a
mixture divides the number of groups. That number depends on the batch alone, not on the processes:
those that hold a group after a restart continue where it was. The position of an iterator is that
of its own groups, and those of all processes are the position of the run.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grain
import numpy as np

from weft.errors import InputDatasetError
from weft.input import grain_lm
from weft.input.prefetch import PARTS
from weft.serialization.untrusted import check_json

# Whole documents of log-normal lengths leave 3 % of such a group empty, and 18 % of a single row.
MOST_ROWS_TO_FIT = 16
_NUM_GROUPS = "groups"
_POSITIONS = "positions"


def rows_per_group(global_batch_size: int, *, split_documents: bool) -> int:
    """Returns the number of rows that share documents: as few as leave little room empty."""
    if split_documents:
        return 1
    fitting = range(1, min(MOST_ROWS_TO_FIT, global_batch_size) + 1)
    return max(n for n in fitting if global_batch_size % n == 0)


class RowGroup:
    """Rows of each global batch that are packed from documents of their own.

    Args:
        documents: Endless documents as `grain_lm.next_token_pairs`, in the order of training.
        index: The group, of `num_groups`.
        num_rows: One, to be filled with parts of documents; or several, which hold whole ones.

    Attributes:
        position: The round of the next document, and how many of its pairs earlier rows have.
    """

    def __init__(
        self,
        documents: grain.MapDataset,
        *,
        index: int,
        num_groups: int,
        num_rows: int,
        length: int,
        split_documents: bool,
        seed: int,
    ):
        self._documents, self._seed = documents, seed
        self._index, self._num_groups = index, num_groups
        self._num_rows, self._length = num_rows, length
        self._fill = self._cut if split_documents else self._fit
        self.position = (0, 0)
        # A document that continues in the next batch is not tokenized again.
        self._last_read = (-1, np.zeros(0))

    def next_rows(self) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
        """Returns the next rows, and the position after them, which is not set yet."""
        pieces_of_rows, position = self._fill(*self.position)
        shape = (self._num_rows, self._length)
        pairs = np.zeros((*shape, grain_lm.NUM_COLUMNS), np.int32)
        segment_ids = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        for row, pieces in enumerate(pieces_of_rows):
            start = 0
            for number, piece in enumerate(filter(len, pieces), start=1):
                here = slice(start, start + len(piece))
                pairs[row, here] = piece
                segment_ids[row, here] = number
                positions[row, here] = np.arange(len(piece))
                start = here.stop
        return grain_lm.packed(pairs, segment_ids, positions), position

    def _cut(
        self, round_: int, offset: int
    ) -> tuple[list[list[np.ndarray]], tuple[int, int]]:
        """Fills one row, whose last document may continue in the next one."""
        pieces = []
        room = self._length
        while room:
            document = self._read(round_)
            piece = document[offset : offset + room]
            pieces.append(piece)
            room -= len(piece)
            offset += len(piece)
            # It is shorter than its position if the tokenizer has changed.
            if offset >= len(document):
                round_, offset = round_ + 1, 0
        return [pieces], (round_, offset)

    def _fit(
        self, round_: int, offset: int
    ) -> tuple[list[list[np.ndarray]], tuple[int, int]]:
        """Puts documents whole into the first row with room, until there is none for the next."""
        rows: list[list[np.ndarray]] = [[] for _ in range(self._num_rows)]
        rooms = np.full(self._num_rows, self._length)
        while True:
            document = self._read(round_)
            (fitting,) = np.nonzero(rooms >= len(document))
            if not len(fitting):
                return rows, (round_, offset)
            rows[fitting[0]].append(document)
            rooms[fitting[0]] -= len(document)
            round_ += 1

    def _read(self, round_: int) -> np.ndarray:
        """Returns the group's document of a round, which is empty if it was filtered out."""
        last_round, pairs = self._last_read
        if round_ != last_round:
            key = f"{self._seed} {round_}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            rotated = self._index + int.from_bytes(digest, "big")
            place = rotated % self._num_groups
            document = self._documents[round_ * self._num_groups + place]
            pairs = grain_lm.pairs_of(document)
            self._last_read = (round_, pairs)
        return pairs


class RowGroupsIterator(grain.DatasetIterator):
    """Iterator over the rows of some groups, which several threads pack."""

    def __init__(
        self,
        documents: grain.MapDataset,
        *,
        groups: range,
        num_groups: int,
        num_threads: int,
        **settings: Any,
    ):
        super().__init__()
        self._groups = {}
        for index in groups:
            self._groups[index] = RowGroup(
                documents, index=index, num_groups=num_groups, **settings
            )
        self._num_groups = num_groups
        self._threads = ThreadPoolExecutor(max(num_threads, 1), "weft-packing")

    def __next__(self) -> dict[str, np.ndarray]:
        groups = self._groups.values()
        # No group moves on if one fails: a run that is stopped by it resumes before the batch.
        filled = list(self._threads.map(RowGroup.next_rows, groups))
        parts = []
        for group, (rows, position) in zip(groups, filled, strict=True):
            group.position = position
            parts.append(rows)
        return {
            name: np.concatenate([rows[name] for rows in parts])
            for name in parts[0]
        }

    def get_state(self) -> dict[str, Any]:
        positions = {}
        for index, group in self._groups.items():
            positions[str(index)] = list(group.position)
        return {_NUM_GROUPS: self._num_groups, _POSITIONS: {PARTS: positions}}

    def set_state(self, state: dict[str, Any]) -> None:
        check_json(state, {_NUM_GROUPS: int, _POSITIONS: {PARTS: dict}})
        num_groups = state[_NUM_GROUPS]
        if num_groups != self._num_groups:
            raise InputDatasetError(
                f"the position is that of {num_groups} groups of rows, and a batch has "
                f"{self._num_groups}; set global_batch_size and split_documents as in the run "
                "that saved it, or begin another run"
            )
        positions = state[_POSITIONS][PARTS]
        missing = [i for i in self._groups if str(i) not in positions]
        if missing:
            raise InputDatasetError(
                f"the position lacks the groups of rows {missing}, it has {sorted(positions)}; "
                "restore the states of all processes that saved it"
            )
        for index, group in self._groups.items():
            position = positions[str(index)]
            check_json(position, [int])
            round_, offset = position
            group.position = (round_, offset)

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class UpgradableIterator(grain.DatasetIterator):
    """Iterator that continues the positions of an earlier order in that order.

    Args:
        is_earlier: Whether a state is one of `earlier`.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        earlier: grain.IterDataset,
        is_earlier: Callable[[dict[str, Any]], bool],
    ):
        super().__init__()
        self._dataset, self._earlier = parent, earlier
        self._is_earlier = is_earlier
        self._current = iter(parent)

    def __next__(self) -> Any:
        return next(self._current)

    def get_state(self) -> dict[str, Any]:
        return self._current.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._current.close()
        dataset = self._earlier if self._is_earlier(state) else self._dataset
        self._current = iter(dataset)
        self._current.set_state(state)

    def close(self) -> None:
        self._current.close()
        super().close()


def is_of_all_rows(state: dict[str, Any]) -> bool:
    """Returns whether a state is one of earlier versions, where a process packed all rows."""
    return not isinstance(state, dict) or _NUM_GROUPS not in state
