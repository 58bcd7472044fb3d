"""Packing during training, for text too large or too changing to be tokenized in advance.

`lm_stream_source` returns the same features as `weft.input.text.lm_documents_source`, with Grain's
packing. They differ in:

                        lm_documents_source         lm_stream_source
    row k is            arithmetic on k             the result of all documents before it
    state               one number                  a place among the documents, and how many rows
                                                    were made since: some numbers, of fixed count
    before step 1       every document is read      nothing is read
    each process        reads its own rows          reads all documents, and keeps its own rows

Since every process reads all documents, their states are equal, and a run may resume with another
number of processes.
"""

import sys
from collections.abc import Mapping
from typing import Any

import grain
import grain.experimental
import numpy as np

from weft.config import ConfigOr, maybe_instantiate
from weft.errors import EmptyCorpusError, InputDatasetError
from weft.input.grain import (
    BuildDatasetFn,
    Dataset,
    DispatchConfig,
    feed_batch_size,
    maybe_to_iter_dataset,
    pad_for_evaluation,
    sample_from_datasets,
)
from weft.input.text import BYTES, named_documents
from weft.input.token_files import document_text
from weft.input.tokenizer import Tokenizer

# Packed as one feature, at half the cost of two.
_PAIRS = "pairs"


def lm_stream_source(
    *,
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]],
    weights: Mapping[str, float] | None = None,
    text_key: str = "text",
    tokenizer: ConfigOr[Tokenizer] = BYTES,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    split_documents: bool = True,
    num_threads: int = 2,
) -> BuildDatasetFn:
    """Returns a source of batches that are packed during reading.

    Args:
        documents: A `grain.MapDataset` of dicts, such as those of `weft.input.files`; or several by
            name.
        weights: Relative number of documents from each of several, in training. Defaults to their
            sizes.
        is_training: Whether documents are endless, reshuffled in each pass; or in order, once, with
            padding in the last batch.
        split_documents: Whether a document may continue in the next example. If not, it is placed
            whole into the first example of the batch with enough room, with padding.

    Raises:
        EmptyCorpusError: If there are no documents.
        InputDatasetError: If the weights do not name the documents.
        InputReadError: During iteration, if a document cannot be read, has no text, or is too long;
            names the document.
    """
    named = named_documents(documents, weights)
    loaded: Tokenizer = maybe_instantiate(tokenizer)
    datasets = {name: maybe_instantiate(one) for name, one in named.items()}
    for name, one in datasets.items():
        if not len(one):
            raise EmptyCorpusError(f"{name} has no documents; pass files that contain records")
    limit = None if split_documents else sequence_length

    def build_dataset(dispatch_config: DispatchConfig) -> grain.IterDataset:
        # Mapped first, while errors can name the document.
        tokens = {
            name: one.map(_Tokenize(loaded, text_key, limit)) for name, one in datasets.items()
        }
        packed = _packed(
            maybe_to_iter_dataset(
                _in_order(tokens, weights, seed if is_training else None),
                read_options=grain.ReadOptions(num_threads, 8 * num_threads),
            ),
            sequence_length,
            num_bins=None if split_documents else global_batch_size,
        )
        if not is_training:
            packed = pad_for_evaluation(
                packed, per_feed_batch_size=global_batch_size, max_num_examples=sys.maxsize
            )
        rows = feed_batch_size(global_batch_size, dispatch_config)
        start = rows * dispatch_config.flat_index()
        batches = maybe_to_iter_dataset(packed.batch(global_batch_size, drop_remainder=True))
        return batches.map(_Features(loaded, slice(start, start + rows)))

    return build_dataset


def _in_order(
    named: Mapping[str, grain.MapDataset], weights: Mapping[str, float] | None, seed: int | None
) -> Dataset:
    """Shuffles, repeats and mixes; without a seed, concatenates."""
    if seed is None:
        return grain.MapDataset.concatenate(list(named.values()))
    # One seed for each, or sources of equal size would be shuffled in the same order.
    shuffled = [one.seed(seed + i).shuffle() for i, one in enumerate(named.values())]
    weights = weights or {name: float(len(one)) for name, one in named.items()}
    return sample_from_datasets(sources=shuffled, weights=[weights[name] for name in named])


def _packed(ds: grain.IterDataset, length: int, *, num_bins: int | None) -> grain.IterDataset:
    lengths = {_PAIRS: length}
    if num_bins is None:
        return grain.experimental.ConcatThenSplitIterDataset(ds, length_struct=lengths)
    return grain.experimental.FirstFitPackIterDataset(
        ds, length_struct=lengths, num_packing_bins=num_bins, shuffle_bins=False
    )


# Classes instead of closures, so that datasets can be pickled for worker processes.


class _Tokenize:
    """Converts a document to pairs of an input and the next token, `Int32["tokens 2"]`."""

    def __init__(self, tokenizer: Tokenizer, text_key: str, limit: int | None):
        self._tokenizer, self._text_key, self._limit = tokenizer, text_key, limit

    def __call__(self, record: Any) -> dict[str, np.ndarray]:
        tokens = self._tokenizer.encode(document_text(record, self._text_key))
        if self._limit is not None and len(tokens) >= self._limit:
            raise InputDatasetError(
                f"the document has {len(tokens) + 1} tokens with its end, more than "
                f"sequence_length={self._limit}; leave it out, increase sequence_length, or "
                "set split_documents=True"
            )
        with_ends = np.full(len(tokens) + 2, self._tokenizer.eos_id, np.int32)
        with_ends[1:-1] = tokens
        return {_PAIRS: np.stack([with_ends[:-1], with_ends[1:]], axis=1)}


class _Features:
    """Creates the features of `PackedSequences` for one process's rows of a global batch."""

    def __init__(self, tokenizer: Tokenizer, rows: slice):
        self._pad_id, self._token_num_bytes = tokenizer.pad_id, tokenizer.token_num_bytes
        self._rows = rows

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        segments = batch[f"{_PAIRS}_segment_ids"][self._rows]
        pairs = np.where(segments[..., None] > 0, batch[_PAIRS][self._rows], self._pad_id)
        inputs, targets = pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.int32)
        return {
            "input_ids": inputs,
            "target_labels": targets,
            "target_num_bytes": self._token_num_bytes[targets].sum(axis=1, dtype=np.int32),
            "input_segment_ids": segments,
            "input_positions": batch[f"{_PAIRS}_positions"][self._rows],
        }
