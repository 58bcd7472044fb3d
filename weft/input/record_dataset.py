"""Records of many files as a dataset of Grain, with the file and record in errors.

`RecordDataset` is a Grain `MapDataset`. Errors of functions that are mapped before shuffling,
mixing or batching name the record:

    ds = json_lines_dataset("data/*.jsonl").map(to_example)    # errors name file and line
    ds = ds.seed(0).shuffle().repeat(None)                     # from here on, only the batch
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain

from weft.errors import InputDatasetError, InputReadError, describe_error
from weft.input.records import Records, describe_record


class RecordDataset(grain.MapDataset):
    """Random-access records with functions, whose errors name the record."""

    def __init__(
        self, source: Records, functions: Sequence[Callable[[Any], Any]] = ()
    ):
        super().__init__()
        self._source = source
        self._functions = tuple(functions)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if not len(self):
            raise InputDatasetError(
                f"{self} has no records; pass nonempty files"
            )
        index = index % len(self)
        value = self._source[index]
        for function in self._functions:
            try:
                value = function(value)
            except Exception as error:
                reason = describe_error(error)
                if isinstance(
                    error, InputDatasetError
                ):  # which names its cause
                    reason = str(error)
                raise InputReadError(
                    f"{self.describe(index)}: {reason}"
                ) from error
        return value

    def map(self, transform):
        if isinstance(transform, grain.transforms.Map):
            transform = transform.map
        return RecordDataset(self._source, (*self._functions, transform))

    def with_source(
        self, change: Callable[[Records], Records]
    ) -> "RecordDataset":
        """Returns the dataset with the same functions and another source, made from its own."""
        return RecordDataset(change(self._source), self._functions)

    def __str__(self) -> str:
        return f"RecordDataset({self._source!r})"

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return describe_record(self._source, index)

    @property
    def fingerprint(self) -> tuple | None:
        """Identity of the data; None if unknown, also if functions are applied."""
        if self._functions:
            return None
        return getattr(self._source, "fingerprint", None)

    @property
    def num_bytes(self) -> int | None:
        """Approximate size of the records in bytes; None if unknown."""
        return getattr(self._source, "num_bytes", None)
