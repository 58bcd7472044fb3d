"""Rows of preferences and of prompts, as arrays of tokens.

A file has a row of JSON in each line, or is of Parquet. Texts and messages are written as those of
`weft.input.chat.encode_example`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from weft.config import ConfigOr, maybe_instantiate
from weft.errors import InputDatasetError, did_you_mean
from weft.input.chat import (
    ChatTemplate,
    LearnedTokens,
    check_says_something,
    checked_template,
    encode_answer,
    plain_tokens,
    row_messages,
)
from weft.input.corpus import Split
from weft.input.datasets import read_rows
from weft.input.in_memory import Arrays
from weft.input.record_dataset import RecordDataset
from weft.input.splits import split_part
from weft.input.text import BYTES
from weft.input.tokenizers import Tokenizer, as_tokenizer

logger = logging.getLogger(__name__)

_LENGTH_MULTIPLE = 8


def encode_preference(
    row: Mapping[str, Any],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> tuple[LearnedTokens, LearnedTokens]:
    """Returns the tokens of a prompt with the chosen answer, and of it with the rejected one.

    Tokens of the answers are those that are learned. See `weft.input.chat.encode_example` for
    `template`.

    Raises InputDatasetError for a row of another form, and ChatTemplateError if the template cannot
    write it.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> row = {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}
    >>> chosen, rejected = encode_preference(row, tokenizer=ByteTokenizer())
    >>> chosen.ids[chosen.is_learned].tolist(), rejected.ids[rejected.is_learned].tolist()
    ([50, 256], [51, 256])
    """
    chosen, rejected = _field(row, "chosen"), _field(row, "rejected")
    if type(chosen) is not type(rejected):
        raise InputDatasetError(
            f"'chosen' of the row is of type {type(chosen).__name__}, and 'rejected' of type "
            f"{type(rejected).__name__}; expected two strings, or two lists of messages"
        )
    prompt = row.get("prompt")
    if prompt is None and not isinstance(chosen, str):
        prompt, chosen, rejected = _without_shared_turns(chosen, rejected)
    elif prompt is None:
        _field(row, "prompt")  # raises
    elif isinstance(prompt, str) and not isinstance(chosen, str):
        raise InputDatasetError(
            "'prompt' of the row is a string, and 'chosen' and 'rejected' are lists of messages; "
            "leave 'prompt' out if they are whole conversations, or write it as a list, too"
        )
    answers = {
        **row,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
    }
    check_says_something(answers, "chosen")
    chosen_tokens, rejected_tokens = (
        encode_answer(answers, key, tokenizer=tokenizer, template=template)
        for key in ("chosen", "rejected")
    )
    if np.array_equal(chosen_tokens.ids, rejected_tokens.ids):
        raise InputDatasetError(
            "'chosen' and 'rejected' of the row are the same, so that nothing is preferred; leave "
            "the row out"
        )
    return chosen_tokens, rejected_tokens


def encode_prompt_of(
    row: Mapping[str, Any],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> Int32[np.ndarray, " tokens"]:
    """Returns the tokens of the `prompt` of a row, after which an answer begins.

    The prompt is a text or a list of messages, see `weft.input.chat.encode_example`.

    Raises InputDatasetError for a row without a prompt, and ChatTemplateError if the template
    cannot write it.
    """
    prompt = _field(row, "prompt")
    if isinstance(prompt, str) and template is None:
        # The tokens before an answer, which is only the end.
        tokens = plain_tokens(tokenizer, prompt, "")
        ids = tokens.ids[~tokens.is_learned]
        if len(ids) == 0:
            raise InputDatasetError(
                "'prompt' of the row is empty, and the tokenizer puts no token before a text; "
                "expected a text"
            )
        return ids
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    turns = row_messages({"prompt": prompt}, "prompt")
    _check_is_question(turns)
    return checked_template(template).encode(
        turns, tokenizer=tokenizer, add_generation_prompt=True
    )


def _field(row: Mapping[str, Any], name: str) -> Any:
    if not isinstance(row, Mapping):
        raise InputDatasetError(
            f"the row is of type {type(row).__name__}; expected a dict with 'prompt', and for a "
            "preference 'chosen' and 'rejected'"
        )
    value = row.get(name)
    if value is None:
        names = sorted(map(str, row))
        raise InputDatasetError(
            f"the row has no {name!r}, it has {names}. {did_you_mean(name, names)}"
        )
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, str | list) or value == []:
        raise InputDatasetError(
            f"{name!r} of the row is {value!r:.60}; expected a string, or a list of messages, "
            "which are dicts of 'role' and 'content'"
        )
    return value


def _check_is_question(prompt: Sequence[Mapping[str, Any]]) -> None:
    turn = prompt[-1]
    if turn.get("role") == "assistant":
        raise InputDatasetError(
            "'prompt' of the row ends with a turn of the assistant, which is to answer; leave that "
            "turn out"
        )
    if turn.get("role") == "user" and not str(turn["content"]).strip():
        raise InputDatasetError(
            "'prompt' of the row ends with a turn of the user that is empty; expected a text"
        )


def _without_shared_turns(
    chosen: Sequence[Any], rejected: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the turns with which two conversations begin, and what follows them in each."""
    num_shared = 0
    for turn, other_turn in zip(chosen, rejected, strict=False):
        if turn != other_turn:
            break
        num_shared += 1
    # The last turn is an answer, even if the other conversation has more turns.
    num_shared = min(num_shared, len(chosen) - 1, len(rejected) - 1)
    if num_shared == 0:
        raise InputDatasetError(
            "'chosen' and 'rejected' of the row begin with different turns, and there is no "
            "'prompt'; expected a prompt that both answer"
        )
    return (
        list(chosen[:num_shared]),
        list(chosen[num_shared:]),
        list(rejected[num_shared:]),
    )


