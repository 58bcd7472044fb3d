"""Held-out parts of data.

    train, held_out = split(json_lines_dataset("*.jsonl"), held_out=0.1)
    train = train.seed(0).shuffle().repeat(None)

A slice after `shuffle` is not a held-out part: each pass has another order, and other records in
the slice. Here the data is split before, by indices that depend on its length and a seed alone.
The parts stay the same through passes, processes and restarts, as long as the data does.

A `weft.input.Corpus` splits itself, by the names of its files.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import grain
import jax
import numpy as np

from weft.config import ConfigOr, maybe_instantiate
from weft.errors import InputDatasetError
from weft.input.corpus import Corpus, Split
from weft.input.in_memory import Arrays
from weft.input.record_dataset import RecordDataset
from weft.input.records import Records, describe_record

T = TypeVar("T")
_ENDLESS = 2**48
# To choose from more records would take gigabytes of memory for their numbers.
_MOST_CHOSEN = 2**24


def split(data: T, *, held_out: float = 0.1, seed: int = 0) -> tuple[T, T]:
    """Returns two parts of some data that have no record in common.

    Records keep their order. A part of a dataset may be shuffled and repeated.

    Args:
        data: A `grain.MapDataset`, such as those of `weft.input.datasets`; a list of records;
            `Arrays`; or an array, or nested tuples or dicts of arrays, with one row per example.
        held_out: Fraction of the records in the second part, which has at least one, as has the
            first.

    Raises InputDatasetError if the data is repeated, endless or without random access, if it has
    fewer than two records, or if the fraction is not between 0 and 1.

    >>> train, held_out = split([*"abcdefghij"], held_out=0.2)
    >>> len(train), len(held_out), set(train) & set(held_out)
    (8, 2, set())
    """
    return (
        split_part(data, "train", held_out=held_out, seed=seed),
        split_part(data, "held_out", held_out=held_out, seed=seed),
    )


def split_part(
    data: ConfigOr[Any], part: Split, *, held_out: float = 0.1, seed: int = 0
) -> Any:
    """Returns one part of `split`, in a config of an input.

    Args:
        data: As for `split`, or its config.
        part: "train" or "held_out".

    >>> split_part(np.arange(4), "held_out", held_out=0.5).shape
    (2,)
    """
    if part not in ("train", "held_out"):
        raise InputDatasetError(
            f"part={part!r}; expected 'train' or 'held_out'."
        )
    loaded = maybe_instantiate(data)
    if isinstance(loaded, grain.MapDataset):
        _check_once(loaded)
        is_large = len(loaded) > _MOST_CHOSEN
        kind_of_part = _SpacedPart if is_large else _ChosenPart
        records_of_part = kind_of_part(len(loaded), part, held_out, seed)
        if isinstance(loaded, RecordDataset):
            return loaded.with_source(
                lambda source: _PartOfRecords(source, records_of_part)
            )
        return _PartOfDataset(loaded, records_of_part)
    if isinstance(loaded, list):
        indices = _ChosenPart(len(loaded), part, held_out, seed).indices()
        return [loaded[i] for i in indices]
    if isinstance(loaded, Arrays):
        rows_of_part = _ChosenPart(loaded.num_rows, part, held_out, seed)
        return Arrays(_rows(loaded.value, rows_of_part))
    if isinstance(loaded, np.ndarray | jax.Array | tuple | Mapping):
        rows_of_part = _ChosenPart(_num_rows(loaded), part, held_out, seed)
        return _rows(loaded, rows_of_part)
    if isinstance(loaded, Corpus):
        raise InputDatasetError(
            f"{loaded} splits itself, by the names of its files; use its method `split`, and set "
            "its held_out_fraction"
        )
    raise InputDatasetError(
        f"data of type {type(loaded).__name__} has no random access, so its records are not known "
        "before they are read; pass a grain.MapDataset, arrays or a list, or hold out some files"
    )


class _Part:
    """Base of the parts: how many records they have, and which those are."""

    def __init__(
        self, num_records: int, part: Split, held_out: float, seed: int
    ):
        if not 0 < held_out < 1:
            raise InputDatasetError(
                f"held_out={held_out} cannot be a fraction of the records; expected more than 0 "
                "and less than 1, such as 0.1"
            )
        if num_records < 2:
            raise InputDatasetError(
                f"{num_records} records cannot be split into two parts; expected at least 2"
            )
        size = min(max(1, round(num_records * held_out)), num_records - 1)
        self._num_all, self._num_held_out = num_records, size
        self._is_held_out = part == "held_out"
        self._seed = seed
        self.num_records = size if self._is_held_out else num_records - size
        self.identity: tuple = (part, held_out, seed)

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError(type(self))


class _ChosenPart(_Part):
    """Indices of the records of a part, as arithmetic on the sorted held-out ones."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        held_out_records = np.random.default_rng(self._seed).choice(
            self._num_all, self._num_held_out, replace=False
        )
        self._held_out = np.sort(held_out_records)
        # How many of the training part come before each.
        self._num_train_before = self._held_out - np.arange(self._num_held_out)

    def __getitem__(self, index: int) -> int:
        if self._is_held_out:
            return int(self._held_out[index])
        return index + int(
            np.searchsorted(self._num_train_before, index, side="right")
        )

    def indices(self) -> np.ndarray:
        if self._is_held_out:
            return self._held_out
        index = np.arange(self.num_records)
        return index + np.searchsorted(
            self._num_train_before, index, side="right"
        )


