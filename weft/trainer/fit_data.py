"""Data that `fit` is given: arrays, a Grain dataset or batches, checked and made an input."""

import dataclasses
import math
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from typing import Any

import grain
import jax
import numpy as np

from weft.errors import FitError, InputDatasetError
from weft.input import (
    ArrayInput,
    Arrays,
    Batches,
    Input,
    IterableInput,
    in_memory,
)
from weft.input.grain import DispatchConfig, per_feed_batch, shard_dataset
from weft.trainer.supervised import ROW_WEIGHT
from weft.typing import PyTree

Data = Arrays | Mapping[str, Any] | Iterable[Any]
"""Arrays, a pair of them, a Grain dataset or batches."""
Fields = dict[str, PyTree]
"""Arrays by name: all of them, or those of a batch."""
Check = Callable[[str, Fields], None]
"""Function that raises an error for arrays that do not fit; the text names them."""

_BATCH_SIZE = 32
_FORMS = (
    "a pair of arrays (x, y), a dict of arrays, a Grain dataset, or an iterable of batches, each a "
    "pair or a dict"
)


@dataclasses.dataclass
class FitData:
    """Data that `fit` was given.

    Attributes:
        name: The argument of `fit`.
        values: The data, with fields by name.
        batch_size: Rows of a batch of arrays; None if the data has batches.
        num_batches: Number of batches of a pass; None if unknown.
        checks: What each batch has to pass; for arrays `check` checks all at once.
    """

    name: str
    values: Arrays | Batches
    batch_size: int | None
    num_batches: int | None
    checks: list[Check]

    @property
    def fields(self) -> Fields:
        """The arrays, or those of the first batch."""
        if isinstance(self.values, Arrays):
            return self.values.value
        return self.values.first

    def num_steps(self, epochs: int) -> int:
        """Returns the number of steps of so many passes; a batch may have rows of two of them."""
        if isinstance(self.values, Arrays):
            assert self.batch_size is not None
            return math.ceil(epochs * self.values.num_rows / self.batch_size)
        return epochs * (self.num_batches or 1)

    def check(self, fn: Check) -> None:
        """Checks the arrays, or the first batch now and the others when they are read."""
        self.checks.append(fn)
        fn(self.name, self.fields)

    def with_row_weights(
        self, weights_of_rows: Callable[[Fields], np.ndarray]
    ) -> "FitData":
        """Returns the same data with rows weighted by a function of the fields."""

        def weighted(fields: Fields) -> Fields:
            weights = weights_of_rows(fields)
            return {
                **fields,
                ROW_WEIGHT: weights * fields.get(ROW_WEIGHT, np.float32(1)),
            }

        if isinstance(self.values, Arrays):
            return dataclasses.replace(
                self, values=Arrays(weighted(self.values.value))
            )
        batches = self.values.value
        if isinstance(batches, grain.MapDataset | grain.IterDataset):
            mapped_batches = batches.map(weighted)
        elif self.values.is_iterator:
            mapped_batches = map(weighted, batches)
        else:
            mapped_batches = _MappedIterable(weighted, batches)
        return dataclasses.replace(self, values=Batches(mapped_batches))

    def input_config(
        self, *, seed: int = 0, counts_rows: bool = False
    ) -> Input.Config:
        """Returns the config of an input; `seed` is for the order of arrays in training.

        With `counts_rows`, rows that fill up the last batch of arrays have weight 0.
        """
        if isinstance(self.values, Batches):
            return IterableInput.default_config().set(batches=self.values)
        assert self.batch_size is not None, "arrays have one"
        arrays = self.values
        padding = None
        if counts_rows:
            ones = np.ones(arrays.num_rows, np.float32)
            arrays = Arrays({ROW_WEIGHT: ones, **arrays.value})
            padding = {ROW_WEIGHT: 0.0}
        return ArrayInput.default_config().set(
            arrays=arrays,
            global_batch_size=self.batch_size,
            seed=seed,
            padding=padding,
        )


def read_data(data: Data, name: str, batch_size: int | None) -> FitData:
    """Returns the data that `fit` was given as `name`; for errors see `fit`."""
    if isinstance(data, Arrays | Mapping) or type(data) is tuple:
        fit_data = _array_data(data, name, batch_size)
    elif isinstance(data, grain.MapDataset | grain.IterDataset):
        fit_data = _grain_data(data, name, batch_size)
    elif isinstance(data, Iterable) and not isinstance(data, str):
        fit_data = _iterable_data(data, name, batch_size)
    else:
        raise FitError(f"{name} is a {type(data).__name__}; expected {_FORMS}.")
    fit_data.check(_check_finite)
    return fit_data


