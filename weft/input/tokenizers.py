"""Tokenizers: bytes, and trained ones of Hugging Face `tokenizers` and SentencePiece.

    tokenizer = config_for_class(HuggingFaceTokenizer).set(
        path="tokenizer.json", eos_token="<|endoftext|>"
    )

For bytes, ids 0 to 255 are the bytes, and two more ids are special. A model's bits per byte then
follow exactly from its cross-entropy. Trained tokenizers need the extra `text`. The text of a
document never encodes to special tokens, even if it spells one; that of a prompt or a chat template
does, with `parse_special=True`. Inputs also take the path of a tokenizer's file alone.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeGuard

import numpy as np
from jaxtyping import Int

from weft._lazy import import_extra
from weft.config import ConfigOr, maybe_instantiate
from weft.errors import MissingExtraError, TokenizerError, describe_error
from weft.serialization.untrusted import check_local_path, open_file

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Interface of tokenizers.

    Optional members are `encode_batch`, a faster `encode` of a list of texts; `fingerprint`, a
    string that changes with the ids of texts, which enables caching of tokens; and `bos_ids`, a
    tuple of the tokens that begin a text, see `with_bos`. `encode` may have an argument
    `parse_special`, see `encode_prompt`.

    Attributes:
        eos_id: Separates documents; never an id of text.
        pad_id: Padding; never an id of text.
        vocab_size: Exclusive upper bound of all ids.
        token_num_bytes: `Int[np.ndarray, "vocab"]`, bytes of text of each token, after another one;
            see `text_num_bytes` for those of a text.
    """

    eos_id: int
    pad_id: int
    vocab_size: int
    token_num_bytes: np.ndarray

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes a text, without an end."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, without `eos_id` and `pad_id`."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """Interface of tokenizers that find the special tokens that a text spells."""

    def encode(
        self, text: str | bytes, *, parse_special: bool = False
    ) -> np.ndarray:
        """Encodes a text, without an end.

        Args:
            parse_special: Whether a special token that the text spells is encoded as its id, as in
                prompts and chat templates. Documents are read without.
        """
        ...


def parses_special(tokenizer: Tokenizer) -> TypeGuard[PromptTokenizer]:
    """Returns whether `encode` of a tokenizer has the argument `parse_special`."""
    return "parse_special" in inspect.signature(tokenizer.encode).parameters


def encode_prompt(tokenizer: Tokenizer, text: str | bytes) -> np.ndarray:
    """Encodes the text of a prompt, with the special tokens that it spells.

    This is `encode(text, parse_special=True)`, or `encode(text)` of a tokenizer without the
    argument.

    Raises TokenizerError if the text is none.

    >>> encode_prompt(ByteTokenizer(), "a").tolist()
    [97]
    """
    if not isinstance(text, str | bytes):
        raise TokenizerError(
            f"the prompt is of type {type(text).__name__}; expected a string"
        )
    if isinstance(text, str):
        _check_unicode(text)
    if parses_special(tokenizer):
        return tokenizer.encode(text, parse_special=True)
    return tokenizer.encode(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has {text[error.start]!a} at {error.start}, half of a surrogate pair, "
            "which is not a character; read it with the encoding that it was written in"
        ) from error


def until_end(
    tokens: np.ndarray, tokenizer: Tokenizer, end_ids: Sequence[int] = ()
) -> np.ndarray:
    """Returns the tokens before the first one that ends or pads a text.

    Args:
        end_ids: Further ids that end a text, such as that of a turn of a conversation.

    >>> until_end(np.array([5, 6, 7, 8]), ByteTokenizer(), end_ids=(7,)).tolist()
    [5, 6]
    """
    is_end = np.isin(tokens, [tokenizer.eos_id, tokenizer.pad_id, *end_ids])
    ends = np.flatnonzero(is_end)
    if len(ends) == 0:
        return tokens
    return tokens[: ends[0]]


