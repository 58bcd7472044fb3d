"""Beam search: an approximate search for the likeliest sequences that end with an end token.

Each prompt has `num_decodes` live hypotheses. A step continues each with every token. Those
continued with the end token compete with the finished ones for `num_decodes` places, by their
scores with the brevity penalty; the best `num_decodes` of all others stay live. A prompt is done
when no live hypothesis can overtake its worst finished one.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import struct
from weft.errors import ArgumentValueError
from weft.hierarchy import decoding_loop as loops
from weft.hierarchy.decoding_loop import NEG_INF, TokensToScores
from weft.typing import NestedTensor, Tensor


class BeamSearchOutputs(struct.PyTreeNode):
    """Results of beam search, without the first token of each prompt.

    Attributes:
      sequences: prompts and continuations up to the end token, then padding; the best of each
        prompt first. (batch, num_decodes, max_decode_len).
      scores: the sums of log probabilities of the decoded tokens, with the brevity penalty;
        `NEG_INF` where fewer than `num_decodes` sequences were finished. (batch, num_decodes).
      live_sequences: the hypotheses without an end token when the search ended, as `sequences`.
      live_scores: their sums of log probabilities, without the penalty.
    """

    sequences: Tensor
    scores: Tensor
    live_sequences: Tensor
    live_scores: Tensor


class BrevityPenaltyFn(Protocol):
    """Function that corrects the scores of sequences for their lengths."""

    def __call__(self, *, length: Tensor, raw_scores: Tensor) -> Tensor:
        """Returns the scores to compare.

        Args:
          length: the lengths of the sequences without their first tokens, prompts included.
          raw_scores: sums of log probabilities.
        """
        ...


def brevity_penalty_fn(
    *, alpha: float = 0.0, bp_type: Literal["t5", "hf"] = "t5"
) -> BrevityPenaltyFn:
    """Divides scores by a power of the length.

    Args:
      alpha: the power; larger values favor longer sequences, 0 changes nothing.
      bp_type: "t5" divides by `((5 + length) / 6)^alpha` (Wu et al., 2016,
        https://arxiv.org/abs/1609.08144, equation 14), "hf" by `length^alpha`.

    Raises:
      ArgumentValueError: for any other `bp_type`.

    >>> brevity_penalty_fn(alpha=1.0)(length=jnp.array(7), raw_scores=jnp.array(-6.0)).item()
    -3.0
    """
    if bp_type not in ("t5", "hf"):
        raise ArgumentValueError(f"bp_type={bp_type!r}; expected 't5' or 'hf'.")

    def penalize(*, length: Tensor, raw_scores: Tensor) -> Tensor:
        size = jnp.asarray(length, jnp.float32)
        return raw_scores / (size if bp_type == "hf" else (5.0 + size) / 6.0) ** alpha

    return penalize


class PrefixMerger(Protocol):
    """Merging of equivalent hypotheses, such as two alignments of one transcript.

    Beam search adds up the probabilities of merged hypotheses.
    """

    def init_state(self, *, tokens: Int[Array, "batch decodes length"]) -> NestedTensor:
        """Returns the state before the first step; its arrays begin with the axes (batch, decodes).

        Args:
          tokens: the prompts, padded.
        """
        ...

    def update(self, *, tokens: Int[Array, "batch decodes"], state: NestedTensor) -> NestedTensor:
        """Returns the state after the newest token of each hypothesis.

        The first step has the last token of each prompt.
        """
        ...

    def compute(self, state: NestedTensor) -> Int[Array, "batch decodes decodes"]:
        """Returns 1 at (b, i, j) if hypothesis j of prompt b counts as its hypothesis i, else 0."""
        ...


def compute_merge_matrix_by_prefix_ids(
    prefix_ids: Int[Array, "batch decodes"],
) -> Int[Array, "batch decodes decodes"]:
    """Merges the hypotheses of a prompt with equal ids, such as hashes, into the first of them.

    >>> compute_merge_matrix_by_prefix_ids(jnp.array([[5, 6, 5]])).tolist()
    [[[1, 0, 1], [0, 1, 0], [0, 0, 0]]]
    """
    same = prefix_ids[:, :, None] == prefix_ids[:, None, :]
    first = jnp.argmax(same, axis=2) == jnp.arange(prefix_ids.shape[1])[None]
    return (same & first[:, :, None]).astype(jnp.int32)


class _BeamState(NamedTuple):
    index: Tensor
    live_sequences: Tensor
    live_scores: Tensor
    sequences: Tensor
    scores: Tensor
    cache: NestedTensor
    merger_state: Any


def beam_search_decode(
    *,
    inputs: Int[Array, "batch length"],
    time_step: Int[Array, " batch"],
    cache: NestedTensor,
    tokens_to_scores: TokensToScores,
    eos_id: int,
    num_decodes: int,
    max_decode_len: int | None = None,
    loop: Literal["lax", "python"] = "lax",
    brevity_penalty: BrevityPenaltyFn | None = None,
    pad_id: int = 0,
    prefix_merger: PrefixMerger | None = None,
) -> BeamSearchOutputs:
    """Searches for the likeliest continuations of prompts.

    Args:
      inputs: prompts; see `sample_decode`.
      time_step: the position of each prompt's last token; see `infer_initial_time_step`.
      cache: of a model after the tokens before `time_step`; see `sample_decode`.
      tokens_to_scores: see `TokensToScores`.
      eos_id: the end token.
      num_decodes: number of hypotheses to keep, and to return, per prompt.
      max_decode_len: the length of a result; that of `inputs` if None.
      loop: "lax", or "python" to debug.
      brevity_penalty: see `brevity_penalty_fn`; none by default.
      prefix_merger: merges equivalent hypotheses; none by default.

    Raises:
      ArgumentShapeError: if `inputs` are longer than `max_decode_len + 1`.
      ArgumentValueError: if `num_decodes`, `loop` or `eos_id` is invalid.

    >>> log_probs = jnp.log(jnp.array([[0.0, 0.2, 0.8], [0.0, 0.9, 0.1], [0.0, 0.6, 0.4]]))
    >>> found = beam_search_decode(
    ...     inputs=jnp.array([[1, 0, 0]]), time_step=jnp.array([0]), cache={}, eos_id=2,
    ...     tokens_to_scores=lambda ids, cache: (log_probs[ids[:, 0]], cache), num_decodes=2)
    >>> found.sequences.tolist(), [f"{p:.2f}" for p in jnp.exp(found.scores)[0]]
    ([[[2, 0, 0], [1, 2, 0]]], ['0.10', '0.09'])
    """
    last = inputs.shape[1] if max_decode_len is None else max_decode_len
    penalize = brevity_penalty or brevity_penalty_fn()
    sequences = loops.initial_sequences(
        inputs, time_step, num_decodes=num_decodes, max_decode_len=last, pad_id=pad_id
    )
    shape = sequences.shape[:2]
    nothing = jnp.full(shape, NEG_INF, jnp.float32)
    state = _BeamState(
        index=time_step.astype(jnp.int32),
        live_sequences=sequences,
        # The hypotheses of a prompt are equal at first, so all but one start dead.
        live_scores=nothing.at[:, 0].set(0.0),
        sequences=jnp.full_like(sequences, pad_id),
        scores=nothing,
        cache=loops.expand_cache(cache, num_decodes),
        merger_state=None if prefix_merger is None else prefix_merger.init_state(tokens=sequences),
    )
    state = loops.run_loop(
        loop,
        lambda state: jnp.any(_is_open(state, last, penalize)),
        functools.partial(
            _step,
            last=last,
            penalize=penalize,
            tokens_to_scores=tokens_to_scores,
            eos_id=eos_id,
            merger=prefix_merger,
        ),
        state,
    )
    return BeamSearchOutputs(
        state.sequences[:, :, 1:], state.scores, state.live_sequences[:, :, 1:], state.live_scores
    )


def _is_open(state: _BeamState, last: int, penalize: BrevityPenaltyFn) -> Tensor:
    # Scores only fall as sequences grow, and penalties only shrink.
    bound = penalize(length=jnp.array(last), raw_scores=jnp.max(state.live_scores, axis=1))
    return (state.index < last) & (bound > jnp.min(state.scores, axis=1))


def _step(
    state: _BeamState,
    *,
    last: int,
    penalize: BrevityPenaltyFn,
    tokens_to_scores: TokensToScores,
    eos_id: int,
    merger: PrefixMerger | None,
) -> _BeamState:
    is_open = _is_open(state, last, penalize)
    live_scores, merger_state = state.live_scores, state.merger_state
    if merger is not None:
        tokens = loops.tokens_at(state.live_sequences, state.index)
        merger_state = merger.update(tokens=tokens, state=merger_state)
        live_scores = _merge(live_scores, merger.compute(merger_state))
    log_probs, cache = loops.next_token_scores(
        tokens_to_scores, state.live_sequences, state.index, state.cache
    )
    vocab = log_probs.shape[-1]
    if not 0 <= eos_id < vocab:
        raise ArgumentValueError(
            f"eos_id={eos_id} is not in the vocabulary of {vocab} tokens that tokens_to_scores "
            f"scores; expected 0 <= eos_id < {vocab}."
        )
    index = state.index + 1
    candidates = jnp.maximum(live_scores[:, :, None] + log_probs, NEG_INF)

    # Finished hypotheses: the old ones, and the live ones with the end token.
    ended = jnp.full(state.live_sequences.shape[:2], eos_id)
    penalized = penalize(length=index[:, None], raw_scores=candidates[:, :, eos_id])
    penalized = jnp.where(candidates[:, :, eos_id] > NEG_INF, penalized, NEG_INF)
    pool = (
        jnp.concatenate(
            [state.sequences, loops.put_at(state.live_sequences, index, ended)], axis=1
        ),
        jnp.concatenate([state.scores, penalized], axis=1),
    )
    sequences, scores = _best(pool, keep=state.scores.shape[1])

    # Live hypotheses: the best of the others.
    others = candidates.at[:, :, eos_id].set(NEG_INF).reshape(candidates.shape[0], -1)
    live_scores, chosen = jax.lax.top_k(others, state.live_scores.shape[1])
    parents, tokens = chosen // vocab, chosen % vocab
    live_sequences = loops.put_at(
        loops.gather_hypotheses(state.live_sequences, parents), index, tokens
    )

    def if_open(new: Tensor, old: Tensor) -> Tensor:
        return jnp.where(is_open.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return _BeamState(
        index=if_open(index, state.index),
        live_sequences=if_open(live_sequences, state.live_sequences),
        live_scores=if_open(live_scores, state.live_scores),
        sequences=if_open(sequences, state.sequences),
        scores=if_open(scores, state.scores),
        cache=loops.gather_cache(cache, parents),
        merger_state=jax.tree.map(lambda x: loops.gather_hypotheses(x, parents), merger_state),
    )


def _best(pool: tuple[Tensor, Tensor], keep: int) -> tuple[Tensor, Tensor]:
    sequences, scores = pool
    scores, chosen = jax.lax.top_k(scores, keep)
    return loops.gather_hypotheses(sequences, chosen), scores


def _merge(scores: Float[Array, "batch decodes"], matrix: Tensor) -> Float[Array, "batch decodes"]:
    """Adds up the probabilities of merged hypotheses, and marks all but one of them dead."""
    merged = jax.nn.logsumexp(scores[:, None, :], axis=2, b=matrix)
    return jnp.maximum(merged, NEG_INF)
