"""Packed text for language models, as sources for `weft.input.grain.Input`.

`lm_text_source` reads a corpus in memory:

    source = config_for_function(lm_text_source).set(
        corpus=config_for_function(stdlib_corpus),
        split="train", sequence_length=256, global_batch_size=32, is_training=True, seed=0,
    )
    cfg = Input.default_config().set(source=source)

`lm_documents_source` reads records of files, or a mixture of several. For both, order, mixture and
sharding are computed with indices. Global batch k therefore has the same rows for any number of
processes, which each read consecutive rows of it, and the iterator's state is `{"next_index": k}`.
A run may resume with another number of processes or workers.

`lm_stream_source` packs during training, for text too large or too changing to be tokenized in
advance. It returns the same features as `lm_documents_source`, but:

                        lm_documents_source         lm_stream_source
    row r of batch k    arithmetic on k and r       follows row r of batch k - 1
    state               one number                  two numbers for each of this process's rows
    before step 1       every document is read      nothing is read
    each process        reads its own rows          reads the documents of its own rows

Of `lm_stream_source`, the states of all processes are that of the run, whatever their number; see
`weft.input.prefetch.PARTS`. Its evaluations, which read every document in any case, are those of
`lm_documents_source` with the same rows, where files are known and documents may be split. In
others, each process reads all documents, in order.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from weft.config import (
    ConfigOr,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)
from weft.errors import EmptyCorpusError, InputDatasetError
from weft.input import (
    file_cache,
    grain_datasets,
    grain_lm,
    grain_streams,
    packing,
)
from weft.input import grain as grain_input
from weft.input.corpus import Corpus, Split, stdlib_corpus
from weft.input.records import ConcatenatedRecords, Records
from weft.input.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    as_tokenizer,
    text_num_bytes,
)

_MOST_WORKERS = 1000


def sequence_batches(
    sources: Sequence[packing.Sequences],
    *,
    global_batch_size: int,
    is_training: bool,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    num_workers: int = 0,
    name: str = "the text",
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches for `weft.input.grain.Input`.

    Args:
        is_training: Whether sequences are endless, with each source reshuffled in each pass; or in
            order, once. Then their number must be a multiple of the batch.
        weights: Relative number of sequences of each source, in training. Defaults to their sizes.
        num_workers: Processes that create batches. Usually 0: a batch takes a millisecond.

    Raises:
        EmptyCorpusError: If there is no batch.
        InputDatasetError: If the weights do not fit the sources, or in evaluation the number of
            sequences is not a multiple of the batch.
    """
    num_sequences = sum(map(len, sources))
    if num_sequences < global_batch_size:
        raise EmptyCorpusError(
            f"{name} has {num_sequences} sequences of {sources[0].sequence_length} tokens, fewer "
            f"than one batch of {global_batch_size}; add text, or reduce sequence_length or "
            "global_batch_size"
        )
    if not 0 <= num_workers <= _MOST_WORKERS:
        raise InputDatasetError(
            f"num_workers={num_workers} processes cannot create batches; pass 0 to {_MOST_WORKERS}"
        )
    if weights is not None and len(weights) != len(sources):
        raise InputDatasetError(
            f"{len(sources)} sources cannot be mixed with weights={list(weights)}; pass one "
            "positive weight for each"
        )
    if not is_training and num_sequences % global_batch_size:
        raise InputDatasetError(
            f"{name} has {num_sequences} sequences, which is not a multiple of a batch of "
            f"{global_batch_size}, so the last ones would not be evaluated; pad a source with "
            "sequences of masked tokens, or use a batch size that divides their number"
        )
    all_sources = _SequenceMixture(sources)
    order_seed = seed if is_training else None

    def build_dataset(
        dispatch_config: grain_input.DispatchConfig,
    ) -> grain.IterDataset:
        rows = grain_input.feed_rows(global_batch_size, dispatch_config)
        ds = grain_input.shard_dataset_with_proportion(
            all_sources.order(weights, order_seed),
            range_start=rows.start,
            range_end=rows.stop,
            period=global_batch_size,
        )
        ds = ds.batch(rows.stop - rows.start, drop_remainder=True).map(
            all_sources.take
        )
        if num_workers:
            options = grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=2
            )
            return grain_input.prefetch_dataset(
                ds, multiprocessing_options=options
            )
        # No threads, because the trainer reads ahead in its own.
        return grain_input.maybe_to_iter_dataset(
            ds, read_options=grain_input.IN_STEP
        )

    return build_dataset