def _array_data(
    data: Arrays | Mapping[str, PyTree] | tuple[PyTree, ...],
    name: str,
    batch_size: int | None,
) -> FitData:
    arrays = data
    if not isinstance(arrays, Arrays):
        arrays = Arrays(_fields(arrays, name))
    batch_size = batch_size or min(_BATCH_SIZE, arrays.num_rows)
    num_batches = math.ceil(arrays.num_rows / batch_size)
    return FitData(name, arrays, batch_size, num_batches, checks=[])


def _grain_data(
    dataset: grain.MapDataset | grain.IterDataset,
    name: str,
    batch_size: int | None,
) -> FitData:
    checks: list[Check] = []
    if batch_size is not None:  # the dataset has examples
        dispatch = DispatchConfig(jax.process_index(), jax.process_count())
        if jax.process_count() > 1:
            dataset = shard_dataset(dataset, dispatch)
        dataset = per_feed_batch(
            dataset, global_batch_size=batch_size, dispatch_config=dispatch
        )
    batches = Batches(
        dataset.map(lambda batch: _read_batch(batch, name, checks))
    )
    return FitData(name, batches, None, _length(dataset), checks)


def _iterable_data(
    data: Iterable[PyTree], name: str, batch_size: int | None
) -> FitData:
    if batch_size is not None:
        raise FitError(
            f"fit got batch_size={batch_size}, but {name} is a {type(data).__name__}, an "
            "iterable of batches, which have their sizes; leave batch_size out."
        )
    checks: list[Check] = []

    def read(batch: PyTree) -> Fields:
        return _read_batch(batch, name, checks)

    if isinstance(data, Iterator):
        batches = Batches(map(read, data))
    else:
        batches = Batches(_MappedIterable(read, data))
    return FitData(name, batches, None, _length(data), checks)


def _length(data: Iterable[PyTree]) -> int | None:
    if isinstance(data, Sized):
        return len(data)
    return None


class _MappedIterable:
    """The results of a function for the items of an iterable, each time that it is iterated.

    Attributes:
        in_memory: Whether the items are in memory, so that they are the same each time.
    """

    def __init__(self, fn: Callable[[PyTree], Fields], items: Iterable[PyTree]):
        self.in_memory: bool = getattr(
            items, "in_memory", isinstance(items, list | tuple)
        )
        self._fn = fn
        self._items = items

    def __iter__(self) -> Iterator[Fields]:
        return map(self._fn, self._items)


def _fields(data: PyTree, name: str) -> Fields:
    if isinstance(data, Mapping):
        return dict(data)
    if type(data) is tuple and len(data) == 2:
        return {"x": data[0], "y": data[1]}
    description = type(data).__name__
    if isinstance(data, tuple):
        description = f"tuple of {len(data)}"
    raise InputDatasetError(
        f"{name} is a {description}; expected a pair (x, y) or a dict of arrays. All arrays "
        "together are a tuple, (x, y), not a list, which has batches."
    )


def _read_batch(batch: PyTree, name: str, checks: Sequence[Check]) -> Fields:
    fields = in_memory.checked_arrays(_fields(batch, f"a batch of {name}"))
    for check in checks:
        check(f"a batch of {name}", fields)
    return jax.tree.map(
        lambda x: x.astype(in_memory.batch_dtype(x), copy=False), fields
    )


def _check_finite(name: str, fields: Fields) -> None:
    """Raises an InputDatasetError for NaN in rows that count, and for weights of another form."""
    counts = np.asarray(fields.get(ROW_WEIGHT, True)) != 0
    for field, x in in_memory.named_leaves(fields).items():
        if np.issubdtype(x.dtype, np.inexact) and not np.isfinite(x).all():
            axes_of_row = tuple(range(1, x.ndim))
            is_bad = ~np.isfinite(x).all(axis=axes_of_row)  # of each row
            if field != ROW_WEIGHT and counts.shape in ((), is_bad.shape):
                is_bad &= counts
            if is_bad.any():
                raise InputDatasetError(
                    f"{name}: {field!r} has NaN or infinite numbers, the first in row "
                    f"{int(np.argmax(is_bad))}; drop or replace these rows."
                )
        if field == ROW_WEIGHT and (
            np.ndim(x) != 1 or np.min(x, initial=0) < 0
        ):
            raise InputDatasetError(
                f"{name}: {field!r} has shape {np.shape(x)} and numbers from {np.min(x)}; expected "
                "the weight of each row, 0 or more. Or rename the field."
            )
