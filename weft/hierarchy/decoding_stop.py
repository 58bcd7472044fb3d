"""Conditions for a hypothesis of sampling to be complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from weft.errors import ArgumentValueError


class StopDecodingCondition(Protocol):
    """Function that returns which hypotheses end with the newest token."""

    def __call__(
        self,
        *,
        index: Int[Array, " batch"],
        sequences: Int[Array, "batch decodes length"],
        prefix_len: Int[Array, " batch"],
    ) -> Bool[Array, "batch decodes"]:
        """Returns True for each hypothesis that is complete.

        Args:
          index: the position of each prompt's newest token in `sequences`.
          sequences: the prompts and the tokens decoded so far.
          prefix_len: the length of each prompt, which is the position of the first decoded token.
        """
        ...


class StopOnSubsequence(StopDecodingCondition):
    """Condition that the decoded tokens, without the prompt, end with one of some sequences.

    Example:
      >>> stop = StopOnSubsequence([[7, 8], [9]])
      >>> sequences = jnp.array([[[1, 7, 8], [1, 7, 7]]])
      >>> stop(index=jnp.array([2]), sequences=sequences, prefix_len=jnp.array([1])).tolist()
      [[True, False]]
    """

    def __init__(self, stopping_seqs: int | Sequence[int] | Sequence[Sequence[int]]):
        """Creates the condition from a token, a sequence of tokens, or several such sequences.

        Raises:
          ArgumentValueError: if there is no sequence, or an empty one.
        """
        given = [stopping_seqs] if isinstance(stopping_seqs, int | np.integer) else stopping_seqs
        seqs = [given] if all(isinstance(token, int | np.integer) for token in given) else given
        self._seqs = [tuple(seq) for seq in seqs]  # pyright: ignore[reportArgumentType]
        if not all(self._seqs):
            raise ArgumentValueError(
                f"stopping_seqs={stopping_seqs} has an empty sequence; expected token ids, such "
                "as [[7, 8], [9]]."
            )

    def __call__(self, *, index, sequences, prefix_len):
        index, prefix_len = jnp.atleast_1d(index), jnp.atleast_1d(prefix_len)
        stop = jnp.zeros(sequences.shape[:2], bool)
        for seq in self._seqs:
            positions = index[:, None] + jnp.arange(1 - len(seq), 1)[None]
            window = jnp.take_along_axis(sequences, positions[:, None], axis=2, mode="clip")
            decoded = positions[:, :1] >= prefix_len[:, None]
            stop |= decoded & jnp.all(window == jnp.array([[seq]]), axis=2)
        return stop


class StopOnMaxLength(StopDecodingCondition):
    """Condition that a number of tokens has been decoded.

    Example:
      >>> stop = StopOnMaxLength(2)
      >>> sequences = jnp.array([[[1, 4, 4, 0]], [[1, 3, 4, 0]]])
      >>> stop(index=jnp.array([2, 2]), sequences=sequences, prefix_len=jnp.array([1, 2])).tolist()
      [[True], [False]]
    """

    def __init__(self, max_len: int | Int[Array, " batch"]):
        """Creates the condition.

        Args:
          max_len: the number of tokens after the prompt, for all prompts or one for each.
        """
        self._max_len = max_len

    def __call__(self, *, index, sequences, prefix_len):
        stop = jnp.asarray(index - prefix_len + 1 >= self._max_len)
        return jnp.broadcast_to(stop.reshape(-1, 1), sequences.shape[:2])


class CompositeDecodingCondition(StopDecodingCondition):
    """Condition that at least one of several conditions is true."""

    def __init__(self, conditions: Sequence[StopDecodingCondition]):
        """Creates the condition; raises ArgumentValueError if there are no conditions."""
        if not conditions:
            raise ArgumentValueError("conditions is empty; expected at least one condition.")
        self._conditions = tuple(conditions)

    def __call__(self, *, index, sequences, prefix_len):
        stop = jnp.zeros(sequences.shape[:2], bool)
        for condition in self._conditions:
            stop |= condition(index=index, sequences=sequences, prefix_len=prefix_len)
        return stop
