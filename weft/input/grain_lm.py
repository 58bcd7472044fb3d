"""Inputs for language models, as functions on Grain datasets.

    def source(dispatch_config):
        ds = json_lines_dataset("*.jsonl").seed(0).shuffle().repeat(None)
        ds = shard_dataset(ds, dispatch_config)
        ds = text_to_lm_training_input(ds, vocab=vocab, max_len=1024)
        return per_feed_batch(ds, global_batch_size=32, dispatch_config=dispatch_config)

Each process packs its own documents. Its iterator resumes exactly, with as many processes as
before. The sources of `weft.input.text` also resume with other numbers of processes.
"""

from collections.abc import Mapping
from typing import Any

import grain.experimental
import numpy as np

from weft.config import ConfigOr, maybe_instantiate
from weft.input import grain_text, packing
from weft.input.grain import Dataset, RaggedTensor, maybe_to_iter_dataset, unbatch
from weft.input.tokenizers import Tokenizer

# Documents are small: with Grain's default of 500 windows ahead, a start would take minutes.
_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
# Packed as one feature, at half the cost of two.
_PAIRS = "pairs"


def text_to_lm_training_input(
    ds: Dataset,
    *,
    vocab: ConfigOr[Tokenizer],
    max_len: int,
    window_size: int | None = 128,
    max_padding_fraction: float = 1.0,
    replace_newlines_with: str = "\n",
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

    Raises InputDatasetError during iteration, if an example has no text.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"text": "ab"}, {"text": "c"}])
    >>> examples = text_to_lm_training_input(ds, vocab=ByteTokenizer(), max_len=3)
    >>> [(one["input_ids"].tolist(), one["target_labels"].tolist()) for one in examples]
    [([256, 97, 98], [97, 98, 256]), ([256, 99, 257], [99, 256, 257])]
    """
    loaded: Tokenizer = maybe_instantiate(vocab)
    tokens = _tokenize_text(ds, loaded, replace_newlines_with)
    if window_size is None:
        pairs = tokens.map(lambda example: next_token_pairs(example["text"], eos_id=loaded.eos_id))
        packed = _pack_whole(pairs, loaded, max_len)
    else:

        def pack(window: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
            source = _sequences([example["text"] for example in window], loaded, max_len)
            examples = source.take(np.arange(len(source)))
            padding = np.sum(examples["target_labels"][-1] == loaded.pad_id)
            kept = len(source) - int(padding > max_padding_fraction * max_len)
            return {name: rows[:kept] for name, rows in examples.items()}

        windows = tokens.batch(window_size, batch_fn=list).map(pack)
        packed = _rows(windows)
    return _correct_num_bytes(packed, loaded, replace_newlines_with)


def text_to_lm_eval_input(
    ds: Dataset,
    *,
    vocab: ConfigOr[Tokenizer],
    max_len: int,
    stride: int | None = None,
    index_key: str | None = None,
    replace_newlines_with: str = "\n",
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
    loaded: Tokenizer = maybe_instantiate(vocab)

    def split(example: Mapping[str, Any]) -> dict[str, Any]:
        source = _sequences([example["text"]], loaded, max_len, stride=stride)
        windows: dict[str, Any] = source.take(np.arange(len(source)))
        if index_key is not None:
            windows[index_key] = RaggedTensor([example[index_key]] * len(source))
        return windows

    windows = _tokenize_text(ds, loaded, replace_newlines_with).map(split)
    return _correct_num_bytes(_rows(windows), loaded, replace_newlines_with)


def streaming_packing(
    ds: Dataset, *, vocab: ConfigOr[Tokenizer], max_len: int
) -> grain.IterDataset:
    """Packs sequences whole into examples of `max_len` tokens, in order, each into the current one.

    If a sequence does not fit, the example ends with padding and the next one begins. Sequences
    longer than `max_len` are split first.

    Args:
        ds: Dataset of dicts of `input_ids` and `target_labels`, `Int[np.ndarray, "tokens"]`, such
            as the result of `tokenize_turns`.

    Returns a dataset of the features of `PackedSequences`, with `input_segment_ids` and
    `input_positions`, which keep attention within a sequence.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> rows = [{"input_ids": [1] * n, "target_labels": [2] * n} for n in (2, 1, 3)]
    >>> ds = streaming_packing(grain.MapDataset.source(rows), vocab=ByteTokenizer(), max_len=4)
    >>> [one["input_segment_ids"].tolist() for one in ds]
    [[1, 1, 2, 0], [1, 1, 1, 0]]
    """

    def pairs(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        both = [np.asarray(example[key], np.int32) for key in ("input_ids", "target_labels")]
        return {_PAIRS: np.stack(both, axis=1)}

    return _pack_whole(ds.map(pairs), maybe_instantiate(vocab), max_len)


def next_token_pairs(tokens: np.ndarray, *, eos_id: int) -> dict[str, np.ndarray]:
    """Returns pairs of an input and the next token of a document, `Int32["tokens 2"]`."""
    with_ends = np.full(len(tokens) + 2, eos_id, np.int32)
    with_ends[1:-1] = tokens
    return {_PAIRS: np.stack([with_ends[:-1], with_ends[1:]], axis=1)}


def pack_pairs(ds: grain.IterDataset, length: int, *, num_bins: int | None) -> grain.IterDataset:
    """Packs pairs into sequences, whole into `num_bins` at a time; split where one ends if None."""
    lengths = {_PAIRS: length}
    if num_bins is None:
        return grain.experimental.ConcatThenSplitIterDataset(ds, length_struct=lengths)
    return grain.experimental.FirstFitPackIterDataset(
        ds, length_struct=lengths, num_packing_bins=num_bins, shuffle_bins=False
    )


class PairFeatures:
    """Creates the features of `PackedSequences` from packed pairs, for some rows of a batch.

    A class instead of a closure, so that datasets can be pickled for worker processes.
    """

    def __init__(self, vocab: Tokenizer, rows: slice = slice(None)):
        self._pad_id, self._token_num_bytes = vocab.pad_id, vocab.token_num_bytes
        self._rows = rows

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        segments = batch[f"{_PAIRS}_segment_ids"][self._rows]
        pairs = np.where(segments[..., None] > 0, batch[_PAIRS][self._rows], self._pad_id)
        inputs, targets = pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.int32)
        return {
            "input_ids": inputs,
            "target_labels": targets,
            "target_num_bytes": self._token_num_bytes[targets].sum(axis=-1, dtype=np.int32),
            "input_segment_ids": segments,
            "input_positions": batch[f"{_PAIRS}_positions"][self._rows],
        }


def _tokenize_text(ds: Dataset, vocab: Tokenizer, newlines: str) -> Dataset:
    if newlines != "\n":
        escaped = newlines.replace("\\", "\\\\")
        vocab = grain_text.with_regex_mapping(vocab, encode_mapping=[("\n", escaped)])
    return grain_text.tokenize(ds, vocab={"text": vocab})


def _correct_num_bytes(ds: grain.IterDataset, vocab: Tokenizer, newlines: str) -> grain.IterDataset:
    if newlines == "\n":
        return ds
    keys = {"input_key": "target_labels", "output_key": "target_num_bytes"}
    counted = grain_text.count_num_bytes(ds, vocab=vocab, newlines_replaced_with=newlines, **keys)
    return maybe_to_iter_dataset(counted)


def _sequences(
    documents: list[np.ndarray], vocab: Tokenizer, max_len: int, *, stride: int | None = None
) -> packing.PackedSequences:
    return packing.PackedSequences(
        packing.token_stream(documents, eos_id=vocab.eos_id),
        sequence_length=max_len,
        eos_id=vocab.eos_id,
        pad_id=vocab.pad_id,
        stride=stride,
        token_num_bytes=vocab.token_num_bytes,
    )


def _pack_whole(ds: Dataset, vocab: Tokenizer, max_len: int) -> grain.IterDataset:
    def split(example: Mapping[str, np.ndarray]) -> dict[str, RaggedTensor]:
        pairs = example[_PAIRS]
        starts = range(0, len(pairs), max_len)
        return {_PAIRS: RaggedTensor(pairs[i : i + max_len] for i in starts)}

    pieces = _rows(ds.map(split))
    return pack_pairs(pieces, max_len, num_bins=1).map(PairFeatures(vocab))


def _rows(ds: Dataset) -> grain.IterDataset:
    batches = maybe_to_iter_dataset(ds, read_options=_READ_OPTIONS)
    return unbatch(batches, skip_empty_batch=True)
