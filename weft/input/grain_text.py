"""Functions on Grain datasets of text: tokens of fields, turns of conversations, bytes of tokens.

    ds = tokenize_turns(conversations, vocab=vocab)
    ds = streaming_packing(ds, vocab=vocab, max_len=1024)

A vocabulary is a `weft.input.tokenizers.Tokenizer`, or its config.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.config import ConfigOr, maybe_instantiate
from weft.errors import InputDatasetError, did_you_mean
from weft.input import file_cache, grain, packing
from weft.input.chat import ChatTemplate, encode_example
from weft.input.tokenizers import (
    Tokenizer,
    bos_ids,
    encode_prompt,
    text_num_bytes,
)

Substitutions = Sequence[tuple[str, str]]
TURN_TEMPLATES = {
    "system": "{content}\n",
    "user": "{content}\n",
    "assistant": "{content}",
}

_CONTENT = "{content}"


def with_regex_mapping(
    vocab: ConfigOr[Tokenizer],
    *,
    encode_mapping: Substitutions = (),
    decode_mapping: Substitutions = (),
) -> Tokenizer:
    r"""Returns a vocabulary that substitutes in texts before encoding and after decoding.

    Args:
        encode_mapping: Regular expressions and their replacements, as for `re.sub`, in order.
        decode_mapping: Those of decoded texts.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> mapping = {"encode_mapping": [(r"\n+", "|")], "decode_mapping": [(r"\|", "\n")]}
    >>> vocab = with_regex_mapping(ByteTokenizer(), **mapping)
    >>> vocab.encode("a\n\nb").tolist(), vocab.decode([97, 124, 98])
    ([97, 124, 98], 'a\nb')
    """
    return _MappedTokenizer(
        maybe_instantiate(vocab), encode_mapping, decode_mapping
    )


class _MappedTokenizer:
    def __init__(
        self, vocab: Tokenizer, encode: Substitutions, decode: Substitutions
    ):
        self._vocab, self._encode_mapping, self._decode_mapping = (
            vocab,
            encode,
            decode,
        )
        self.eos_id, self.pad_id = vocab.eos_id, vocab.pad_id
        self.vocab_size, self.token_num_bytes = (
            vocab.vocab_size,
            vocab.token_num_bytes,
        )
        self.bos_ids = getattr(vocab, "bos_ids", ())

    def __repr__(self) -> str:
        return f"with_regex_mapping({self._vocab!r})"

    def encode(
        self, text: str | bytes, *, parse_special: bool = False
    ) -> np.ndarray:
        words = text.decode("utf-8") if isinstance(text, bytes) else text
        words = _substitute(self._encode_mapping, words)
        if parse_special:
            return encode_prompt(self._vocab, words)
        return self._vocab.encode(words)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return _substitute(self._decode_mapping, self._vocab.decode(ids))


def _substitute(mapping: Substitutions, text: str) -> str:
    for pattern, replacement in mapping:
        text = re.sub(pattern, replacement, text)
    return text


def tokenize(
    ds: grain.Dataset,
    *,
    vocab: Mapping[str, ConfigOr[Tokenizer]],
    with_eos: bool = False,
) -> grain.Dataset:
    """Replaces texts in examples by their tokens, `Int32["tokens"]`.

    Args:
        vocab: The vocabulary of each field to tokenize; others are kept.
        with_eos: Whether to append `eos_id`.

    Returns a dataset that raises `InputDatasetError` for an example without such a text.

    >>> import grain
    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"text": "ab", "id": 7}])
    >>> tokenize(ds, vocab={"text": ByteTokenizer()}, with_eos=True)[0]
    {'text': array([ 97,  98, 256], dtype=int32), 'id': 7}
    """
    loaded: dict[str, Tokenizer] = {
        key: maybe_instantiate(one) for key, one in vocab.items()
    }

    def fn(example: Mapping[str, Any]) -> dict[str, Any]:
        tokens = {}
        for key, tokenizer in loaded.items():
            text = file_cache.document_text(
                example, key, advice="name one of these in vocab"
            )
            ids = tokenizer.encode(text)
            if with_eos:
                ids = np.append(ids, np.int32(tokenizer.eos_id))
            tokens[key] = ids
        return {**example, **tokens}

    return ds.map(fn)


def num_bytes(
    ids: np.ndarray | Sequence[int],
    *,
    vocab: Tokenizer,
    newlines_replaced_with: str | None = None,
) -> int:
    r"""Returns the number of bytes of the texts that ids decode to, without special ones.

    Args:
        newlines_replaced_with: The string, such as "<n>", that replaced each newline before
            encoding, and counts as one byte.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> vocab = ByteTokenizer()
    >>> ids = [*vocab.encode("a<n>é"), vocab.eos_id, -1]
    >>> num_bytes(ids, vocab=vocab), num_bytes(ids, vocab=vocab, newlines_replaced_with="<n>")
    (6, 4)
    """
    ids = np.asarray(ids, np.int32)
    ids = ids[ids >= 0]
    newline = newlines_replaced_with or "\n"
    excess = len(newline.encode()) - 1
    ends = np.flatnonzero(np.isin(ids, [vocab.eos_id, vocab.pad_id]))
    total = 0
    for document in np.split(ids, ends):
        text = vocab.decode(document)
        if "\ufffd" in text:  # what a part of a character decodes to
            total += int(vocab.token_num_bytes[document].sum())
        else:
            total += len(text.encode())
        total -= excess * text.count(newline)
    return total


def count_num_bytes(
    ds: grain.Dataset,
    *,
    input_key: str,
    vocab: ConfigOr[Tokenizer],
    output_key: str,
    newlines_replaced_with: str | None = None,
) -> grain.Dataset:
    """Adds the `num_bytes` of a field of tokens to examples, as `Int32[""]`.

    Args:
        input_key: The field of tokens.
        output_key: The field to add or replace.

    >>> import grain
    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"ids": [97, 98, 256]}])
    >>> count_num_bytes(ds, input_key="ids", vocab=ByteTokenizer(), output_key="n")[0]["n"].item()
    2
    """
    loaded: Tokenizer = maybe_instantiate(vocab)

    def fn(example: Mapping[str, Any]) -> dict[str, Any]:
        ids = example[input_key]
        n = num_bytes(
            ids, vocab=loaded, newlines_replaced_with=newlines_replaced_with
        )
        return {**example, output_key: np.asarray(n, np.int32)}

    return ds.map(fn)


def tokenize_turns(
    ds: grain.Dataset,
    *,
    vocab: ConfigOr[Tokenizer],
    template: ConfigOr[ChatTemplate] | None = None,
    templates: Mapping[str, str] = TURN_TEMPLATES,
    learned_role: str = "assistant",
    add_bos: bool = False,
) -> grain.Dataset:
    r"""Tokenizes conversations, with the turns of the assistant as the only targets.

    An example has `messages`, a list of dicts of `role` and `content`; or a `prompt`, of the role
    "user", and a `completion` or `response`, of the assistant. With `eos` before the first turn and
    after each of the assistant's:

        inputs   eos Q 1 \n A 1 eos Q 2 \n A 2
        targets  .   . . A  1 eos . . . A  2 eos

    Args:
        template: A chat template, such as that of `weft.interop.load_tokenizer(folder)`, which
            writes the conversation and its beginning instead. Examples are those of
            `weft.input.encode_example`, and may have `tools`.
        templates: The text of a turn by its role, with `{content}`. For the assistant, what
            precedes the content is not a target; what follows it is.
        learned_role: The role of the assistant.
        add_bos: Whether conversations begin with the `weft.input.tokenizers.bos_ids` of the
            vocabulary, instead of `eos`.

    Returns a dataset of dicts of `input_ids` and `target_labels`, `Int32["tokens"]`, where other
    targets are `pad_id`, of `live_targets`, `Bool["tokens"]`, which targets count, and of
    `target_num_bytes`, `Int32["tokens"]`, the bytes of text of each of them. Examples without
    turns, or of another role, raise `InputDatasetError`.

    >>> import grain
    >>> from weft.input.tokenizers import ByteTokenizer
    >>> ds = grain.MapDataset.source([{"prompt": "a", "response": "b"}])
    >>> example = tokenize_turns(ds, vocab=ByteTokenizer())[0]
    >>> example["input_ids"].tolist(), example["target_labels"].tolist()
    ([256, 97, 10, 98], [257, 257, 98, 256])
    """
    loaded: Tokenizer = maybe_instantiate(vocab)
    start_ids = bos_ids(loaded) if add_bos else (loaded.eos_id,)
    start = np.array(start_ids, np.int32)
    if template is not None:
        is_default = templates is TURN_TEMPLATES and learned_role == "assistant"
        if add_bos or not is_default:
            raise InputDatasetError(
                "a chat template writes the beginning and the turns of all roles itself; leave out "
                "add_bos, templates and learned_role, or template"
            )
        return _tokenize_with_template(ds, loaded, maybe_instantiate(template))
    for role, turn_template in templates.items():
        if turn_template.count(_CONTENT) != 1:
            raise InputDatasetError(
                f"the template {turn_template!r} of the role {role!r} does not have {_CONTENT} "
                'once; write for example "User: {content}\\n"'
            )

    def fn(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        conversation = _Conversation(loaded, start)
        for role, content in _turns(example):
            if role not in templates:
                raise InputDatasetError(
                    f"a turn has the unknown role {role!r}; its template is missing. "
                    f"{did_you_mean(role, templates)}"
                )
            prefix, suffix = templates[role].split(_CONTENT)
            if role == learned_role:
                conversation.add(prefix)
                conversation.add_learned(content + suffix)
            else:
                conversation.add(prefix + content + suffix)
        return conversation.example()

    return ds.map(fn)


def _tokenize_with_template(
    ds: grain.Dataset, vocab: Tokenizer, template: ChatTemplate
) -> grain.Dataset:
    def fn(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        ids, is_learned = encode_example(
            example, tokenizer=vocab, template=template
        )
        num_bytes = np.where(is_learned, vocab.token_num_bytes[ids], 0)
        return _next_tokens(ids, is_learned, num_bytes, pad_id=vocab.pad_id)

    return ds.map(fn)


def _next_tokens(
    ids: np.ndarray,
    is_target: np.ndarray,
    num_bytes: np.ndarray,
    *,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """Returns the inputs of a conversation and their targets, the tokens that follow."""
    labels = np.where(is_target, ids, np.int32(pad_id))
    return {
        "input_ids": ids[:-1],
        "target_labels": labels[1:],
        "live_targets": is_target[1:],
        "target_num_bytes": num_bytes[1:],
    }


class _Conversation:
    """Tokens of a conversation, which of them are targets, and the bytes of those."""

    def __init__(self, vocab: Tokenizer, first: np.ndarray):
        self._vocab = vocab
        self._tokens: list[np.ndarray] = []
        self._is_target: list[np.ndarray] = []
        self._num_bytes: list[np.ndarray] = []
        self._append(first, False, np.zeros(len(first)))

    def add(self, text: str) -> None:
        ids = self._vocab.encode(text)
        self._append(ids, False, np.zeros(len(ids)))

    def add_learned(self, text: str) -> None:
        """Adds a text and its end as targets."""
        ids = self._vocab.encode(text)
        num_bytes = text_num_bytes(self._vocab, text, ids)
        if num_bytes is None:
            num_bytes = np.full(len(ids), packing.UNKNOWN_NUM_BYTES)
        self._append(
            np.append(ids, self._vocab.eos_id), True, np.append(num_bytes, 0)
        )

    def _append(
        self, ids: np.ndarray, is_target: bool, num_bytes: np.ndarray
    ) -> None:
        self._tokens.append(ids.astype(np.int32))
        self._is_target.append(np.full(len(ids), is_target))
        self._num_bytes.append(num_bytes.astype(np.int32))

    def example(self) -> dict[str, np.ndarray]:
        ids = np.concatenate(self._tokens)
        is_target = np.concatenate(self._is_target)
        num_bytes = np.concatenate(self._num_bytes)
        return _next_tokens(
            ids, is_target, num_bytes, pad_id=self._vocab.pad_id
        )


def _turns(example: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the role and content of each turn of a conversation."""
    try:
        if "messages" in example:
            turns = [
                (turn["role"], turn["content"]) for turn in example["messages"]
            ]
        else:
            answer = example.get("completion")
            if answer is None:
                answer = example["response"]
            turns = [("user", example["prompt"]), ("assistant", answer)]
        are_strings = [
            isinstance(role, str) and isinstance(content, str)
            for role, content in turns
        ]
        if turns and all(are_strings):
            return turns
    except (KeyError, TypeError, AttributeError):
        pass
    description = f"of type {type(example).__name__}"
    if isinstance(example, Mapping):
        description = f"with {sorted(map(str, example))}"
    raise InputDatasetError(
        f"the example, {description}, has no conversation; expected 'messages', a list of dicts of "
        "'role' and 'content', or a 'prompt' and a 'completion' or 'response', all of them strings"
    )
