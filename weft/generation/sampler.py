"""Choice of next tokens from logits, with the settings of a generator.

Changes of logits have the order that transformers has: repetition penalty, temperature, top-k,
top-p, min-p. A choice depends on the logits, the settings and the key of its own sequence only, so
that a sequence is the same in any batch.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from weft import errors
from weft.functional import sampling


class SamplingValues(NamedTuple):
    """Settings that a compiled program takes as arguments, scalars; 0 where one is not used."""

    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of the choice of tokens.

    Attributes:
        temperature: divides the logits; 0 for the likeliest token, of equal ones the first.
        top_k: number of likeliest tokens to choose from; None for all.
        top_p: choose from the fewest likeliest tokens whose probabilities reach this sum.
        min_p: choose from tokens that have at least this part of the largest probability.
        repetition_penalty: above 1, makes the tokens of a sequence less likely to come again.

    Raises GenerationError if one is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        self._check("temperature", self.temperature >= 0, "expected 0, or more")
        if self.top_k is not None:
            self._check("top_k", self.top_k >= 1, "expected 1, or more")
        if self.top_p is not None:
            is_share = 0 < self.top_p <= 1
            self._check("top_p", is_share, "expected more than 0, at most 1")
        if self.min_p is not None:
            is_share = 0 <= self.min_p <= 1
            self._check("min_p", is_share, "expected a number from 0 to 1")
        if self.repetition_penalty is not None:
            self._check(
                "repetition_penalty",
                self.repetition_penalty > 0,
                "expected more than 0; 1 changes nothing",
            )

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise errors.GenerationError(
                f"{name}={getattr(self, name):g}; {expected}."
            )

    @property
    def values(self) -> SamplingValues:
        """The settings that do not need another program."""
        return SamplingValues(
            self.temperature,
            self.top_p or 0.0,
            self.min_p or 0.0,
            self.repetition_penalty or 0.0,
        )

    @property
    def rules(self) -> SamplingRules:
        """The settings that need another program."""
        is_greedy = self.temperature == 0
        return SamplingRules(
            is_greedy=is_greedy,
            top_k=None if is_greedy else self.top_k,
            has_top_p=not is_greedy and self.top_p not in (None, 1.0),
            has_min_p=not is_greedy and self.min_p not in (None, 0.0),
            has_penalty=self.repetition_penalty not in (None, 1.0),
        )


class SamplingRules(NamedTuple):
    """The settings that a compiled program has."""

    is_greedy: bool
    top_k: int | None
    has_top_p: bool
    has_min_p: bool
    has_penalty: bool


def choose_tokens(
    rules: SamplingRules,
    values: SamplingValues,
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    seen: Bool[Array, "batch vocab"] | None,
) -> Int[Array, " batch"]:
    """Returns a token for each sequence.

    Args:
        keys: one for each sequence and position.
        seen: the tokens of each sequence; needed for a repetition penalty.
    """
    logits = logits.astype(jnp.float32)
    if rules.has_penalty:
        assert seen is not None
        logits = sampling.penalize_repetition(
            logits, seen, values.repetition_penalty
        )
    if rules.is_greedy:
        return _likeliest(logits)
    logits = logits / values.temperature
    top_p = values.top_p if rules.has_top_p else None
    min_p = values.min_p if rules.has_min_p else None
    return sampling.draw_tokens(
        logits, keys, top_k=rules.top_k, top_p=top_p, min_p=min_p
    )


def _likeliest(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Returns the first of the largest logits of each row.

    Two reductions of numbers take a third of the time of `argmax` on CPUs, which reduces pairs.
    """
    last_id = logits.shape[-1] - 1
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, ids, last_id), axis=-1)