class _SequenceMixture:
    """Sequences of several sources under one index, where those of one source are adjacent."""

    def __init__(self, sources: Sequence[packing.Sequences]):
        self._sources = list(sources)
        self._starts = np.array([0, *itertools.accumulate(map(len, sources))])

    def order(
        self, weights: Sequence[float] | None, seed: int | None
    ) -> grain.MapDataset:
        """Returns the indices in reading order; without a seed, sequentially and once."""
        starts = self._starts.tolist()
        if seed is None:
            return grain.MapDataset.range(starts[-1])
        if weights is None:
            return (
                grain.MapDataset.range(starts[-1])
                .seed(seed)
                .shuffle()
                .repeat(None)
            )
        parts = [
            grain.MapDataset.range(start, end)
            for start, end in itertools.pairwise(starts)
        ]
        return _shuffle_and_mix(parts, weights, seed)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples of some indices as one batch."""
        if len(self._sources) == 1:
            return self._sources[0].take(indices)
        source_indices = (
            np.searchsorted(self._starts, indices, side="right") - 1
        )
        batch: dict[str, np.ndarray] = {}
        counts_bytes = all(
            source.corrections is not None for source in self._sources
        )
        for i in np.unique(source_indices):
            rows = np.flatnonzero(source_indices == i)
            examples = self._sources[i].take(indices[rows] - self._starts[i])
            if not counts_bytes:  # all batches have the same features
                examples.pop("target_num_bytes", None)
            for key, values in examples.items():
                if key not in batch:
                    batch[key] = np.empty(
                        (len(indices), *values.shape[1:]), values.dtype
                    )
                batch[key][rows] = values
        return batch


STDLIB = config_for_function(stdlib_corpus)
BYTES = config_for_class(ByteTokenizer)


def lm_text_source(
    *,
    corpus: ConfigOr[Corpus] = STDLIB,
    split: Split,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    tokenizer: ConfigOr[Tokenizer] | str = BYTES,
    add_bos: bool = False,
    segments: bool = False,
    max_examples: int | None = None,
    num_workers: int = 0,
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches of `PackedSequences`.

    Args:
        is_training: Whether examples are endless, reshuffled in each pass; or in order, once, with
            padding in the last batch.
        tokenizer: May be the path of a tokenizer's file; see `as_tokenizer`.
        add_bos: Whether documents begin with the tokens that the tokenizer's own template puts
            before a text; see `weft.input.tokenizers.with_bos`.
        segments: Whether examples have segment ids, which keep attention within documents.
        max_examples: Maximum number of examples, evenly spaced over the text.
        num_workers: Processes that create batches. Bytes need none: a batch takes a millisecond.

    Raises:
        EmptyCorpusError: If there is no batch to train on, or nothing to evaluate.
        InputDispatchError: If `global_batch_size` is not positive.
        TokenizerError: If the tokenizer has no token for `add_bos`.
    """
    corpus = maybe_instantiate(corpus)
    loaded = as_tokenizer(tokenizer, add_bos=add_bos)
    pack = _packing(
        loaded, sequence_length, global_batch_size, is_training, segments
    )
    documents = _FilesOfCorpus(corpus, split)
    return sequence_batches(
        [pack(documents, max_examples=max_examples)],
        global_batch_size=global_batch_size,
        is_training=is_training,
        seed=seed,
        num_workers=num_workers,
        name=f"the {split!r} part of {corpus}",
    )


class _FilesOfCorpus:
    """Files of a part of a corpus as records."""

    def __init__(self, corpus: Corpus, split: Split):
        self._corpus, self._split = corpus, split
        self._files = corpus.split(split)
        self.num_bytes = corpus.num_bytes(split)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        return {"text": self._files[index].text}

    def __repr__(self) -> str:
        return f"the {self._split!r} part of {self._corpus}"

    def describe(self, index: int) -> str:
        return f"{self._files[index].name} of the corpus {self._corpus.name!r}"

    @property
    def fingerprint(self) -> tuple | None:
        """Identity of the data; None if it is so small that its tokens are not cached."""
        if self.num_bytes <= file_cache.MAX_BYTES_IN_MEMORY:
            return None
        corpus = self._corpus
        return (
            "corpus",
            corpus.sha256,
            corpus.held_out_fraction,
            self._split,
        )


def _packing(
    tokenizer: Tokenizer,
    length: int,
    batch_size: int,
    is_training: bool,
    segments: bool,
) -> Callable[..., packing.PackedSequences]:
    """Returns a function from documents to `PackedSequences`."""
    grain_input.check_batch_size(batch_size)

    def pack(
        documents: Records,
        *,
        text_key: str = "text",
        max_examples: int | None = None,
    ) -> packing.PackedSequences:
        tokens = file_cache.tokenize_documents(
            documents, tokenizer, text_key=text_key
        )
        return packing.PackedSequences(
            tokens.stream,
            corrections=tokens.corrections,
            sequence_length=length,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            drop_remainder=is_training,
            pad_to_multiple_of=1 if is_training else batch_size,
            segments=segments,
            max_examples=max_examples,
            token_num_bytes=tokenizer.token_num_bytes,
        )

    return pack


