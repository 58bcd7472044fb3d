"""Conversations, prompts with answers, and texts, as batches for tuning a language model.

    source = config_for_function(conversation_source).set(
        data="chat.jsonl", tokenizer="tokenizer.json", template=template, split="train",
        sequence_length=1024, global_batch_size=8, is_training=True,
    )

A row of data is what `weft.input.chat.encode_example` reads. Rows are packed whole into sequences,
each into the first of some open ones with room for it, and attention stays within a row:

    inputs     <s> Q 1 A 1   <s> Q 2 A 2   .
    targets    .   . A 1 e   .   . A 2 e   .      those of answers alone count
    segments   1   1 1 1 1   2   2 2 2 2   0

All rows are tokenized once, before the first batch, and kept in memory. Which are held out depends
on their tokens alone, not on their order.
"""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from weft.config import ConfigOr, InMemory, maybe_instantiate
from weft.errors import (
    ChatTemplateError,
    EmptyCorpusError,
    InputDatasetError,
)
from weft.input import grain as grain_input
from weft.input.chat import ChatTemplate, LearnedTokens, encode_example
from weft.input.corpus import Split
from weft.input.datasets import read_rows
from weft.input.text import sequence_batches
from weft.input.tokenizers import Tokenizer, as_tokenizer

logger = logging.getLogger(__name__)

_OPEN_SEQUENCES = 64


class Rows(InMemory[list[Mapping[str, Any]]]):
    """Rows of data in memory, as the value of a config's field.

    >>> Rows([{"prompt": "1 + 1 = ", "completion": "2"}])
    <1 row, digest ...>
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            digest.update(repr(row).encode(errors="surrogatepass"))
        count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
        super().__init__([*rows], f"{count}, digest {digest.hexdigest()}")


def conversation_source(
    *,
    data: str | Sequence[str] | Rows,
    tokenizer: ConfigOr[Tokenizer] | str,
    template: ConfigOr[ChatTemplate] | None = None,
    split: Split,
    held_out_fraction: float = 0.05,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches of packed rows.

    A batch has `input_ids`, `target_labels`, `live_targets`, `input_segment_ids` and
    `input_positions`, see `weft.input.packing.PackedSequences`. Targets that count are the tokens
    of answers, and of rows of one text all but the first. Of a row that is longer than a sequence,
    the end is left out.

    Args:
        data: Files of JSON lines or Parquet, or `Rows`.
        tokenizer: May be the path of a tokenizer's file.
        template: Writes messages; None for rows without messages.
        split: The part to read, "train" or "held_out".
        held_out_fraction: Fraction of the rows that are held out, at least one; 0 for none.
        is_training: Whether sequences are endless, and reshuffled in each pass; or in order, once,
            with padding in the last batch.

    Raises:
        EmptyCorpusError: If the part has no row with a target, or fewer sequences than a batch.
        InputReadError: If a row cannot be read or is of another form; names the file and the line.
        InputDatasetError: If the fraction is not below 1.
    """
    grain_input.check_batch_size(global_batch_size)
    loaded = as_tokenizer(tokenizer)
    rows = _rows_of_split(data, loaded, template, split, held_out_fraction)
    name = f"the {split!r} part of {_name(data)}"
    sequences = PackedRows(
        rows,
        sequence_length=sequence_length,
        pad_id=loaded.pad_id,
        name=name,
        pad_to_multiple_of=1 if is_training else global_batch_size,
    )
    return sequence_batches(
        [sequences],
        global_batch_size=global_batch_size,
        is_training=is_training,
        seed=seed,
        name=name,
    )


def num_sequences(
    *,
    data: str | Sequence[str] | Rows,
    tokenizer: ConfigOr[Tokenizer] | str,
    template: ConfigOr[ChatTemplate] | None = None,
    held_out_fraction: float = 0.05,
    sequence_length: int,
) -> int:
    """Returns the number of sequences to train on; see `conversation_source`."""
    loaded = as_tokenizer(tokenizer)
    rows = _rows_of_split(data, loaded, template, "train", held_out_fraction)
    packed_rows = PackedRows(
        rows,
        sequence_length=sequence_length,
        pad_id=loaded.pad_id,
        name=f"the 'train' part of {_name(data)}",
        warns=False,
    )
    return len(packed_rows)


