"""Decoding loops on any model that scores tokens: sampling here, beam search in `decoding_beam`.

Both are pure functions of a callable `tokens_to_scores(token_ids, cache)`, independent of modules.
See `decoding_loop` for the layout of hypotheses, `decoding_stop` for stopping conditions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft import struct
from weft.hierarchy import decoding_loop as loops
from weft.hierarchy.decoding_beam import (
    BeamSearchOutputs,
    BrevityPenaltyFn,
    PrefixMerger,
    beam_search_decode,
    brevity_penalty_fn,
    compute_merge_matrix_by_prefix_ids,
)
from weft.hierarchy.decoding_loop import (
    NEG_INF,
    TokensToScores,
    add_decoding_dim,
    flatten_decoding_dim,
    infer_initial_time_step,
    unflatten_decoding_dim,
)
from weft.hierarchy.decoding_stop import (
    CompositeDecodingCondition,
    StopDecodingCondition,
    StopOnMaxLength,
    StopOnSubsequence,
)
from weft.typing import NestedTensor, Tensor

__all__ = [
    # decoding methods
    "sample_decode",
    "SampleOutputs",
    "DecodingState",
    "beam_search_decode",
    "BeamSearchOutputs",
    # their options
    "StopDecodingCondition",
    "StopOnSubsequence",
    "StopOnMaxLength",
    "CompositeDecodingCondition",
    "BrevityPenaltyFn",
    "brevity_penalty_fn",
    "PrefixMerger",
    "compute_merge_matrix_by_prefix_ids",
    # arrays of hypotheses
    "NEG_INF",
    "TokensToScores",
    "infer_initial_time_step",
    "add_decoding_dim",
    "flatten_decoding_dim",
    "unflatten_decoding_dim",
]


class SampleOutputs(struct.PyTreeNode):
    """Sampled sequences, without the first token of each prompt.

    Attributes:
      sequences: prompts and continuations, padded, (batch, num_decodes, max_decode_len).
      token_scores: the log probability of each decoded token; 0 for padding, and for tokens of the
        prompt unless given. (batch, num_decodes, max_decode_len).
    """

    sequences: Tensor
    token_scores: Tensor


class DecodingState(NamedTuple):
    """State of the sampling loop.

    Attributes:
      cur_index: the position of each prompt's newest token, (batch,).
      sequences: prompts and continuations, (batch, num_decodes, max_decode_len + 1).
      token_scores: the scores of all tokens but the first, (batch, num_decodes, max_decode_len).
      stop_decoding: which hypotheses are complete, (batch, num_decodes).
      cache: of the model, one entry per hypothesis.
    """

    cur_index: Tensor
    sequences: Tensor
    token_scores: Tensor
    stop_decoding: Tensor
    cache: NestedTensor
    prng_key: Any


def sample_decode(
    *,
    inputs: Int[Array, "batch length"],
    time_step: Int[Array, " batch"],
    cache: NestedTensor,
    tokens_to_scores: TokensToScores,
    stop_decoding_condition: StopDecodingCondition,
    num_decodes: int,
    prng_key: Tensor,
    max_decode_len: int | None = None,
    loop: Literal["lax", "python"] = "lax",
    pad_id: int = 0,
    input_token_scores: Float[Array, "batch length"] | None = None,
) -> SampleOutputs:
    """Samples continuations of prompts.

    Args:
      inputs: prompts, padded on the right. Results omit the first token of each.
      time_step: the position of each prompt's last token; see `infer_initial_time_step`.
      cache: of a model after the tokens before `time_step`, one entry per prompt; arrays have the
        batch axis first, in a `VDict` second.
      tokens_to_scores: see `TokensToScores`. Returns the log probabilities to sample from, with
        temperature and cut-offs applied.
      stop_decoding_condition: returns which hypotheses are complete.
      num_decodes: number of continuations per prompt.
      max_decode_len: the length of a result; that of `inputs` if None.
      loop: "lax", or "python" to debug.
      input_token_scores: the score of the token after each position of `inputs`; 0 by default.

    Raises:
      ArgumentShapeError: if `inputs` are longer than `max_decode_len + 1`.
      ArgumentValueError: if `num_decodes` or `loop` is invalid.

    >>> successor = lambda ids, cache: (jnp.log(jax.nn.one_hot((ids[:, 0] + 1) % 5, 5)), cache)
    >>> sample_decode(
    ...     inputs=jnp.array([[1, 2, 0, 0, 0]]), time_step=jnp.array([1]), cache={},
    ...     tokens_to_scores=successor, stop_decoding_condition=StopOnSubsequence(4),
    ...     num_decodes=1, prng_key=jax.random.key(0)).sequences.tolist()
    [[[2, 3, 4, 0, 0]]]
    """
    last = inputs.shape[1] if max_decode_len is None else max_decode_len
    sequences = loops.initial_sequences(
        inputs, time_step, num_decodes=num_decodes, max_decode_len=last, pad_id=pad_id
    )

    def unfinished(state: DecodingState) -> Tensor:
        return jnp.any(~state.stop_decoding & (state.cur_index < last)[:, None])

    def step(state: DecodingState) -> DecodingState:
        stop = functools.partial(stop_decoding_condition, prefix_len=time_step + 1)
        return _sample_step(state, tokens_to_scores, stop, pad_id)

    first = DecodingState(
        cur_index=time_step.astype(jnp.int32),
        sequences=sequences,
        token_scores=_prompt_scores(input_token_scores, time_step, sequences),
        stop_decoding=jnp.zeros(sequences.shape[:2], bool),
        cache=loops.expand_cache(cache, num_decodes),
        prng_key=prng_key,
    )
    state = loops.run_loop(loop, unfinished, step, first)
    return SampleOutputs(state.sequences[:, :, 1:], state.token_scores)


def _sample_step(
    state: DecodingState,
    tokens_to_scores: TokensToScores,
    stop_condition: Callable[..., Tensor],
    pad_id: int,
) -> DecodingState:
    """Samples one token for each hypothesis."""
    # The first of the two keys is for this step, as in AXLearn, for equal samples from equal seeds.
    key, next_key = jax.random.split(state.prng_key)
    log_probs, cache = loops.next_token_scores(
        tokens_to_scores, state.sequences, state.cur_index, state.cache
    )
    tokens = jax.random.categorical(key, log_probs)
    scores = jnp.take_along_axis(log_probs, tokens[:, :, None], axis=2)[:, :, 0]
    done, index = state.stop_decoding, state.cur_index + 1
    sequences = loops.put_at(state.sequences, index, jnp.where(done, pad_id, tokens))
    return DecodingState(
        cur_index=index,
        sequences=sequences,
        token_scores=loops.put_at(state.token_scores, index - 1, jnp.where(done, 0.0, scores)),
        stop_decoding=done | stop_condition(index=index, sequences=sequences),
        cache=cache,
        prng_key=next_key,
    )


def _prompt_scores(
    given: Float[Array, "batch length"] | None, time_step: Tensor, sequences: Tensor
) -> Float[Array, "batch decodes max_decode_len"]:
    batch, num_decodes, length = sequences.shape
    scores = jnp.zeros((batch, length - 1), jnp.float32)
    if given is not None:
        size = min(given.shape[1], length - 1)
        in_prompt = jnp.arange(size)[None] < time_step[:, None]
        scores = scores.at[:, :size].set(jnp.where(in_prompt, given[:, :size], 0.0))
    return loops.add_decoding_dim(scores, num_decodes)