def lm_documents_source(
    *,
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]],
    weights: Mapping[str, float] | None = None,
    text_key: str = "text",
    tokenizer: ConfigOr[Tokenizer] | str = BYTES,
    add_bos: bool = False,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    segments: bool = False,
    num_workers: int = 0,
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches of `PackedSequences`, from documents with random access.

    All documents are tokenized once, before the first batch; see `weft.input.file_cache`. For
    other arguments see `lm_text_source`.

    Args:
        documents: A `grain.MapDataset` of dicts (see `weft.input.datasets`), or several by name.
        weights: Relative number of sequences from each of several, in training, by default by size.

    Raises:
        EmptyCorpusError: If there are no documents, or no batch to train on.
        InputReadError: If a document cannot be read or tokenized, or has no text.
        InputDatasetError: If the weights do not name the documents.

    >>> import grain
    >>> from weft.input.grain import DispatchConfig
    >>> documents = grain.MapDataset.source([{"text": "one"}, {"text": "two"}])
    >>> source = lm_documents_source(
    ...     documents=documents, sequence_length=4, global_batch_size=2, is_training=False)
    >>> next(iter(source(DispatchConfig(0, 1))))["input_ids"].tolist()
    [[256, 111, 110, 101], [256, 116, 119, 111]]
    """
    named = named_documents(documents, weights)
    loaded = as_tokenizer(tokenizer, add_bos=add_bos)
    pack = _packing(
        loaded, sequence_length, global_batch_size, is_training, segments
    )
    sources = [
        pack(maybe_instantiate(dataset), text_key=text_key)
        for dataset in named.values()
    ]
    source_weights = None
    if weights is not None:
        source_weights = [weights[name] for name in named]
    return sequence_batches(
        sources,
        weights=source_weights,
        global_batch_size=global_batch_size,
        is_training=is_training,
        seed=seed,
        num_workers=num_workers,
        name=f"the text of {', '.join(named)}",
    )


def named_documents(
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]],
    weights: Mapping[str, float] | None,
) -> Mapping[str, ConfigOr[Any]]:
    """Returns documents by name, unnamed ones as "documents".

    Raises InputDatasetError if the weights do not name the documents.
    """
    if not isinstance(documents, Mapping):
        documents = {"documents": documents}
    if weights is not None and set(weights) != set(documents):
        raise InputDatasetError(
            f"weights are given for {sorted(map(str, weights))}, but the documents are "
            f"{sorted(map(str, documents))}; pass one positive weight for each of them"
        )
    return documents


def lm_stream_source(
    *,
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]],
    weights: Mapping[str, float] | None = None,
    text_key: str = "text",
    tokenizer: ConfigOr[Tokenizer] | str = BYTES,
    add_bos: bool = False,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    split_documents: bool = True,
    num_threads: int = 2,
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches that are packed during reading.

    For other arguments see `lm_text_source`.

    Args:
        weights: Relative number of documents from each of several, in training, by default by size.
        split_documents: Whether a document may continue in the same row of the next batch, or in
            an evaluation in the next example. If not, it is placed whole into the first of up to 16
            rows with enough room, in an evaluation of the batch, with padding.
        num_threads: Threads that tokenize in each process.

    Raises:
        EmptyCorpusError: If there are no documents.
        InputDatasetError: If the weights do not name the documents.
        InputDispatchError: If `global_batch_size` is not positive.
        InputReadError: During iteration, naming a document that is unreadable, empty or too long.
    """
    grain_input.check_batch_size(global_batch_size)
    named = named_documents(documents, weights)
    loaded = as_tokenizer(tokenizer, add_bos=add_bos)
    datasets = {
        name: maybe_instantiate(dataset) for name, dataset in named.items()
    }
    for name, dataset in datasets.items():
        if not len(dataset):
            raise EmptyCorpusError(
                f"{name} has no documents; pass files that contain records"
            )
    rows_per_group = grain_streams.rows_per_group(
        global_batch_size, split_documents=split_documents
    )
    # Mapped first, while errors can name the document.
    most_tokens = None if split_documents else sequence_length
    tokenize = functools.partial(_tokenize, loaded, text_key, most_tokens)
    tokens = {name: dataset.map(tokenize) for name, dataset in datasets.items()}
    mixed = _mix_documents(tokens, weights, seed if is_training else None)
    all_documents = ConcatenatedRecords(datasets.values())
    is_tokenized_once = (
        split_documents
        and not is_training
        and file_cache.keeps_tokens(all_documents, loaded)
    )

    @functools.cache
    def tokenized_source() -> grain_input.BuildDatasetFn:
        pack = _packing(
            loaded,
            sequence_length,
            global_batch_size,
            is_training=False,
            segments=True,
        )
        return sequence_batches(
            [pack(all_documents, text_key=text_key)],
            global_batch_size=global_batch_size,
            is_training=False,
        )

    def build_dataset(
        dispatch_config: grain_input.DispatchConfig,
    ) -> grain_input.Dataset:
        if is_tokenized_once:
            return tokenized_source()(dispatch_config).map(_with_num_bytes)
        rows = grain_input.feed_rows(global_batch_size, dispatch_config)
        all_rows = _packed_in_order(
            mixed,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            split_documents=split_documents,
            is_training=is_training,
            num_threads=num_threads,
        ).map(grain_lm.PairFeatures(loaded, rows))
        if not is_training:
            return all_rows
        groups = range(
            rows.start // rows_per_group, -(-rows.stop // rows_per_group)
        )
        own_groups = grain_datasets.IterDataset(
            grain_streams.RowGroupsIterator,
            mixed,
            groups=groups,
            num_groups=global_batch_size // rows_per_group,
            num_threads=num_threads,
            num_rows=rows_per_group,
            length=sequence_length,
            split_documents=split_documents,
            seed=seed,
        )
        first_row = groups.start * rows_per_group
        own_rows = slice(rows.start - first_row, rows.stop - first_row)
        return grain_datasets.IterDataset(
            grain_streams.UpgradableIterator,
            own_groups.map(grain_lm.PairFeatures(loaded, own_rows)),
            earlier=all_rows,
            is_earlier=grain_streams.is_of_all_rows,
        )

    return build_dataset


