"""Text for a language model: packed sequences of a corpus, as a source for `grain.Input`.

    source = config_for_function(lm_text_source).set(
        corpus=config_for_function(stdlib_corpus),
        split="train", sequence_length=256, global_batch_size=32, is_training=True, seed=0,
    )
    cfg = Input.default_config().set(source=source)

Global batch k is the same rows in the same order for any number of processes, each of which reads
consecutive rows of it, and the iterator's state is `{"next_index": k}` in all of them. So a run may
go on with another number of processes, or of worker processes, and sees the same data.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import grain
import numpy as np

from weft.config import ConfigOr, config_for_class, config_for_function, maybe_instantiate
from weft.errors import EmptyCorpusError
from weft.input.corpus import Corpus, Split, stdlib_corpus
from weft.input.grain import (
    BuildDatasetFn,
    DispatchConfig,
    feed_batch_size,
    maybe_to_iter_dataset,
    prefetch_dataset,
    shard_dataset_with_proportion,
)
from weft.input.packing import PackedSequences, token_stream
from weft.input.tokenizer import ByteTokenizer

STDLIB = config_for_function(stdlib_corpus)
BYTES = config_for_class(ByteTokenizer)


class Tokenizer(Protocol):
    """What sources, and what generates text, ask of a tokenizer."""

    eos_id: int
    pad_id: int

    def encode(self, text: bytes) -> np.ndarray: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


def lm_text_source(
    *,
    corpus: ConfigOr[Corpus] = STDLIB,
    split: Split,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    tokenizer: ConfigOr[Tokenizer] = BYTES,
    segments: bool = False,
    max_examples: int | None = None,
    num_workers: int = 0,
) -> BuildDatasetFn:
    """A source of batches of `PackedSequences`.

    Args:
        corpus: The text.
        split: Which part of it.
        sequence_length: Tokens per example.
        global_batch_size: Examples per step over all processes.
        is_training: Whether the examples come without end, in a new order in each pass; or once, in
            order, the last batch filled up with padding.
        seed: Decides the order in training.
        tokenizer: From bytes to ids.
        segments: Whether examples tell their documents apart, so that attention does not cross
            from one to the next; see `PackedSequences`.
        max_examples: Use at most so many examples, evenly spaced over the text.
        num_workers: Processes that make batches. With bytes, none are needed: a batch of 32
            takes less than a millisecond.

    Raises:
        EmptyCorpusError: If there is not one batch to train on, or nothing to evaluate.
    """
    corpus, tokenizer = maybe_instantiate(corpus), maybe_instantiate(tokenizer)
    documents = (tokenizer.encode(file.text) for file in corpus.split(split))
    source = PackedSequences(
        token_stream(documents, eos_id=tokenizer.eos_id),
        sequence_length=sequence_length,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        drop_remainder=is_training,
        pad_to_multiple_of=1 if is_training else global_batch_size,
        segments=segments,
        max_examples=max_examples,
    )
    if len(source) < global_batch_size:
        raise EmptyCorpusError(
            f"the {split!r} part of {corpus} gives {len(source)} sequences of {sequence_length} "
            f"tokens, fewer than one batch of {global_batch_size}; give more text, or a smaller "
            "sequence_length or global_batch_size"
        )

    def build_dataset(dispatch_config: DispatchConfig) -> grain.IterDataset:
        # Shuffled, shared out and batched as indices, which costs a tenth of doing it with
        # examples.
        ds: Any = grain.MapDataset.range(len(source))
        if is_training:
            ds = ds.seed(seed).shuffle().repeat(None)
        rows = feed_batch_size(global_batch_size, dispatch_config)
        start = rows * dispatch_config.flat_index()
        ds = shard_dataset_with_proportion(
            ds, range_start=start, range_end=start + rows, period=global_batch_size
        )
        ds = ds.batch(rows, drop_remainder=True).map(source.take)
        if num_workers:
            options = grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=2
            )
            return prefetch_dataset(ds, multiprocessing_options=options)
        # No threads: the trainer reads ahead in one of its own.
        return maybe_to_iter_dataset(ds, read_options=grain.ReadOptions(0, 0))

    return build_dataset
