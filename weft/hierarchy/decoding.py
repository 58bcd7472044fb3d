"""Decoding loops: sampling here, beam search in `decoding_beam`, on any model that scores tokens.

Both are pure functions of a callable `tokens_to_scores(token_ids, cache)`, and know nothing of
modules: `decoding_loop` says how hypotheses lie in arrays, `decoding_stop` when one is complete.
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
    # the two ways to decode
    "sample_decode",
    "SampleOutputs",
    "DecodingState",
    "beam_search_decode",
    "BeamSearchOutputs",
    # what steers them
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
    """What was sampled; the first token of a prompt is left out.

    Attributes:
      sequences: prompts with what was decoded, padded. Shape (batch, num_decodes, max_decode_len).
      token_scores: the log probability of each decoded token; 0 for padding, and for tokens of the
        prompt unless they were given. (batch, num_decodes, max_decode_len).
    """

    sequences: Tensor
    token_scores: Tensor


class DecodingState(NamedTuple):
    """The state of the sampling loop.

    Attributes:
      cur_index: the position of each prompt's newest token, (batch,).
      sequences: prompts with what was decoded, (batch, num_decodes, max_decode_len + 1).
      token_scores: the scores of all tokens but the first, (batch, num_decodes, max_decode_len).
      stop_decoding: which hypotheses are complete, (batch, num_decodes).
      cache: of the model, one entry per hypothesis.
      prng_key: for what is still to be sampled.
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
      inputs: prompts, padded on the right. Each begins with a token that results leave out.
      time_step: the position of each prompt's last token; see `infer_initial_time_step`.
      cache: of a model that has seen the tokens before `time_step`, one entry per prompt; arrays
        have the batch axis first, in a `VDict` second.
      tokens_to_scores: see `TokensToScores`. What is sampled follows these log probabilities, so
        temperature and cut-offs belong in here.
      stop_decoding_condition: tells which hypotheses are complete.
      num_decodes: how many continuations to sample for each prompt.
      prng_key: the same key gives the same samples.
      max_decode_len: the length of a result; that of `inputs` if None.
      loop: "lax", or "python" to debug.
      pad_id: the token that pads.
      input_token_scores: at each position of `inputs` the score of the token that follows; 0 by
        default.

    Raises:
      ArgumentShapeError: if `inputs` are longer than `max_decode_len + 1`.
      ArgumentValueError: if `num_decodes` or `loop` has no meaning.

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
    # The first of the two keys is for this step: the same seed samples what it does in AXLearn.
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
    """The scores of the prompts' tokens, 0 elsewhere."""
    batch, num_decodes, length = sequences.shape
    scores = jnp.zeros((batch, length - 1), jnp.float32)
    if given is not None:
        size = min(given.shape[1], length - 1)
        in_prompt = jnp.arange(size)[None] < time_step[:, None]
        scores = scores.at[:, :size].set(jnp.where(in_prompt, given[:, :size], 0.0))
    return loops.add_decoding_dim(scores, num_decodes)