def text_num_bytes(
    tokenizer: Tokenizer, text: str | bytes, ids: np.ndarray
) -> Int[np.ndarray, " tokens"] | None:
    """Returns the number of bytes of the text of each of its ids; their sum is that of the text.

    A token may have other bytes at the start or end of a text, such as a space less. Therefore,
    the sum of `token_num_bytes` is scaled to the length of the text.

    Returns None if the ids do not decode to the text, as when the tokenizer converts it to small
    letters or has no token for one of its characters: a model of the ids does not predict the text,
    and its bits per byte are not defined. The first such text is logged.

    >>> text_num_bytes(ByteTokenizer(), "é!", np.array([195, 169, 33])).tolist()
    [1, 1, 1]
    """
    sizes = tokenizer.token_num_bytes[ids].astype(np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        return sizes
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    decoded = tokenizer.decode(ids)
    # A space may be put before every text.
    if decoded not in (text, f" {text}"):
        _log_lossy(repr(tokenizer), text, decoded)
        return None
    ends = np.cumsum(sizes)
    num_bytes = len(text.encode())
    if len(ends) == 0 or ends[-1] == num_bytes:
        return sizes
    # With integers, the differences are at the first or last tokens that can have them.
    scaled_ends = ends * num_bytes // max(1, ends[-1])
    scaled_ends[-1] = num_bytes
    return np.diff(scaled_ends, prepend=0)


def _log_lossy(tokenizer: str, text: str, decoded: str) -> None:
    if tokenizer in _LOGGED:
        return
    _LOGGED.add(tokenizer)
    first_difference = min(len(text), len(decoded))
    for i, (character, decoded_character) in enumerate(
        zip(text, decoded, strict=False)
    ):
        if character != decoded_character:
            first_difference = i
            break
    context = slice(max(0, first_difference - 8), first_difference + 24)
    logger.warning(
        "%s does not decode every text to itself: it encodes %r and decodes %r. Bits per byte are "
        "not reported, since they are not defined for it; compare cross entropies instead.",
        tokenizer,
        text[context],
        decoded[context],
    )


_LOGGED: set[str] = set()


class _TokenizerWithBos:
    """Tokenizer whose texts begin with further tokens."""

    def __init__(self, tokenizer: Tokenizer, bos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._bos_ids = np.array(bos_ids, np.int32)
        self.bos_ids = tuple(bos_ids)
        self.eos_id = tokenizer.eos_id
        self.pad_id = tokenizer.pad_id
        self.vocab_size = tokenizer.vocab_size
        self.token_num_bytes = tokenizer.token_num_bytes.copy()
        self.token_num_bytes[self._bos_ids] = 0
        fingerprint = getattr(tokenizer, "fingerprint", None)
        self.fingerprint = fingerprint and f"{fingerprint} after {self.bos_ids}"

    def __repr__(self) -> str:
        return f"with_bos({self._tokenizer!r})"

    @property
    def without_bos(self) -> Tokenizer:
        return self._tokenizer

    def encode(
        self, text: str | bytes, *, parse_special: bool = False
    ) -> np.ndarray:
        if parse_special:
            ids = encode_prompt(self._tokenizer, text)
        else:
            ids = self._tokenizer.encode(text)
        return np.concatenate([self._bos_ids, ids])

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        encode_batch = getattr(self._tokenizer, "encode_batch", None)
        if encode_batch is None:
            return [self.encode(text) for text in texts]
        return [
            np.concatenate([self._bos_ids, ids]) for ids in encode_batch(texts)
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids).reshape(-1)
        is_bos = np.isin(ids, self._bos_ids)
        return self._tokenizer.decode(ids[~is_bos])


def bos_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer's own template puts before a text.

    Raises TokenizerError if there are none.
    """
    ids = getattr(tokenizer, "bos_ids", ())
    if not ids:
        raise TokenizerError(
            f"{tokenizer!r} puts no token before a text, so add_bos=True has none to add; leave it "
            "out, or pass a tokenizer whose file has one, in its template or as its bos piece"
        )
    return tuple(ids)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer that puts the beginning of a text before each, as models expect it.

    This is `bos_ids`. The end of a document already precedes the next: if it is also the beginning,
    nothing is added.

    Raises TokenizerError if the tokenizer has no such tokens.
    """
    ids = bos_ids(tokenizer)
    if ids == (tokenizer.eos_id,):
        return tokenizer
    return _TokenizerWithBos(tokenizer, ids)


def without_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer that `with_bos` was called with, or the tokenizer itself."""
    if isinstance(tokenizer, _TokenizerWithBos):
        return tokenizer.without_bos
    return tokenizer


class ByteTokenizer:
    """Tokenizer whose ids are bytes. No text spells its special tokens.

    Attributes:
        eos_id: 256, at the start of each document and after the last one.
        pad_id: 257; never counts as a target.
        vocab_size: 258.
        token_num_bytes: 1 for each byte, 0 for the other two.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!").tolist()
    [195, 169, 33]
    >>> tokenizer.decode([256, 195, 169, 33, 257])
    'é!'
    """

    eos_id = 256
    pad_id = 257
    vocab_size = 258
    token_num_bytes = (np.arange(vocab_size) < eos_id).astype(np.int32)
    fingerprint = "bytes"

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def encode(
        self, text: str | bytes, *, parse_special: bool = False
    ) -> np.ndarray:
        """Encodes a text as `Int32[np.ndarray, "bytes"]`, without an end."""
        del parse_special
        if isinstance(text, str):
            text = text.encode()
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, without `eos_id` and `pad_id`; invalid UTF-8 becomes U+FFFD."""
        ids = np.asarray(ids).reshape(-1)
        text = ids[ids < 256].astype(np.uint8).tobytes()
        return text.decode("utf-8", errors="replace")


_MAX_NUM_IDS = 2**24


class _FileTokenizer:
    """Base of tokenizers with a file and two special ids, which `encode` does not append.

    The ids of its tokens may have holes: new ids follow the largest one.

    Args:
        eos_token: Token that separates documents. None: a new id after the others.
        pad_token: Padding token. None: a new id after the others.

    Raises:
        TokenizerError: If the file cannot be loaded, lacks one of the tokens, or has an id that no
            model has.
        MissingExtraError: If the required package is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ):
        self._arguments = (path, eos_token, pad_token)
        if not isinstance(path, str | os.PathLike):
            # `open` accepts the descriptor of an open file, and closes it.
            raise TokenizerError(
                f"a tokenizer is read from a path, but got {path!r}; pass the path of its file"
            )
        try:
            with open_file(path) as file:
                content = file.read()
        except OSError as error:
            raise TokenizerError(
                f"cannot read the tokenizer {path} ({error.strerror or error}); pass the path "
                "of its file"
            ) from error
        with self._library_errors("cannot read a text"):
            self.vocab_size = self._num_tokens = self._load(content)
        if self._num_tokens == 0:
            raise TokenizerError(
                f"{path} has no tokens; pass the file of a trained tokenizer"
            )
        if self._num_tokens > _MAX_NUM_IDS:
            raise TokenizerError(
                f"{path} has a token with the id {self._num_tokens - 1}; expected ids below "
                f"{_MAX_NUM_IDS}, as a model has a row for each id: number its tokens from 0"
            )
        self.eos_id = self._special_id(path, "eos_token", eos_token)
        self.pad_id = self._special_id(path, "pad_token", pad_token)
        special = f"{type(self).__name__} {self.eos_id} {self.pad_id} "
        self.fingerprint = special + hashlib.sha256(content).hexdigest()

    def __reduce__(self):
        path, eos_token, pad_token = self._arguments
        return partial(
            type(self), path, eos_token=eos_token, pad_token=pad_token
        ), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments[0]!r}, {self.vocab_size} tokens)"

    def _special_id(self, path: str, name: str, token: str | None) -> int:
        if token is None:
            self.vocab_size += 1
            return self.vocab_size - 1
        token_id = self._token_id(token)
        if token_id is None:
            raise TokenizerError(
                f"{path} has no token {token!r} to be the {name}; it has {self._examples()}: "
                f"name one of its special tokens, or omit {name} for a new id"
            )
        return token_id

    def encode(
        self, text: str | bytes, *, parse_special: bool = False
    ) -> np.ndarray:
        """Encodes a text, without an end: `Int32[np.ndarray, "tokens"]`.

        Args:
            parse_special: Whether a special token that the text spells is encoded as its id, as
                transformers does. Documents are read without, prompts and chat templates with it.
        """
        if not parse_special:
            return self.encode_batch([text])[0]
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(
                    f"the prompt is not text in UTF-8: byte {error.start} is "
                    f"0x{text[error.start]:02x}; pass a string, or its bytes in UTF-8"
                ) from error
        with self._library_errors("cannot encode a text"):
            return np.array(self._encode_prompt(text), np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Encodes several texts on all cores. See `encode`."""
        decoded_texts: list[str] = []
        for text in texts:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            decoded_texts.append(text)
        with self._library_errors("cannot encode a text"):
            return [
                np.array(ids, np.int32) for ids in self._encode(decoded_texts)
            ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, without `eos_id` and `pad_id`."""
        ids = np.asarray(ids).reshape(-1)
        is_text = (ids >= 0) & (ids < self._num_tokens)
        is_text &= (ids != self.eos_id) & (ids != self.pad_id)
        with self._library_errors("cannot decode a text"):
            return self._decode(ids[is_text].tolist())

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """The tokens that the file's own template puts before a text, if any."""
        with self._library_errors("cannot apply its template"):
            return tuple(self._tokens_before_text())

    @contextlib.contextmanager
    def _library_errors(self, fault: str) -> Iterator[None]:
        """Converts errors of the library, such as a panic of Rust, to TokenizerError."""
        try:
            yield
        except (TokenizerError, MissingExtraError):
            raise
        except BaseException as error:
            if (
                isinstance(error, Exception)
                or type(error).__name__ == "PanicException"
            ):
                raise TokenizerError(
                    f"{self._arguments[0]} {fault}: {describe_error(error)}; pass the "
                    "original file of the tokenizer"
                ) from error
            raise

    @cached_property
    def token_num_bytes(self) -> np.ndarray:
        """Bytes of text of each token between two others; 0 for special ones."""
        sizes = np.zeros(self.vocab_size, np.int32)
        with self._library_errors("cannot decode its tokens"):
            anchor = self._anchor()
            anchor_num_bytes = len(self._decode([anchor, anchor]).encode())
            ids = self._token_ids()
            texts = self._decode_batch([[anchor, i, anchor] for i in ids])
            for i, text in zip(ids, texts, strict=True):
                if "\ufffd" in text:  # what a part of a character decodes to
                    sizes[i] = self._num_bytes(i)
                else:
                    sizes[i] = len(text.encode()) - anchor_num_bytes
        sizes[[self.eos_id, self.pad_id, *self._unknown_ids()]] = 0
        return np.maximum(sizes, 0)

    def _anchor(self) -> int:
        """Returns the id of a token that is some text of its own."""
        for i in self._token_ids():
            text = self._decode([i, i])
            if (
                len(text) > 1
                and "\ufffd" not in text
                and i not in (self.eos_id, self.pad_id)
            ):
                return i
        return 0

    def _load(self, content: bytes) -> int:
        raise NotImplementedError(type(self))

    def _token_ids(self) -> Sequence[int]:
        """Returns the ids of all tokens."""
        raise NotImplementedError(type(self))

    def _token_id(self, token: str) -> int | None:
        raise NotImplementedError(type(self))

    def _examples(self) -> str:
        raise NotImplementedError(type(self))

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        raise NotImplementedError(type(self))

    def _encode_prompt(self, text: str) -> Sequence[int]:
        """Encodes a text with the special tokens that it spells."""
        raise NotImplementedError(type(self))

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError(type(self))

    def _tokens_before_text(self) -> list[int]:
        raise NotImplementedError(type(self))

    def _decode_batch(self, ids: list[list[int]]) -> list[str]:
        raise NotImplementedError(type(self))

    def _num_bytes(self, index: int) -> int:
        """Returns the number of bytes of a token that may be a part of a character."""
        raise NotImplementedError(type(self))

    def _unknown_ids(self) -> list[int]:
        """Returns the ids that stand for text without a token."""
        raise NotImplementedError(type(self))


class HuggingFaceTokenizer(_FileTokenizer):
    """A `tokenizer.json` of Hugging Face's `tokenizers`.

    Args:
        special_tokens: Tokens that are special, too. One that the file lacks gets a new id.
    """

    def __init__(
        self,
        path: str,
        *,
        eos_token: str | None = None,
        pad_token: str | None = None,
        special_tokens: Sequence[str] = (),
    ):
        self._special_tokens = tuple(special_tokens)
        self._newly_special: list[str] = []
        super().__init__(path, eos_token=eos_token, pad_token=pad_token)
        if self._newly_special:
            self.fingerprint += f" {self._newly_special}"

    def __reduce__(self):
        path, eos_token, pad_token = self._arguments
        return partial(
            type(self),
            path,
            eos_token=eos_token,
            pad_token=pad_token,
            special_tokens=self._special_tokens,
        ), ()

    def _load(self, content: bytes) -> int:
        tokenizers = import_extra(
            "tokenizers", "text", needed_by="this tokenizer"
        )
        with self._library_errors("is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._mark_special_tokens()
        # The input pads and truncates; text must not encode to special tokens.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        # A byte of byte-level tokens is one character; others write spaces as characters.
        self._is_byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        # There may be fewer tokens than ids.
        return max(self._token_ids(), default=-1) + 1

    def _mark_special_tokens(self) -> None:
        """Makes the named tokens special, so that no document yields them."""
        _, eos_token, pad_token = self._arguments
        added_tokens = self._tokenizer.get_added_tokens_decoder().values()
        token_by_content = {token.content: token for token in added_tokens}
        for content in (*self._special_tokens, eos_token, pad_token):
            token = token_by_content.get(content)
            if token is None:
                if content in self._special_tokens:
                    self._tokenizer.add_special_tokens([content])
                    self._newly_special.append(content)
            elif not token.special:
                token.special = True
                self._tokenizer.add_special_tokens([token])
                self._newly_special.append(token.content)

    def _token_ids(self) -> Sequence[int]:
        return sorted(
            self._tokenizer.get_vocab(with_added_tokens=True).values()
        )

    def _token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _examples(self) -> str:
        added_tokens = list(self._tokenizer.get_added_tokens_decoder().values())
        texts = [repr(token.content) for token in added_tokens[:8]]
        return ", ".join(texts) or "no special tokens"

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    @cached_property
    def _prompt_tokenizer(self) -> Any:
        """The tokenizer of prompts: a copy, as threads may encode documents meanwhile."""
        tokenizers = import_extra(
            "tokenizers", "text", needed_by="this tokenizer"
        )
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        # It adds tokens, which `encode` leaves out, and cuts spaces off the tokens' offsets.
        tokenizer.post_processor = tokenizers.processors.Sequence([])
        return tokenizer

    def _encode_prompt(self, text: str) -> Sequence[int]:
        return self._prompt_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a prompt, and returns where its tokens are in the text.

        Returns the ids of `encode(text, parse_special=True)`, and the index of the first character
        of each token and that after its last one, `Int32[np.ndarray, "tokens 2"]`.
        """
        _check_unicode(text)
        with self._library_errors("cannot encode a text"):
            encoding = self._prompt_tokenizer.encode(
                text, add_special_tokens=False
            )
        ids = np.array(encoding.ids, np.int32)
        return ids, np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _tokens_before_text(self) -> list[int]:
        text = self._decode([self._anchor()]) or "a"
        ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        text_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(len(ids) - len(text_ids) + 1):
            if ids[start : start + len(text_ids)] == text_ids:
                return ids[:start]
        return []

    def _decode_batch(self, ids: list[list[int]]) -> list[str]:
        return self._tokenizer.decode_batch(ids, skip_special_tokens=True)

    def _num_bytes(self, index: int) -> int:
        token = self._tokenizer.id_to_token(index)
        if self._is_byte_level:
            return len(token)
        return _piece_num_bytes(token)

    def _unknown_ids(self) -> list[int]:
        unknown_token = getattr(self._tokenizer.model, "unk_token", None)
        if not unknown_token:
            return []
        unknown_id = self._token_id(unknown_token)
        return [] if unknown_id is None else [unknown_id]


# A character for private use, which no model of SentencePiece joins with the next one.
_GUARD = "\ue000"


class SentencePieceTokenizer(_FileTokenizer):
    """A model of SentencePiece, `tokenizer.model`.

    Without `eos_token` or `pad_token`, the model's own ones are used if they exist.

    Args:
        special_tokens: The ids of special tokens that the model has no piece for.
        adds_bos: Whether a text begins with the model's beginning of a text, if it has one.
    """

    def __init__(
        self,
        path: str,
        *,
        eos_token: str | None = None,
        pad_token: str | None = None,
        special_tokens: Mapping[str, int] | None = None,
        adds_bos: bool = True,
    ):
        self._adds_bos = adds_bos
        self._added_ids = dict(special_tokens or {})
        super().__init__(path, eos_token=eos_token, pad_token=pad_token)
        if self._added_ids:
            self.fingerprint += f" {self._added_ids}"

    def __reduce__(self):
        path, eos_token, pad_token = self._arguments
        return partial(
            type(self),
            path,
            eos_token=eos_token,
            pad_token=pad_token,
            special_tokens=self._added_ids,
            adds_bos=self._adds_bos,
        ), ()

    def _load(self, content: bytes) -> int:
        sentencepiece = import_extra(
            "sentencepiece", "text", needed_by="this tokenizer"
        )
        with self._library_errors("is not a SentencePiece model"):
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=content
            )
        self._num_pieces = self._processor.get_piece_size()
        return max([self._num_pieces - 1, *self._added_ids.values()]) + 1

    def _token_ids(self) -> Sequence[int]:
        return range(self._num_pieces)

    def _special_id(self, path: str, name: str, token: str | None) -> int:
        model_id = (
            self._processor.eos_id()
            if name == "eos_token"
            else self._processor.pad_id()
        )
        if token is None and model_id >= 0:
            return model_id
        return super()._special_id(path, name, token)

    def _token_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        token_id = self._processor.piece_to_id(token)
        if (
            self._processor.id_to_piece(token_id) != token
        ):  # that of the unknown token
            return None
        return token_id

    def _examples(self) -> str:
        ids = range(min(8, self._num_pieces))
        return ", ".join(repr(self._processor.id_to_piece(i)) for i in ids)

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return self._processor.encode(texts, out_type=int)

    @cached_property
    def _special_ids(self) -> Mapping[str, int]:
        """The ids of the pieces that no text is encoded as, and of the named tokens."""
        ids = dict(self._added_ids)
        for i in range(self._num_pieces):
            is_named = i in (self.eos_id, self.pad_id)
            if is_named or self._processor.is_control(i):
                ids[self._processor.id_to_piece(i)] = i
        return ids

    def _encode_continuation(self, text: str) -> list[int]:
        """Encodes a text without the space that the model puts before one."""
        guard_ids = self._processor.encode(_GUARD, out_type=int)
        ids = self._processor.encode(_GUARD + text, out_type=int)
        ids = ids[len(guard_ids) :]
        first_ids = self._processor.encode(text[:1], out_type=int)
        unknown_id = self._processor.unk_id()
        if first_ids[-1:] == [unknown_id]:
            # Unknown characters in a row, here with the guard, are one token.
            ids = [unknown_id, *ids]
        return ids

    def _encode_prompt(self, text: str) -> Sequence[int]:
        # Longer tokens first, as one may begin with another.
        tokens = sorted(self._special_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, tokens))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        # The space before a text is only put before one without a special token at its start.
        ids = list(self._processor.encode(parts[0], out_type=int))
        for token, continuation in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(self._special_ids[token])
            ids.extend(self._encode_continuation(continuation))
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode([i for i in ids if i < self._num_pieces])

    def _tokens_before_text(self) -> list[int]:
        bos_id = self._processor.bos_id()
        return [bos_id] if bos_id >= 0 and self._adds_bos else []

    def _decode_batch(self, ids: list[list[int]]) -> list[str]:
        return self._processor.decode(ids)

    def _num_bytes(self, index: int) -> int:
        return _piece_num_bytes(self._processor.id_to_piece(index))

    def _unknown_ids(self) -> list[int]:
        return [self._processor.unk_id()]


def _piece_num_bytes(piece: str) -> int:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1  # a byte of an unknown character
    return len(piece.replace("▁", " ").encode())


def as_tokenizer(
    tokenizer: ConfigOr[Tokenizer] | str, *, add_bos: bool = False
) -> Tokenizer:
    """Returns a tokenizer from its config, or from the path of its file; see also `with_bos`.

    A path that ends in `.json` is that of a `HuggingFaceTokenizer`, one that ends in `.model` that
    of a `SentencePieceTokenizer`.

    Raises TokenizerError if the file cannot be loaded, or its name has another ending.

    >>> as_tokenizer(ByteTokenizer()).vocab_size
    258
    """
    if add_bos:
        return with_bos(as_tokenizer(tokenizer))
    if not isinstance(tokenizer, str):
        return maybe_instantiate(tokenizer)
    check_local_path(tokenizer, "tokenizer")
    _, suffix = os.path.splitext(tokenizer)
    classes: dict[str, Any] = {
        ".json": HuggingFaceTokenizer,
        ".model": SentencePieceTokenizer,
    }
    tokenizer_class = classes.get(suffix.lower())
    if tokenizer_class is not None:
        return tokenizer_class(tokenizer)
    raise TokenizerError(
        f"{tokenizer!r} is not the path of a tokenizer; pass that of a tokenizer.json of Hugging "
        "Face, or of a SentencePiece model, *.model"
    )