class _SpacedPart(_Part):
    """Part of a large dataset, which needs no memory: one record of each block is held out.

    The records are divided into as many blocks as are held out, of sizes that differ by one.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.identity += ("spaced",)  # other records than `_ChosenPart`

    def __getitem__(self, index: int) -> int:
        if self._is_held_out:
            return self._held_out_of(index)
        # The last block before which there are at most `index` records of the training part.
        num_train = self._num_all - self._num_held_out
        block = ((index + 1) * self._num_held_out - 1) // num_train
        is_after = self._held_out_of(block) <= index + block
        return index + block + is_after

    def _held_out_of(self, block: int) -> int:
        start = block * self._num_all // self._num_held_out
        end = (block + 1) * self._num_all // self._num_held_out
        key = f"{self._seed} {block}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return start + int.from_bytes(digest, "big") % (end - start)


class _PartOfRecords:
    """Records of a part, with their names in the whole."""

    def __init__(self, records: Records, part: _Part):
        self._records = records
        self._part = part

    def __len__(self) -> int:
        return self._part.num_records

    def __getitem__(self, index: int) -> Any:
        return self._records[self._part[index]]

    def __repr__(self) -> str:
        return f"{self._part.identity[0]} part of {self._records!r}"

    def describe(self, index: int) -> str:
        return describe_record(self._records, self._part[index])

    @property
    def fingerprint(self) -> tuple | None:
        fingerprint = getattr(self._records, "fingerprint", None)
        if fingerprint is None:
            return None
        return (fingerprint, self._part.identity)

    @property
    def num_bytes(self) -> int | None:
        num_bytes = getattr(self._records, "num_bytes", None)
        if num_bytes is None:
            return None
        return math.ceil(num_bytes * len(self) / len(self._records))


class _PartOfDataset(grain.MapDataset):
    """Elements of a part; the same ones in each pass, also if their parent is shuffled."""

    def __init__(self, parent: grain.MapDataset, part: _Part):
        super().__init__(parent)
        self._part = part

    def __len__(self) -> int:
        return self._part.num_records

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[self._part[index % len(self)]]

    def __str__(self) -> str:
        return f"{self._part.identity[0]} part"


def _check_once(dataset: grain.MapDataset) -> None:
    """Raises InputDatasetError if a record may occur twice."""
    advice = "call split before `repeat` and mixing, and repeat its first part"
    visited_ids: set[int] = set()
    for ancestor in _ancestors(dataset):
        if type(ancestor).__name__.startswith("Repeat"):
            raise InputDatasetError(
                f"{dataset} is repeated, so both parts would have the same records; {advice}"
            )
        if id(ancestor) in visited_ids:
            raise InputDatasetError(
                f"{dataset} has the records of {ancestor} twice, so both parts could have the same "
                f"record; {advice}"
            )
        visited_ids.add(id(ancestor))
    if len(dataset) >= _ENDLESS:
        raise InputDatasetError(
            f"{dataset} has no end, so it cannot be split; {advice}"
        )


def _ancestors(dataset: Any) -> Iterator[Any]:
    yield dataset
    for parent in dataset.parents:
        yield from _ancestors(parent)


def _num_rows(arrays: Any) -> int:
    shapes = [np.shape(x) for x in jax.tree.leaves(arrays)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise InputDatasetError(
            f"arrays of the shapes {shapes} cannot be split; expected at least one array, and the "
            "same number of rows, the first axis, in all of them"
        )
    return sizes.pop()[0]


def _rows(arrays: Any, part: _ChosenPart) -> Any:
    indices = part.indices()
    return jax.tree.map(lambda x: x[indices], arrays)