def preference_arrays(
    data: str,
    *,
    part: Split | None = None,
    held_out: float = 0.1,
    tokenizer: ConfigOr[Tokenizer] | str = BYTES,
    template: ConfigOr[ChatTemplate] | None = None,
    max_length: int = 1024,
) -> Arrays:
    """Reads preferences, as the batches of a `weft.hierarchy.PreferenceModel`.

    A row has a `prompt` and two answers, `chosen` and `rejected`, all strings or all lists of
    messages:

        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
        {"prompt": [{"role": "user", "content": "2 + 2?"}],
         "chosen": [{"role": "assistant", "content": "4"}],
         "rejected": [{"role": "assistant", "content": "5"}]}

    Without a `prompt`, `chosen` and `rejected` are conversations with the same beginning.

    Args:
        data: a file of JSON lines or Parquet.
        part: the rows to train on, or those held out; None for all.
        held_out: the fraction of rows that are held out.
        tokenizer: may be the path of a tokenizer's file; see `as_tokenizer`.
        template: writes messages; None for rows of texts.
        max_length: the largest number of tokens of a prompt with an answer. Longer rows are left
            out, with a warning.

    Returns arrays with the axes `pairs`, 2 (the chosen answer, the rejected one) and `time`:
    `input_ids`, `target_labels` and `live_targets`.

    Raises:
        InputReadError: if the file cannot be read, or a row is not a preference; names the line.
        InputDatasetError: if no row is left.
        EmptyCorpusError: if there is no row.
    """
    loaded = as_tokenizer(tokenizer)
    loaded_template = maybe_instantiate(template)

    def encode(row: Any) -> tuple[LearnedTokens, LearnedTokens]:
        return encode_preference(
            row, tokenizer=loaded, template=loaded_template
        )

    def length_of(pair: tuple[LearnedTokens, LearnedTokens]) -> int:
        return max(len(answer.ids) for answer in pair)

    pairs = _short_rows(
        _rows_of_part(data, part, held_out).map(encode),
        length_of,
        max_length,
        data,
    )
    longest = max(length_of(pair) for pair in pairs)
    # Targets are one shorter than the tokens.
    length = _rounded_up(longest - 1)
    pad_id = loaded.pad_id
    input_ids = np.full((len(pairs), 2, length), pad_id, np.int32)
    target_labels = input_ids.copy()
    live_targets = np.zeros(input_ids.shape, bool)
    for i, pair in enumerate(pairs):
        for j, answer in enumerate(pair):
            num_targets = len(answer.ids) - 1
            input_ids[i, j, :num_targets] = answer.ids[:-1]
            target_labels[i, j, :num_targets] = answer.ids[1:]
            live_targets[i, j, :num_targets] = answer.is_learned[1:]
    return Arrays(
        {
            "input_ids": input_ids,
            "target_labels": target_labels,
            "live_targets": live_targets,
        }
    )


