"""Log probabilities that a language model gives to tokens after others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from weft import errors
from weft.generation import LanguageModel
from weft.generation.decoding_models import decoding_model
from weft.hierarchy import Module, functional
from weft.typing import NestedTensor

_MIN_LENGTH = 16
"""Smallest number of positions that programs are compiled for."""

_BATCH_TOKENS = 4096
"""Number of tokens of a batch, the memory of whose logits a device has to have."""

_MAX_ROWS = 32


class Score(NamedTuple):
    """Judgment of a model about a continuation.

    Attributes:
        log_prob: natural logarithm of its probability after its context.
        is_greedy: whether each of its tokens is the likeliest one, of equal ones the first.
        num_tokens: of the continuation.
    """

    log_prob: float
    is_greedy: bool
    num_tokens: int


class _Statistics(NamedTuple):
    """Of the prediction of each token by those before it, `(rows, tokens - 1)`."""

    log_probs: Float[Array, "rows predictions"]
    is_greedy: Bool[Array, "rows predictions"]


class Scorer:
    """Computes the probabilities of continuations, many in a batch.

    Programs are compiled for lengths that are powers of two, and kept between calls.

    Args:
        model: a `weft.generation.LanguageModel`.
        max_length: largest number of tokens of a context with its continuation; None for as many
            as the model has positions. The first tokens of a longer context are left out.

    Raises GenerationError if the model predicts no tokens.
    """

    def __init__(self, model: LanguageModel, *, max_length: int | None = None):
        self.model = model
        decoding = decoding_model(model.layer)  # refuses other models
        self.max_length = max_length or decoding.max_length

    def score(
        self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Score]:
        """Returns a score for each pair of a context and a continuation, both ids of tokens.

        Raises GenerationError if a context or continuation has no tokens, or a continuation has
        more than the model has positions.
        """
        sequences: list[np.ndarray] = []
        num_continued: list[int] = []
        for index, (context, continuation) in enumerate(pairs):
            sequences.append(self._sequence(index, context, continuation))
            num_continued.append(len(continuation))
        scores: dict[int, Score] = {}
        for indices in self._batches(sequences):
            rows = [sequences[index] for index in indices]
            statistics = self._statistics(rows)
            for row, index in enumerate(indices):
                end = len(sequences[index]) - 1
                scored = slice(end - num_continued[index], end)
                scores[index] = Score(
                    log_prob=float(
                        statistics.log_probs[row, scored].sum(dtype=np.float64)
                    ),
                    is_greedy=bool(statistics.is_greedy[row, scored].all()),
                    num_tokens=num_continued[index],
                )
        return [scores[index] for index in range(len(sequences))]

    def _sequence(
        self, index: int, context: Sequence[int], continuation: Sequence[int]
    ) -> np.ndarray:
        if len(context) == 0 or len(continuation) == 0:
            raise errors.GenerationError(
                f"pair {index} has {len(context)} tokens of context and {len(continuation)} of "
                "continuation; expected at least one of each."
            )
        if self.max_length is not None:
            room = self.max_length - len(continuation)
            if room < 1:
                raise errors.GenerationError(
                    f"the continuation of pair {index} has {len(continuation)} tokens, and the "
                    f"model has {self.max_length} positions, one for the context."
                )
            context = context[-room:]
        return np.concatenate([context, continuation]).astype(np.int32)

    def _batches(self, sequences: Sequence[np.ndarray]) -> list[list[int]]:
        """Returns the indices of sequences that are padded to one length, the longest first."""
        by_length = sorted(
            range(len(sequences)), key=lambda index: -len(sequences[index])
        )
        batches: list[list[int]] = []
        batch_length = 0
        for index in by_length:
            length = _padded_length(len(sequences[index]))
            if (
                not batches
                or length != batch_length
                or len(batches[-1]) == _num_rows(length)
            ):
                batches.append([])
                batch_length = length
            batches[-1].append(index)
        return batches

    def _statistics(self, rows: Sequence[np.ndarray]) -> _Statistics:
        length = _padded_length(len(rows[0]))
        # Padding follows the tokens, which do not see it.
        tokens = np.zeros((_num_rows(length), length), np.int32)
        for row, sequence in enumerate(rows):
            tokens[row, : len(sequence)] = sequence
        return jax.device_get(
            _statistics(self.model.layer, self.model.params, tokens)
        )


def _padded_length(length: int) -> int:
    """Returns the smallest power of two that is not less than a length."""
    return max(_MIN_LENGTH, 1 << (length - 1).bit_length())


def _num_rows(length: int) -> int:
    return min(_MAX_ROWS, max(1, _BATCH_TOKENS // length))


@functools.partial(jax.jit, static_argnums=0)
def _statistics(
    layer: Module, params: NestedTensor, tokens: Int[Array, "rows tokens"]
) -> _Statistics:
    logits = _logits(layer, params, tokens)[:, :-1].astype(jnp.float32)
    targets = tokens[:, 1:]
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    log_probs = target_logits[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    return _Statistics(log_probs, jnp.argmax(logits, axis=-1) == targets)


def _logits(layer: Module, params: NestedTensor, tokens: Array) -> Array:
    inputs: Any = {"input_batch": {"input_ids": tokens}}
    # A layer may compute its logits in chunks, and `predict` leaves them out then.
    method = "predict"
    if hasattr(type(layer), "extract_logits"):
        method = "extract_logits"
    outputs, _ = functional(
        layer, None, params, inputs, method=method, is_training=False
    )
    if method == "predict":
        return outputs["logits"]
    return outputs
