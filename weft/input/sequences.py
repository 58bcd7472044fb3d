"""Batches of packed sequences, from one stream or a mixture, as a function of the batch's index.

Everything is decided with indices: the order within each source, which source comes next, and which
rows are whose. So global batch k is the same rows in the same order for any number of processes,
each of which reads consecutive rows of it, and the iterator's state is `{"next_index": k}` in all
of them. A run may go on with another number of processes, or of worker processes, and sees the same
data. Indices also cost a tenth of what shuffling, mixing and batching of examples would.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from weft.errors import EmptyCorpusError, InputDatasetError
from weft.input.grain import (
    BuildDatasetFn,
    DispatchConfig,
    feed_batch_size,
    maybe_to_iter_dataset,
    prefetch_dataset,
    sample_from_datasets,
    shard_dataset_with_proportion,
)
from weft.input.packing import PackedSequences


def sequence_batches(
    sources: Sequence[PackedSequences],
    *,
    global_batch_size: int,
    is_training: bool,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    num_workers: int = 0,
    name: str = "the text",
) -> BuildDatasetFn:
    """A source of batches for `weft.input.grain.Input`.

    Args:
        sources: Where the sequences come from; all have the same length of sequence.
        global_batch_size: Sequences per step over all processes.
        is_training: Whether sequences come without end, each source in a new order in each pass; or
            all of them once, in order. Then their number must be a multiple of the batch.
        weights: How many sequences of each source come relative to the others, in training. None:
            as many as there are.
        seed: Decides the order in training.
        num_workers: Processes that make batches. None are needed, where a batch of 32 sequences
            takes less than a millisecond.
        name: What to call the data in errors.

    Raises:
        EmptyCorpusError: If there is not one batch.
        InputDatasetError: If the weights do not fit the sources.
    """
    sizes = [len(source) for source in sources]
    if sum(sizes) < global_batch_size:
        raise EmptyCorpusError(
            f"{name} gives {sum(sizes)} sequences of {sources[0].sequence_length} tokens, fewer "
            f"than one batch of {global_batch_size}; give more text, or a smaller sequence_length "
            "or global_batch_size"
        )
    if weights is not None and len(weights) != len(sources):
        raise InputDatasetError(
            f"{len(sources)} sources cannot be mixed with weights={list(weights)}; give one "
            "positive weight for each"
        )
    all_sources = _Sources(sources)

    def build_dataset(dispatch_config: DispatchConfig) -> grain.IterDataset:
        rows = feed_batch_size(global_batch_size, dispatch_config)
        start = rows * dispatch_config.flat_index()
        ds = shard_dataset_with_proportion(
            all_sources.order(weights, seed if is_training else None),
            range_start=start,
            range_end=start + rows,
            period=global_batch_size,
        )
        ds = ds.batch(rows, drop_remainder=True).map(all_sources.take)
        if num_workers:
            options = grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=2
            )
            return prefetch_dataset(ds, multiprocessing_options=options)
        # No threads: the trainer reads ahead in one of its own.
        return maybe_to_iter_dataset(ds, read_options=grain.ReadOptions(0, 0))

    return build_dataset


class _Sources:
    """The sequences of several sources under one index, those of one source being neighbours."""

    def __init__(self, sources: Sequence[PackedSequences]):
        self._sources = list(sources)
        self._starts = np.concatenate([[0], np.cumsum([len(source) for source in sources])])

    def order(self, weights: Sequence[float] | None, seed: int | None) -> grain.MapDataset:
        """The indices in the order in which they come; without a seed, once from the first on."""
        starts = self._starts.tolist()
        if seed is None:
            return grain.MapDataset.range(starts[-1])
        if weights is None:
            return grain.MapDataset.range(starts[-1]).seed(seed).shuffle().repeat(None)
        parts: list[Any] = [
            # A seed for each, or sources of equal size would be shuffled alike.
            grain.MapDataset.range(start, end).seed(seed + i).shuffle()
            for i, (start, end) in enumerate(itertools.pairwise(starts))
        ]
        return sample_from_datasets(  # pyright: ignore[reportReturnType]
            sources=parts, weights=weights
        )

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples of some indices as one batch."""
        if len(self._sources) == 1:
            return self._sources[0].take(indices)
        which = np.searchsorted(self._starts, indices, side="right") - 1
        batch: dict[str, np.ndarray] = {}
        for i in np.unique(which):
            rows = np.flatnonzero(which == i)
            examples = self._sources[i].take(indices[rows] - self._starts[i])
            for key, values in examples.items():
                if key not in batch:
                    batch[key] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                batch[key][rows] = values
        return batch
