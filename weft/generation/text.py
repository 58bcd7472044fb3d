"""Generated text: from tokens to text, where it stops, and what of it can already be shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from weft.input.tokenizers import Tokenizer

# Tokens before the generated ones that are decoded with them: some tokenizers drop the space at
# the start of a text.
_CONTEXT = 4

_INCOMPLETE = "\ufffd"
"""What a part of a character decodes to."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A generated continuation of a prompt.

    Attributes:
        text: the text after the prompt, up to the end or the stop string, without it. Empty if
            there is no tokenizer.
        token_ids: all generated tokens, with the end token, or those of the stop string.
        finish_reason: "stop" at an end token or a stop string, "length" after as many tokens as
            were asked for, or as the model has positions.
        prompt_index: which prompt it continues.
        sample_index: from 0 to `n - 1`, of the continuations of one prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_index: int
    sample_index: int


@dataclasses.dataclass(frozen=True)
class StreamedText:
    """A part of a text that is being generated.

    Attributes:
        text: what comes next; may be empty.
        prompt_index, sample_index: as of a `Completion`.
        completion: the whole, with the last part; else None.
    """

    text: str
    prompt_index: int
    sample_index: int
    completion: Completion | None


class TextOfSequence:
    """The text of a sequence, to which tokens are added; a `Sink` of the engine."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        prompt: np.ndarray,
        end_ids: Sequence[int],
        stop: Sequence[str],
        tokens: int,
        prompt_index: int,
        sample_index: int,
    ):
        self._tokenizer = tokenizer
        self._context = prompt[-_CONTEXT:].tolist()
        self._context_text = self._decode([])
        self._end_ids = end_ids
        self._stop = stop
        self._max_tokens = tokens
        self._prompt_index = prompt_index
        self._sample_index = sample_index
        self._token_ids: list[int] = []
        self._text_before_stop: str | None = None
        self._shown = 0
        self._is_streamed = False

    def add(self, tokens: Sequence[int]) -> bool:
        """Takes further tokens; returns False after an end or a stop string."""
        # One by one, so that a text is the same however many tokens come at once.
        for token in tokens:
            self._token_ids.append(token)
            if token in self._end_ids:
                return False
            if not self._stop:
                continue
            text = self._text()
            starts = [text.find(stop) for stop in self._stop]
            starts = [start for start in starts if start >= 0]
            if starts:
                self._text_before_stop = text[: min(starts)]
                return False
        return True

    @property
    def is_finished(self) -> bool:
        """True if no more tokens follow."""
        return self._has_stopped or len(self._token_ids) >= self._max_tokens

    @property
    def _has_stopped(self) -> bool:
        if self._text_before_stop is not None:
            return True
        return bool(self._token_ids) and self._token_ids[-1] in self._end_ids

    def completion(self) -> Completion:
        """Returns what was generated."""
        return Completion(
            text=self._text(),
            token_ids=list(self._token_ids),
            finish_reason="stop" if self._has_stopped else "length",
            prompt_index=self._prompt_index,
            sample_index=self._sample_index,
        )

    def take_streamed(self) -> StreamedText | None:
        """Returns the part of the text that was not returned before; None if there is none."""
        if self._is_streamed:
            return None
        text = self._text()
        if not self.is_finished:
            text = text[: len(text) - self._num_uncertain(text)]
        part = text[self._shown :]
        self._shown = max(self._shown, len(text))
        completion = None
        if self.is_finished:
            completion = self.completion()
            self._is_streamed = True
        elif not part:
            return None
        return StreamedText(
            part, self._prompt_index, self._sample_index, completion
        )

    def _num_uncertain(self, text: str) -> int:
        """Returns how many characters at the end may change, or begin a stop string."""
        num_incomplete = len(text) - len(text.rstrip(_INCOMPLETE))
        certain = text.rstrip(_INCOMPLETE)
        num_in_stop = 0
        for stop in self._stop:
            for length in range(1, len(stop)):
                if certain.endswith(stop[:length]):
                    num_in_stop = max(num_in_stop, length)
        return num_incomplete + num_in_stop

    def _text(self) -> str:
        if self._text_before_stop is not None:
            return self._text_before_stop
        token_ids = self._token_ids
        if token_ids and token_ids[-1] in self._end_ids:
            token_ids = token_ids[:-1]
        text = self._decode(token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([*self._context, *token_ids])