def prompt_source(
    *,
    data: str | Sequence[str] | Rows,
    tokenizer: ConfigOr[Tokenizer] | str,
    template: ConfigOr[ChatTemplate] | None = None,
    held_out_fraction: float = 0.05,
    prompt_length: int,
    num_prompts: int,
) -> grain_input.BuildDatasetFn:
    """Returns a source of one batch of held-out prompts, to sample answers to them.

    The prompt of a row is all before its first target, and its last `prompt_length` tokens at most;
    for a row of one text its first tokens. A batch has `input_ids` and `input_segment_ids`.

    The arguments are those of `conversation_source`; rows are repeated if there are too few.
    """
    loaded = as_tokenizer(tokenizer)
    rows = _rows_of_split(data, loaded, template, "held_out", held_out_fraction)
    ids = np.full((num_prompts, prompt_length), loaded.pad_id, np.int32)
    segment_ids = np.zeros_like(ids)
    for i in range(num_prompts):
        row = rows[i % len(rows)]
        end = int(np.argmax(row.is_learned))
        if end == 0:
            end = min(len(row.ids) // 2 + 1, prompt_length)
        prompt = row.ids[max(0, end - prompt_length) : end]
        ids[i, : len(prompt)] = prompt
        segment_ids[i, : len(prompt)] = 1

    def build_dataset(
        dispatch_config: grain_input.DispatchConfig,
    ) -> Any:
        feed = grain_input.feed_rows(num_prompts, dispatch_config)
        batch = {"input_ids": ids[feed], "input_segment_ids": segment_ids[feed]}
        return grain.MapDataset.source([batch]).to_iter_dataset(
            grain_input.IN_STEP
        )

    return build_dataset


class PackedRows:
    """Random-access source of sequences of packed rows."""

    corrections: np.ndarray | None = None  # no numbers of bytes

    def __init__(
        self,
        rows: Sequence[LearnedTokens],
        *,
        sequence_length: int,
        pad_id: int,
        name: str = "the data",
        pad_to_multiple_of: int = 1,
        warns: bool = True,
    ):
        self.sequence_length = sequence_length
        self._pad_id = pad_id
        self._rows: list[LearnedTokens] = []
        num_cut = 0
        for row in rows:
            cut_row = LearnedTokens(
                row.ids[: sequence_length + 1],
                row.is_learned[: sequence_length + 1],
            )
            num_cut += len(row.ids) > len(cut_row.ids)
            if cut_row.is_learned[1:].any():
                self._rows.append(cut_row)
        if num_cut and warns:
            logger.warning(
                "%s has %d of %d rows with more than sequence_length=%d tokens, whose ends are "
                "left out; %d rows have no answer before that. Set a larger sequence_length to "
                "keep them.",
                name,
                num_cut,
                len(rows),
                sequence_length,
                len(rows) - len(self._rows),
            )
        if not self._rows:
            raise EmptyCorpusError(
                f"{name} has {len(rows)} rows, and none has an answer within "
                f"sequence_length={sequence_length} tokens; add rows, or set a larger "
                "sequence_length"
            )
        lengths = [len(row.ids) - 1 for row in self._rows]
        self._sequences = _first_fit(lengths, sequence_length)
        multiple = pad_to_multiple_of
        self._num_padded = -(-len(self._sequences) // multiple) * multiple

    def __len__(self) -> int:
        return self._num_padded

    def __repr__(self) -> str:
        return f"PackedRows({len(self._rows)} in {len(self)} of {self.sequence_length} tokens)"

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns several sequences as one batch; those beyond the data are padding."""
        shape = (len(indices), self.sequence_length)
        ids = np.full(shape, self._pad_id, np.int32)
        labels = ids.copy()
        live = np.zeros(shape, bool)
        segment_ids = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        for i, index in enumerate(indices):
            if index >= len(self._sequences):
                continue
            start = 0
            for segment, row_index in enumerate(self._sequences[index]):
                row = self._rows[row_index]
                end = start + len(row.ids) - 1
                is_learned = row.is_learned[1:]
                ids[i, start:end] = row.ids[:-1]
                labels[i, start:end] = np.where(
                    is_learned, row.ids[1:], self._pad_id
                )
                live[i, start:end] = is_learned
                segment_ids[i, start:end] = segment + 1
                positions[i, start:end] = np.arange(end - start)
                start = end
        return {
            "input_ids": ids,
            "target_labels": labels,
            "live_targets": live,
            "input_segment_ids": segment_ids,
            "input_positions": positions,
        }


def _first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Returns the rows of each sequence: each row is in the first open one that has room."""
    sequences: list[list[int]] = []
    open_sequences: dict[int, int] = {}  # the room that is left
    for row, length in enumerate(lengths):
        sequence = None
        for open_sequence, room_left in open_sequences.items():
            if length <= room_left:
                sequence = open_sequence
                break
        if sequence is None:
            sequence = len(sequences)
            sequences.append([])
            open_sequences[sequence] = room
        sequences[sequence].append(row)
        open_sequences[sequence] -= length
        if len(open_sequences) > _OPEN_SEQUENCES:
            fullest = min(open_sequences, key=lambda i: open_sequences[i])
            del open_sequences[fullest]
    return sequences


# Rows.


class _Split(NamedTuple):
    train: list[LearnedTokens]
    held_out: list[LearnedTokens]


@dataclasses.dataclass(frozen=True)
class _Request:
    """Rows to tokenize; two are equal if the tokens are. Training and evaluation share them."""

    key: tuple[object, ...]
    records: Any = dataclasses.field(compare=False)
    tokenizer: Tokenizer = dataclasses.field(compare=False)
    template: ChatTemplate | None = dataclasses.field(compare=False)


def _rows_of_split(
    data: str | Sequence[str] | Rows,
    tokenizer: Tokenizer,
    template: ConfigOr[ChatTemplate] | None,
    split: Split,
    held_out_fraction: float,
) -> list[LearnedTokens]:
    if not 0 <= held_out_fraction < 1:
        raise InputDatasetError(
            f"held_out_fraction={held_out_fraction} leaves no rows to train on; expected 0 or "
            "more, and less than 1"
        )
    loaded_template = maybe_instantiate(template)
    records: Any
    if isinstance(data, Rows):
        records, fingerprint = data.value, data.description
    else:
        records = read_rows(data)
        fingerprint = records.fingerprint
    tokenizer_key = getattr(tokenizer, "fingerprint", id(tokenizer))
    key = (fingerprint, tokenizer_key, repr(loaded_template))
    rows = _tokenized(_Request(key, records, tokenizer, loaded_template))
    parts = _split(rows, held_out_fraction)
    part = parts.train if split == "train" else parts.held_out
    if not part:
        raise EmptyCorpusError(
            f"{_name(data)} has {len(rows)} rows, and none is in the {split!r} part at "
            f"held_out_fraction={held_out_fraction}; add rows, or change the fraction"
        )
    return part


@functools.lru_cache(2)
def _tokenized(request: _Request) -> list[LearnedTokens]:
    def encode(row: Mapping[str, Any]) -> LearnedTokens:
        return encode_example(
            row, tokenizer=request.tokenizer, template=request.template
        )

    if isinstance(request.records, list):
        rows: list[LearnedTokens] = []
        for i, record in enumerate(request.records):
            try:
                rows.append(encode(record))
            except (InputDatasetError, ChatTemplateError) as error:
                raise InputDatasetError(
                    f"row {i} of the data: {error}"
                ) from error
        return rows
    dataset = request.records.map(encode)  # errors name the file and the line
    return [dataset[i] for i in range(len(dataset))]


def _split(rows: Sequence[LearnedTokens], held_out_fraction: float) -> _Split:
    """Returns two parts, each in order; digests of the tokens choose the held-out rows."""
    num_held_out = round(held_out_fraction * len(rows))
    if held_out_fraction > 0:
        num_held_out = max(1, num_held_out)

    def digest(index: int) -> bytes:
        return hashlib.blake2b(
            rows[index].ids.tobytes(), digest_size=8
        ).digest()

    indices = sorted(range(len(rows)), key=lambda i: (digest(i), i))
    held_out_indices = set(indices[:num_held_out])
    parts = _Split([], [])
    for i, row in enumerate(rows):
        part = parts.held_out if i in held_out_indices else parts.train
        part.append(row)
    return parts


def _name(data: str | Sequence[str] | Rows) -> str:
    if isinstance(data, Rows):
        return "the data"
    return data if isinstance(data, str) else ", ".join(data)
