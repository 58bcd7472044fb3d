"""Batches of packed sequences, from one stream or a mixture, as a function of the batch's index.

Order, mixture and sharding are computed with indices. Global batch k therefore has the same rows
for any number of processes, which each read consecutive rows of it, and the iterator's state is
`{"next_index": k}`. A run may resume with another number of processes or workers. Indices also cost
a tenth of shuffling, mixing and batching examples.
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
    """Returns a source of batches for `weft.input.grain.Input`.

    Args:
        is_training: Whether sequences are endless, with each source reshuffled in each pass; or in
            order, once. Then their number must be a multiple of the batch.
        weights: Relative number of sequences of each source, in training. Defaults to their sizes.
        num_workers: Processes that create batches. Usually 0: a batch of 32 sequences takes less
            than a millisecond.

    Raises:
        EmptyCorpusError: If there is no batch.
        InputDatasetError: If the weights do not fit the sources.
    """
    sizes = [len(source) for source in sources]
    if sum(sizes) < global_batch_size:
        raise EmptyCorpusError(
            f"{name} has {sum(sizes)} sequences of {sources[0].sequence_length} tokens, fewer "
            f"than one batch of {global_batch_size}; add text, or reduce sequence_length or "
            "global_batch_size"
        )
    if weights is not None and len(weights) != len(sources):
        raise InputDatasetError(
            f"{len(sources)} sources cannot be mixed with weights={list(weights)}; pass one "
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
        # No threads, because the trainer reads ahead in its own.
        return maybe_to_iter_dataset(ds, read_options=grain.ReadOptions(0, 0))

    return build_dataset


class _Sources:
    """Sequences of several sources under one index, where those of one source are adjacent."""

    def __init__(self, sources: Sequence[PackedSequences]):
        self._sources = list(sources)
        self._starts = np.concatenate([[0], np.cumsum([len(source) for source in sources])])

    def order(self, weights: Sequence[float] | None, seed: int | None) -> grain.MapDataset:
        """Returns the indices in reading order; without a seed, sequentially and once."""
        starts = self._starts.tolist()
        if seed is None:
            return grain.MapDataset.range(starts[-1])
        if weights is None:
            return grain.MapDataset.range(starts[-1]).seed(seed).shuffle().repeat(None)
        parts: list[Any] = [
            # One seed for each, or sources of equal size would be shuffled in the same order.
            grain.MapDataset.range(start, end).seed(seed + i).shuffle()
            for i, (start, end) in enumerate(itertools.pairwise(starts))
        ]
        return sample_from_datasets(  # pyright: ignore[reportReturnType]
            sources=parts, weights=weights
        )

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples of some indices as one batch."""
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