def _with_num_bytes(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds unknown numbers of bytes: features of a stream are known before its texts."""
    unknown = np.full(
        len(batch["input_ids"]), packing.UNKNOWN_NUM_BYTES, np.int32
    )
    return {"target_num_bytes": unknown, **batch}


def _packed_in_order(
    documents: grain.MapDataset,
    *,
    sequence_length: int,
    global_batch_size: int,
    split_documents: bool,
    is_training: bool,
    num_threads: int,
) -> grain_input.Dataset:
    """Packs all rows of each batch from the next documents.

    An evaluation needs it whose documents are not tokenized once, since its last batch is known
    only when all are packed; and a training that continues a position of Weft 0.2, where each
    process packed all rows.
    """
    read_options = grain.ReadOptions(num_threads, 8 * num_threads)
    packed: grain_input.Dataset = grain_lm.pack_pairs(
        grain_input.maybe_to_iter_dataset(documents, read_options=read_options),
        sequence_length,
        num_bins=None if split_documents else global_batch_size,
    )
    if not is_training:
        packed = grain_input.pad_for_evaluation(
            packed,
            per_feed_batch_size=global_batch_size,
            max_num_examples=sys.maxsize,
        )
    return packed.batch(global_batch_size, drop_remainder=True)


def _mix_documents(
    named: Mapping[str, grain.MapDataset],
    weights: Mapping[str, float] | None,
    seed: int | None,
) -> grain.MapDataset:
    """Shuffles, repeats and mixes; without a seed, concatenates."""
    if seed is None:
        return grain.MapDataset.concatenate(list(named.values()))
    if not weights:
        weights = {name: float(len(dataset)) for name, dataset in named.items()}
    ordered_weights = [weights[name] for name in named]
    return _shuffle_and_mix(list(named.values()), ordered_weights, seed)


def _shuffle_and_mix(
    parts: Sequence[grain.MapDataset], weights: Sequence[float], seed: int
) -> grain.MapDataset:
    # One seed for each, or parts of equal size would be shuffled in the same order.
    shuffled = [part.seed(seed + i).shuffle() for i, part in enumerate(parts)]
    return grain_input.sample_from_datasets(sources=shuffled, weights=weights)  # pyright: ignore[reportReturnType]


def _tokenize(
    tokenizer: Tokenizer, text_key: str, most_tokens: int | None, record: object
) -> dict[str, np.ndarray]:
    """Converts a document to `next_token_pairs`."""
    text = file_cache.document_text(record, text_key)
    tokens = tokenizer.encode(text)
    if most_tokens is not None and len(tokens) >= most_tokens:
        raise InputDatasetError(
            f"the document has {len(tokens) + 1} tokens with its end, more than "
            f"sequence_length={most_tokens}; leave it out, increase sequence_length, or "
            "set split_documents=True"
        )
    num_bytes = text_num_bytes(tokenizer, text, tokens)
    return grain_lm.next_token_pairs(tokens, num_bytes, eos_id=tokenizer.eos_id)
