"""Inputs for language models, as functions on Grain datasets.

    def source(dispatch_config):
        ds = json_lines_dataset("*.jsonl").seed(0).shuffle().repeat(None)
        ds = shard_dataset(ds, dispatch_config)
        ds = text_to_lm_training_input(ds, vocab=vocab, max_len=1024)
        return per_feed_batch(ds, global_batch_size=32, dispatch_config=dispatch_config)

Each process packs its own documents. Its iterator resumes exactly, with as many processes as
before. The sources of `weft.input.text` also resume with other numbers of processes.
"""

import re
from collections.abc import Mapping
from typing import Any

import grain.experimental
import numpy as np

from weft.config import ConfigOr, maybe_instantiate
from weft.errors import warn_of_padding_by_value
from weft.input import file_cache, grain_text, packing
from weft.input.grain import (
    Dataset,
    RaggedTensor,
    maybe_to_iter_dataset,
    unbatch,
)
from weft.input.tokenizers import Tokenizer, as_tokenizer, text_num_bytes

# Documents are small: with Grain's default of 500 windows ahead, a start would take minutes.
_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
# Packed as one feature, at a fraction of the cost of several: the input, its target, whether that
# counts, and its bytes.
_PAIRS = "pairs"
NUM_COLUMNS = 4
_NUM_BYTES = "num_bytes"


