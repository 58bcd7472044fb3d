"""Datasets behind the functions of `weft.input.grain`.

Random-access ones are as in Grain: an index beyond the length refers to the next epoch, with
another shuffle. States of the iterators of iterable ones are JSON values of constant size for the
returned elements, excluding those read ahead.
"""

import weakref
from collections.abc import Callable
from typing import Any

import grain
import jax
from absl import flags

from weft.errors import InputDatasetError
from weft.serialization.untrusted import check_json


class _MapDataset(grain.MapDataset):
    """Base of random-access datasets with another length than their parent."""

    def __init__(self, parent: grain.MapDataset, length: int):
        super().__init__(parent)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, index = divmod(index, self._length)
        return self._element(index, epoch * len(self._parent))

    def _element(self, index: int, offset: int) -> Any:
        """Returns an element of the epoch that begins at `offset` in the parent."""
        raise NotImplementedError(type(self))


class ProportionMapDataset(_MapDataset):
    """Elements whose index, modulo a period, is in a range."""

    def __init__(
        self, parent: grain.MapDataset, *, start: int, end: int, period: int
    ):
        self._start = start
        self._period = period
        self._num_in_range = end - start
        num_periods, num_left_over = divmod(len(parent), period)
        num_in_last = min(max(num_left_over - start, 0), self._num_in_range)
        super().__init__(parent, num_periods * self._num_in_range + num_in_last)

    def _element(self, index: int, offset: int) -> Any:
        period_index, position = divmod(index, self._num_in_range)
        return self._parent[
            offset + period_index * self._period + self._start + position
        ]

    def __str__(self) -> str:
        end = self._start + self._num_in_range
        return f"ProportionMapDataset[{self._start}:{end} of {self._period}]"


class PadMapDataset(_MapDataset):
    """Dataset padded to a length."""

    def __init__(
        self, parent: grain.MapDataset, *, length: int, pad_example_fn: Callable
    ):
        super().__init__(parent, length)
        self._pad_example_fn = pad_example_fn

    def _element(self, index: int, offset: int) -> Any:
        if index < len(self._parent):
            return self._parent[offset + index]
        return self._pad_example_fn(self._parent[0])

    def __str__(self) -> str:
        return f"PadMapDataset({self._length})"


class IterDataset(grain.IterDataset):
    """Iterable dataset of a class of iterators, which takes the parent and settings."""

    def __init__(
        self,
        iterator_class: Callable[..., grain.DatasetIterator],
        parent: grain.MapDataset | grain.IterDataset,
        **settings: Any,
    ):
        super().__init__(parent)
        self._iterator_class, self._settings = iterator_class, settings

    def __iter__(self) -> grain.DatasetIterator:
        return self._iterator_class(self._parent, **self._settings)

    def __str__(self) -> str:
        return f"IterDataset({self._iterator_class}, {self._settings})"


class PadIterator(grain.DatasetIterator):
    """Iterator padded to a multiple."""

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        multiple: int,
        pad_example_fn: Callable[[Any], Any],
        max_num_examples: int,
    ):
        super().__init__(iter(parent))
        self._multiple, self._pad_example_fn = multiple, pad_example_fn
        self._max_num_examples = max_num_examples
        self._first_state = self._parent.get_state()
        self._count = 0

    def __next__(self) -> Any:
        try:
            example = next(self._parent)
        except StopIteration:
            if self._count % self._multiple == 0:
                raise
            example = self._padding()
        else:
            check_num_examples(self._count + 1, self._max_num_examples)
        self._count += 1
        return example

    def _padding(self) -> Any:
        # Created from any example, also if the iterator was restored after the last one.
        state = self._parent.get_state()
        self._parent.set_state(self._first_state)
        example = self._pad_example_fn(next(self._parent))
        self._parent.set_state(state)
        return example

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        check_json(state, {"count": int})
        self._parent.set_state(state["parent"])
        self._count = state["count"]


def check_num_examples(number: int, limit: int) -> None:
    """Raises InputDatasetError if an evaluation dataset has more examples than expected."""
    if number > limit:
        raise InputDatasetError(
            f"the dataset has {number} examples or more, over max_num_examples={limit}; an "
            "evaluation dataset must end: do not repeat it, or raise max_num_examples"
        )


class UnbatchIterator(grain.DatasetIterator):
    """Iterator over the rows of batches."""

    def __init__(self, parent: grain.IterDataset, *, skip_empty_batch: bool):
        super().__init__(iter(parent))
        self._skip_empty_batch = skip_empty_batch
        # The current batch can be read again from the parent's state before it.
        self._before = self._parent.get_state()
        self._batch: Any = None
        self._num_rows = self._row = 0

    def __next__(self) -> Any:
        while self._row >= self._num_rows:
            self._before, self._row, self._num_rows = (
                self._parent.get_state(),
                0,
                0,
            )
            self._read()
        row = self._row
        self._row += 1
        return jax.tree.map(lambda leaf: leaf[row], self._batch)

    def _read(self) -> None:
        self._batch = next(self._parent)
        sizes = {
            jax.tree_util.keystr(path, simple=True, separator="/"): len(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self._batch)
        }
        if len(set(sizes.values())) != 1:
            raise InputDatasetError(
                f"a batch after state {self._before} cannot be unbatched: its leaves have "
                f"{sizes} rows; all must have equally many"
            )
        self._num_rows = next(iter(sizes.values()))
        if self._num_rows == 0 and not self._skip_empty_batch:
            raise InputDatasetError(
                f"the batch after state {self._before} has no rows; drop such batches, or pass "
                "skip_empty_batch=True"
            )

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._before, "row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        check_json(state, {"row": int})
        self._parent.set_state(state["parent"])
        self._before, self._row, self._num_rows = (
            state["parent"],
            state["row"],
            0,
        )
        if self._row:
            self._read()


class WorkerIterator(grain.DatasetIterator):
    """Iterator over a random-access dataset that worker processes read.

    Unlike in Grain's own multi-process dataset, the state is the number of returned elements, so a
    run may resume with another number of workers.
    """

    def __init__(
        self, ds: grain.MapDataset, *, options: grain.MultiprocessingOptions
    ):
        super().__init__()
        self._ds, self._options = ds, options
        self._next_index = 0
        self._workers: list[grain.DatasetIterator] = []  # one, if started
        # At interpreter exit, Grain's own cleanup would find its modules unloaded.
        weakref.finalize(self, self._close_all, self._workers)
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise InputDatasetError(
                "the iterator is closed; create a new one: iter(dataset)"
            )
        if self._next_index >= len(self._ds):
            raise StopIteration
        if not self._workers:
            mark_flags_as_parsed()
            unread = self._ds.slice(slice(self._next_index, None))
            read_options = grain.ReadOptions(
                num_threads=1, prefetch_buffer_size=1
            )
            unread = unread.to_iter_dataset(read_options)
            self._workers.append(iter(unread.mp_prefetch(self._options)))
        element = next(self._workers[0])
        self._next_index += 1
        return element

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, int]) -> None:
        check_json(state, {"next_index": int})
        self._stop()
        self._next_index = state["next_index"]

    def close(self) -> None:
        self._ended = True
        self._stop()
        super().close()

    def _stop(self) -> None:
        self._close_all(getattr(self, "_workers", []))

    @staticmethod  # since functions of modules are gone at interpreter exit
    def _close_all(iterators: list[grain.DatasetIterator]) -> None:
        while iterators:
            iterators.pop().close()


def mark_flags_as_parsed() -> None:
    """Allows Grain to start workers in a program that does not parse its flags with absl."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