def prompt_arrays(
    data: str,
    *,
    part: Split | None = None,
    held_out: float = 0.1,
    tokenizer: ConfigOr[Tokenizer] | str = BYTES,
    template: ConfigOr[ChatTemplate] | None = None,
    max_length: int = 512,
) -> Arrays:
    """Reads prompts that a model is to answer.

    Args:
        data: a file of JSON lines or Parquet, whose rows have a `prompt`, a string or messages.
        max_length: the largest number of tokens of a prompt. Longer rows are left out, with a
            warning.

    Other arguments are those of `preference_arrays`.

    Returns `prompt_ids`, `Int32["rows time"]`, padded at the end, `prompt_length`, `Int32["rows"]`,
    and `row`, `Int32["rows"]`, the number of the row in `read_rows(data)`.

    Raises:
        InputReadError: if the file cannot be read, or a row has no prompt; names the line.
        InputDatasetError: if no row is left.
        EmptyCorpusError: if there is no row.
    """
    loaded = as_tokenizer(tokenizer)
    loaded_template = maybe_instantiate(template)

    def encode(row: Any) -> np.ndarray:
        return encode_prompt_of(row, tokenizer=loaded, template=loaded_template)

    numbers = np.arange(len(read_rows(data)))
    if part is not None:
        numbers = split_part(numbers, part, held_out=held_out)
    rows = read_rows(data).map(encode)
    numbered = [(number, rows[number]) for number in numbers.tolist()]
    numbered = _short_rows(
        numbered, lambda prompt: len(prompt[1]), max_length, data
    )
    length = _rounded_up(max(len(ids) for _, ids in numbered))
    prompt_ids = np.full((len(numbered), length), loaded.pad_id, np.int32)
    for i, (_, ids) in enumerate(numbered):
        prompt_ids[i, : len(ids)] = ids
    lengths = [len(ids) for _, ids in numbered]
    return Arrays(
        {
            "prompt_ids": prompt_ids,
            "prompt_length": np.array(lengths, np.int32),
            "row": np.array([number for number, _ in numbered], np.int32),
        }
    )


def _rows_of_part(
    data: str, part: Split | None, held_out: float
) -> RecordDataset:
    rows = read_rows(data)
    if part is None:
        return rows
    return split_part(rows, part, held_out=held_out)


def _short_rows(
    rows: Any, length_of: Callable[[Any], int], max_length: int, data: str
) -> list[Any]:
    """Returns the rows that are not too long; raises InputDatasetError if there is none."""
    all_rows = [rows[i] for i in range(len(rows))]
    short_rows = [row for row in all_rows if length_of(row) <= max_length]
    num_long = len(all_rows) - len(short_rows)
    if not short_rows:
        raise InputDatasetError(
            f"{data} has {len(all_rows)} rows, all with more than max_length={max_length} tokens; "
            "add shorter ones, or raise max_length"
        )
    if num_long:
        logger.warning(
            "%d of %d rows of %s have more than max_length=%d tokens, and are left out",
            num_long,
            len(all_rows),
            data,
            max_length,
        )
    return short_rows


def _rounded_up(length: int) -> int:
    return -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