def text_to_lm_training_input(
    ds: Dataset,
    *,
    vocab: ConfigOr[Tokenizer],
    max_len: int,
    window_size: int | None = 128,
    max_padding_fraction: float = 1.0,
    replace_newlines_with: str = "\n",
    add_bos: bool = False,
) -> grain.IterDataset:
    """Packs texts into examples of `max_len` tokens, with `eos` before and after each text.

    The texts of a window are concatenated and split. An example is a dict of `input_ids`,
    `target_labels` and `target_num_bytes`, see `PackedSequences`. The first input of an example is
    the token before, even if another example ends with it.

    Args:
        ds: Dataset of dicts with a `text`.
        window_size: Texts in a window; None to pack whole texts, like `streaming_packing`.
        max_padding_fraction: Maximum of padding in a window's last example, else it is dropped.
        replace_newlines_with: Such as "<n>", for vocabularies without newlines; counts as one byte.
        add_bos: Whether texts begin with the beginning of a text; see `with_bos`.

    Raises InputDatasetError during iteration, if an example has no text.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"text": "ab"}, {"text": "c"}])
    >>> examples = text_to_lm_training_input(ds, vocab=ByteTokenizer(), max_len=3)
    >>> [(one["input_ids"].tolist(), one["target_labels"].tolist()) for one in examples]
    [([256, 97, 98], [97, 98, 256]), ([256, 99, 257], [99, 256, 257])]
    """
    loaded = as_tokenizer(vocab, add_bos=add_bos)
    tokens = _tokenize_text(ds, loaded, replace_newlines_with)
    if window_size is None:

        def pairs(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
            return next_token_pairs(
                example["text"], example[_NUM_BYTES], eos_id=loaded.eos_id
            )

        return _pack_whole(tokens.map(pairs), loaded, max_len)

    def pack(window: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        examples = _sequences(window, loaded, max_len)
        num_examples = len(examples["input_ids"])
        num_padded = np.sum(~examples["live_targets"][-1])
        if num_padded > max_padding_fraction * max_len:
            num_examples -= 1
        return {name: rows[:num_examples] for name, rows in examples.items()}

    return _rows(tokens.batch(window_size, batch_fn=list).map(pack))


def text_to_lm_eval_input(
    ds: Dataset,
    *,
    vocab: ConfigOr[Tokenizer],
    max_len: int,
    stride: int | None = None,
    index_key: str | None = None,
    replace_newlines_with: str = "\n",
    add_bos: bool = False,
) -> grain.IterDataset:
    """Splits each text into windows of `max_len` tokens, with padding in the last one.

    With a stride, windows overlap, and the first `max_len - stride` targets of all but the first
    are `pad_id`. Each token is a target once, and most have a long context.

    Args:
        ds: Dataset of dicts with a `text`; see `text_to_lm_training_input` for it and the examples.
        stride: Number of new targets in each window but the first; `max_len` by default.
        index_key: A field to copy to all windows of a text, such as the index of the text.

    Raises InputDatasetError during iteration, for a missing text or a stride out of range.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"text": "abcd"}])
    >>> examples = text_to_lm_eval_input(ds, vocab=ByteTokenizer(), max_len=3, stride=2)
    >>> [(one["input_ids"].tolist(), one["target_labels"].tolist()) for one in examples]
    [([256, 97, 98], [97, 98, 99]), ([98, 99, 100], [257, 100, 256])]
    """
    loaded = as_tokenizer(vocab, add_bos=add_bos)

    def split(example: Mapping[str, Any]) -> dict[str, Any]:
        windows: dict[str, Any] = _sequences(
            [example], loaded, max_len, stride=stride
        )
        if index_key is not None:
            windows[index_key] = RaggedTensor(
                [example[index_key]] * len(windows["input_ids"])
            )
        return windows

    return _rows(_tokenize_text(ds, loaded, replace_newlines_with).map(split))


def streaming_packing(
    ds: Dataset, *, vocab: ConfigOr[Tokenizer], max_len: int
) -> grain.IterDataset:
    """Packs sequences whole into examples of `max_len` tokens, in order, each into the current one.

    If a sequence does not fit, the example ends with padding and the next one begins. Sequences
    longer than `max_len` are split first.

    Args:
        ds: Dataset of dicts of `input_ids` and `target_labels`, `Int[np.ndarray, "tokens"]`, such
            as the result of `tokenize_turns`; and optionally `live_targets`, by default those that
            are not `pad_id`, and `target_num_bytes`, `Int[np.ndarray, "tokens"]`, the bytes of each
            target, by default `token_num_bytes` of the vocabulary.

    Returns a dataset of the features of `PackedSequences`, with `input_segment_ids` and
    `input_positions`, which keep attention within a sequence.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> rows = [{"input_ids": [1] * n, "target_labels": [2] * n} for n in (2, 1, 3)]
    >>> ds = streaming_packing(grain.MapDataset.source(rows), vocab=ByteTokenizer(), max_len=4)
    >>> [one["input_segment_ids"].tolist() for one in ds]
    [[1, 1, 2, 0], [1, 1, 1, 0]]
    """
    loaded: Tokenizer = maybe_instantiate(vocab)

    def pairs(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        targets = np.asarray(example["target_labels"], np.int32)
        live = example.get("live_targets")
        if live is None:
            live = live_labels(targets, loaded)
        num_bytes = example.get("target_num_bytes")
        if num_bytes is None:
            num_bytes = loaded.token_num_bytes[
                np.where(live, targets, loaded.pad_id)
            ]
        return _pairs(example["input_ids"], targets, live, num_bytes)

    return _pack_whole(ds.map(pairs), loaded, max_len)


def live_labels(labels: np.ndarray, vocab: Tokenizer) -> np.ndarray:
    """Returns which labels count, by their values: neither negative nor `pad_id`."""
    if vocab.pad_id == vocab.eos_id:
        warn_of_padding_by_value(
            f"pad_id and eos_id of {vocab!r} are both {vocab.pad_id}",
            "the examples",
        )
    return (labels >= 0) & (labels != vocab.pad_id)


def next_token_pairs(
    tokens: np.ndarray, num_bytes: np.ndarray | None, *, eos_id: int
) -> dict[str, np.ndarray]:
    """Returns the inputs and targets of a document for `pack_pairs`.

    Args:
        num_bytes: The result of `weft.input.tokenizers.text_num_bytes`.
    """
    with_ends = np.full(len(tokens) + 2, eos_id, np.int32)
    with_ends[1:-1] = tokens
    sizes = np.full(len(tokens) + 1, packing.UNKNOWN_NUM_BYTES)
    if num_bytes is not None:
        sizes = np.append(num_bytes, 0)
    return _pairs(with_ends[:-1], with_ends[1:], np.ones(len(sizes)), sizes)


def _pairs(*columns: np.ndarray) -> dict[str, np.ndarray]:
    int_columns = [np.asarray(column, np.int32) for column in columns]
    return {_PAIRS: np.stack(int_columns, axis=1)}


def pairs_of(document: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Returns the pairs of a document; none of one that was filtered out.

    The result is `Int32[np.ndarray, "tokens columns"]`.
    """
    if document is None:
        return np.zeros((0, NUM_COLUMNS), np.int32)
    return document[_PAIRS]


def packed(
    pairs: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns rows of pairs as examples of `pack_pairs`."""
    return {
        _PAIRS: pairs,
        f"{_PAIRS}_segment_ids": segment_ids,
        f"{_PAIRS}_positions": positions,
    }


def pack_pairs(
    ds: grain.IterDataset, length: int, *, num_bins: int | None
) -> grain.IterDataset:
    """Packs pairs into sequences, whole into `num_bins` at a time; split where one ends if None."""
    lengths = {_PAIRS: length}
    if num_bins is None:
        return grain.experimental.ConcatThenSplitIterDataset(
            ds, length_struct=lengths
        )
    return grain.experimental.FirstFitPackIterDataset(
        ds, length_struct=lengths, num_packing_bins=num_bins, shuffle_bins=False
    )


class PairFeatures:
    """Creates the features of `PackedSequences` from packed pairs, for some rows of a batch.

    A class instead of a closure, so that datasets can be pickled for worker processes.
    """

    def __init__(self, vocab: Tokenizer, rows: slice = slice(None)):
        self._pad_id = vocab.pad_id
        self._rows = rows

    def __call__(
        self, batch: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        segments = batch[f"{_PAIRS}_segment_ids"][self._rows]
        inputs, targets, is_live, sizes = np.moveaxis(
            batch[_PAIRS][self._rows], -1, 0
        )
        is_token = segments > 0
        live_targets = is_token & (is_live != 0)
        inputs = np.where(is_token, inputs, self._pad_id)
        targets = np.where(live_targets, targets, self._pad_id)
        sizes = np.where(live_targets, sizes, 0)
        num_bytes = np.sum(sizes, axis=-1, dtype=np.int32)
        is_known = np.all(sizes >= 0, axis=-1)
        num_bytes = np.where(
            is_known, num_bytes, np.int32(packing.UNKNOWN_NUM_BYTES)
        )
        return {
            "input_ids": inputs.astype(np.int32),
            "target_labels": targets.astype(np.int32),
            "live_targets": live_targets,
            "target_num_bytes": num_bytes,
            "input_segment_ids": segments,
            "input_positions": batch[f"{_PAIRS}_positions"][self._rows],
        }


def _tokenize_text(ds: Dataset, vocab: Tokenizer, newlines: str) -> Dataset:
    if newlines != "\n":
        escaped = newlines.replace("\\", "\\\\")
        vocab = grain_text.with_regex_mapping(
            vocab,
            encode_mapping=[("\n", escaped)],
            decode_mapping=[(re.escape(newlines), "\n")],
        )

    def fn(example: Mapping[str, Any]) -> dict[str, Any]:
        text = file_cache.document_text(
            example, "text", advice="rename one of these to 'text'"
        )
        tokens = vocab.encode(text)
        num_bytes = text_num_bytes(vocab, text, tokens)
        return {**example, "text": tokens, _NUM_BYTES: num_bytes}

    return ds.map(fn)


def _sequences(
    documents: list[Any],
    vocab: Tokenizer,
    max_len: int,
    *,
    stride: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns all examples of some tokenized documents."""
    corrections = packing.ByteCorrections(vocab.token_num_bytes)
    tokens = []
    for document in documents:
        tokens.append(document["text"])
        corrections.add(document["text"], document[_NUM_BYTES])
    source = packing.PackedSequences(
        packing.token_stream(tokens, eos_id=vocab.eos_id),
        sequence_length=max_len,
        eos_id=vocab.eos_id,
        pad_id=vocab.pad_id,
        stride=stride,
        token_num_bytes=vocab.token_num_bytes,
        corrections=corrections.rows(),
    )
    examples = source.take(np.arange(len(source)))
    # Every example has the same features.
    unknown = np.full(len(source), packing.UNKNOWN_NUM_BYTES, np.int32)
    examples.setdefault("target_num_bytes", unknown)
    return examples


def _pack_whole(
    ds: Dataset, vocab: Tokenizer, max_len: int
) -> grain.IterDataset:
    def split(example: Mapping[str, np.ndarray]) -> dict[str, RaggedTensor]:
        pairs = example[_PAIRS]
        starts = range(0, len(pairs), max_len)
        return {_PAIRS: RaggedTensor(pairs[i : i + max_len] for i in starts)}

    pieces = _rows(ds.map(split))
    return pack_pairs(pieces, max_len, num_bins=1).map(PairFeatures(vocab))


def _rows(ds: Dataset) -> grain.IterDataset:
    batches = maybe_to_iter_dataset(ds, read_options=_READ_OPTIONS)
    return unbatch(batches, skip_empty_batch=True)
