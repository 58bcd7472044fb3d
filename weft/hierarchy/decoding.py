"""Decoding loops on any model that scores tokens: sampling and beam search.

Both are pure functions of a callable `tokens_to_scores(token_ids, cache)`, independent of modules.
A batch of `batch` prompts is decoded into `num_decodes` hypotheses each. Sequences have the shape
`(batch, num_decodes, length)`; the model and its cache see both leading axes as one. Each prompt
has its own position, so that prompts of different lengths are decoded together:

    position   0    1    2    3
               bos  a    b    .        the last known token is at `index` (here 2);
                              ^        its scores determine the token at `index + 1`

Beam search is an approximate search for the likeliest sequences that end with an end token. Each
prompt has `num_decodes` live hypotheses. A step continues each with every token. Those continued
with the end token compete with the finished ones for `num_decodes` places, by their scores with the
brevity penalty; the best `num_decodes` of all others stay live. A prompt is done when no live
hypothesis can overtake its worst finished one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from weft import errors, struct
from weft.hierarchy.attention.kv_cache import KVPages
from weft.typing import NestedTensor, Tensor

NEG_INF = -1.0e7
"""Score of an impossible choice: finite, so that sums of such scores are not NaN."""

TokensToScores = Callable[[Tensor, NestedTensor], tuple[Tensor, NestedTensor]]
"""Function from token ids `(batch * num_decodes, 1)` and the cache to the log probabilities of the
next token, `(batch * num_decodes, vocab)`, and the new cache."""

State = TypeVar("State")


def end_ids(eos_id: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the ids that end a sequence, from one or several.

    Raises ArgumentValueError if there is none.

    >>> end_ids(2), end_ids([2, 7])
    ((2,), (2, 7))
    """
    ids = (eos_id,) if isinstance(eos_id, int | np.integer) else tuple(eos_id)
    if not ids:
        raise errors.ArgumentValueError(
            f"eos_id={eos_id!r} has no id; expected one, or several such as (2, 7)."
        )
    return tuple(int(i) for i in ids)


def infer_initial_time_step(
    prefix: Int[Array, "batch length"], *, pad_id: int
) -> Int[Array, " batch"]:
    """Returns the position of each prompt's last token that is not `pad_id`, at least 0.

    A prompt that ends with a token of this value needs its length instead.

    >>> infer_initial_time_step(jnp.array([[1, 5, 6, 0], [1, 0, 0, 0]]), pad_id=0).tolist()
    [2, 0]
    """
    positions = jnp.arange(prefix.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(prefix == pad_id, 0, positions), axis=1)


def add_decoding_dim(
    x: Shaped[Array, "batch ..."], num_decodes: int
) -> Shaped[Array, "batch decodes ..."]:
    """Repeats `x`, one entry per prompt, for each hypothesis; a scalar is unchanged."""
    return x if x.ndim == 0 else jnp.repeat(x[:, None], num_decodes, axis=1)


def flatten_decoding_dim(
    x: Shaped[Array, "batch decodes ..."],
) -> Shaped[Array, "rows ..."]:
    """Merges the first two axes; a scalar is unchanged."""
    return (
        x if x.ndim == 0 else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    )


def unflatten_decoding_dim(
    x: Shaped[Array, "rows ..."], batch_size: int, num_decodes: int
) -> Shaped[Array, "batch decodes ..."]:
    """Splits the first axis into prompts and hypotheses; a scalar is unchanged."""
    if x.ndim == 0:
        return x
    return x.reshape(batch_size, num_decodes, *x.shape[1:])


def expand_cache(cache: NestedTensor, num_decodes: int) -> NestedTensor:
    """Repeats a cache of one entry per prompt for each hypothesis, merging both axes.

    In a `VDict` the arrays of several layers are stacked, and the prompts are the second axis.
    """

    def expand(x: Tensor | KVPages) -> Tensor | KVPages:
        if isinstance(x, KVPages):
            rows = jnp.repeat(jnp.arange(len(x.page_indices)), num_decodes)
            return x.take(rows)
        return flatten_decoding_dim(add_decoding_dim(x, num_decodes))

    return struct.map_blocks(expand, cache, is_leaf=_is_pages)


def gather_cache(
    cache: NestedTensor, hypotheses: Int[Array, "batch decodes"]
) -> NestedTensor:
    """Gathers for each new hypothesis the cache, as of `expand_cache`, of the one it continues."""
    batch, num_decodes = hypotheses.shape
    rows = (jnp.arange(batch)[:, None] * num_decodes + hypotheses).reshape(-1)

    def gather(x: Tensor | KVPages) -> Tensor | KVPages:
        if isinstance(x, KVPages):
            return x.take(rows)
        if x.ndim == 0:
            return x
        return x[rows]

    return struct.map_blocks(gather, cache, is_leaf=_is_pages)


def _is_pages(x: object) -> bool:
    return isinstance(x, KVPages)


def gather_hypotheses(
    x: Shaped[Array, "batch decodes ..."],
    hypotheses: Int[Array, "batch chosen"],
) -> Shaped[Array, "batch chosen ..."]:
    """Gathers hypotheses of each prompt."""
    return jax.vmap(operator.getitem)(x, hypotheses)


def initial_sequences(
    inputs: Int[Array, "batch length"],
    time_step: Int[Array, " batch"],
    *,
    num_decodes: int,
    max_decode_len: int,
    pad_id: int,
) -> Int[Array, "batch decodes max_decode_len+1"]:
    """Returns the prompts, for each hypothesis, padded to the length of the result.

    Args:
      time_step: the position of each prompt's last token; later tokens are ignored.
      max_decode_len: the length of a result, without the first token.

    Raises:
      ArgumentShapeError: if the prompts are longer than the result.
      ArgumentValueError: if `num_decodes` is not positive.
    """
    if num_decodes < 1:
        raise errors.ArgumentValueError(
            f"num_decodes={num_decodes}; expected at least 1."
        )
    length = inputs.shape[1]
    if length > max_decode_len + 1:
        raise errors.ArgumentShapeError(
            f"inputs of shape {inputs.shape} are longer than max_decode_len={max_decode_len} "
            f"allows, which is {max_decode_len + 1} with the first token; "
            f"raise max_decode_len to {length - 1} or more."
        )
    prompt = jnp.where(
        jnp.arange(length)[None] <= time_step[:, None], inputs, pad_id
    )
    padded = jnp.pad(
        prompt,
        ((0, 0), (0, max_decode_len + 1 - length)),
        constant_values=pad_id,
    )
    return add_decoding_dim(padded.astype(jnp.int32), num_decodes)


def tokens_at(
    sequences: Int[Array, "batch decodes length"], index: Int[Array, " batch"]
) -> Int[Array, "batch decodes"]:
    """Returns the tokens at each prompt's position, the last ones for a position beyond the end."""
    return jnp.take_along_axis(
        sequences, index[:, None, None], axis=2, mode="clip"
    )[:, :, 0]


def write_tokens_at(
    x: Shaped[Array, "batch decodes length"],
    index: Int[Array, " batch"],
    values: Shaped[Array, "batch decodes"],
) -> Shaped[Array, "batch decodes length"]:
    """Returns `x` with new values at each prompt's position; those beyond the end are ignored."""
    return x.at[jnp.arange(x.shape[0]), :, index].set(
        values.astype(x.dtype), mode="drop"
    )


def next_token_scores(
    tokens_to_scores: TokensToScores,
    sequences: Int[Array, "batch decodes length"],
    index: Int[Array, " batch"],
    cache: NestedTensor,
) -> tuple[Float[Array, "batch decodes vocab"], NestedTensor]:
    """Returns the log probabilities of the token after each position, and the new cache."""
    batch, num_decodes, _ = sequences.shape
    tokens = flatten_decoding_dim(tokens_at(sequences, index))
    scores, cache = tokens_to_scores(tokens[:, None], cache)
    return unflatten_decoding_dim(scores, batch, num_decodes), cache


def run_loop(
    kind: str,
    cond: Callable[[State], Any],
    body: Callable[[State], State],
    state: State,
) -> State:
    """Runs `jax.lax.while_loop` ("lax"), or the same in Python, with concrete values ("python").

    Raises ArgumentValueError for any other `kind`.
    """
    if kind == "lax":
        return lax.while_loop(cond, body, state)
    if kind != "python":
        raise errors.ArgumentValueError(
            f"loop={kind!r}; expected 'lax' or 'python'."
        )
    while cond(state):
        state = body(state)
    return state


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
          prefix_len: the length of each prompt, which is the position of the first decoded token.
        """
        ...


class StopOnSubsequence(StopDecodingCondition):
    """Condition that the tokens end with one of some sequences, whose last token was decoded.

    It may begin in the prompt.

    >>> stop = StopOnSubsequence([[7, 8], [9]])
    >>> sequences = jnp.array([[[1, 7, 8], [1, 7, 7]]])
    >>> stop(index=jnp.array([2]), sequences=sequences, prefix_len=jnp.array([1])).tolist()
    [[True, False]]
    """

    def __init__(
        self,
        stopping_seqs: int | Sequence[int] | Sequence[Sequence[int]],
        pad_value: int = -1,
    ):
        """Creates the condition from a token, a sequence of tokens, or several such sequences.

        Tokens equal to `pad_value` are left out, as in an array of sequences of several lengths.

        Raises ArgumentValueError if there is no sequence, or an empty one.
        """
        seqs: Any = stopping_seqs
        if isinstance(seqs, int | np.integer):
            seqs = [seqs]
        if all(isinstance(token, int | np.integer) for token in seqs):
            seqs = [seqs]
        self._seqs: list[tuple[int, ...]] = []
        for seq in seqs:
            tokens = [int(token) for token in seq if token != pad_value]
            self._seqs.append(tuple(tokens))
        if not all(self._seqs):
            raise errors.ArgumentValueError(
                f"stopping_seqs={stopping_seqs} has an empty sequence; expected token ids, such "
                "as [[7, 8], [9]]."
            )

    def __call__(self, *, index, sequences, prefix_len):
        index, prefix_len = jnp.atleast_1d(index), jnp.atleast_1d(prefix_len)
        stop = jnp.zeros(sequences.shape[:2], bool)
        for seq in self._seqs:
            positions = index[:, None] + jnp.arange(1 - len(seq), 1)[None]
            window = jnp.take_along_axis(
                sequences, positions[:, None], axis=2, mode="clip"
            )
            is_complete = positions[:, :1] >= 0
            stop |= is_complete & jnp.all(window == jnp.array([[seq]]), axis=2)
        is_decoded = index >= prefix_len
        return stop & is_decoded[:, None]


class StopOnMaxLength(StopDecodingCondition):
    """Condition that a number of tokens has been decoded.

    >>> stop = StopOnMaxLength(2)
    >>> sequences = jnp.array([[[1, 4, 4, 0]], [[1, 3, 4, 0]]])
    >>> stop(index=jnp.array([2, 2]), sequences=sequences, prefix_len=jnp.array([1, 2])).tolist()
    [[True], [False]]
    """

    def __init__(self, max_num_decodes: int | Int[Array, " batch"]):
        """Creates the condition from the number of tokens after the prompt, for all or for each."""
        self._max_num_decodes = max_num_decodes

    def __call__(self, *, index, sequences, prefix_len):
        stop = jnp.asarray(
            index - prefix_len + 1 >= jnp.reshape(self._max_num_decodes, -1)
        )
        return jnp.broadcast_to(stop.reshape(-1, 1), sequences.shape[:2])


class CompositeDecodingCondition(StopDecodingCondition):
    """Condition that at least one of several conditions is true."""

    def __init__(self, conditions: Sequence[StopDecodingCondition]):
        """Creates the condition; raises ArgumentValueError if there are no conditions."""
        if not conditions:
            raise errors.ArgumentValueError(
                "conditions is empty; expected at least one condition."
            )
        self._conditions = tuple(conditions)

    def __call__(self, *, index, sequences, prefix_len):
        stop = jnp.zeros(sequences.shape[:2], bool)
        for condition in self._conditions:
            stop |= condition(
                index=index, sequences=sequences, prefix_len=prefix_len
            )
        return stop


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
    sequences = initial_sequences(
        inputs,
        time_step,
        num_decodes=num_decodes,
        max_decode_len=last,
        pad_id=pad_id,
    )

    def unfinished(state: DecodingState) -> Tensor:
        return jnp.any(~state.stop_decoding & (state.cur_index < last)[:, None])

    def step(state: DecodingState) -> DecodingState:
        # The first key is for this step, as in AXLearn, for equal samples from equal seeds.
        key, next_key = jax.random.split(state.prng_key)
        log_probs, cache = next_token_scores(
            tokens_to_scores, state.sequences, state.cur_index, state.cache
        )
        tokens = jax.random.categorical(key, log_probs)
        scores = jnp.take_along_axis(log_probs, tokens[:, :, None], axis=2)[
            :, :, 0
        ]
        done = state.stop_decoding
        index = state.cur_index + 1
        sequences = write_tokens_at(
            state.sequences, index, jnp.where(done, pad_id, tokens)
        )
        ends = stop_decoding_condition(
            index=index, sequences=sequences, prefix_len=time_step + 1
        )
        return DecodingState(
            cur_index=index,
            sequences=sequences,
            token_scores=write_tokens_at(
                state.token_scores,
                state.cur_index,
                jnp.where(done, 0.0, scores),
            ),
            stop_decoding=done | ends,
            cache=cache,
            prng_key=next_key,
        )

    first = DecodingState(
        cur_index=time_step.astype(jnp.int32),
        sequences=sequences,
        token_scores=_prompt_scores(input_token_scores, time_step, sequences),
        stop_decoding=jnp.zeros(sequences.shape[:2], bool),
        cache=expand_cache(cache, num_decodes),
        prng_key=prng_key,
    )
    state = run_loop(loop, unfinished, step, first)
    return SampleOutputs(state.sequences[:, :, 1:], state.token_scores)


def _prompt_scores(
    prefix_scores: Float[Array, "batch length"] | None,
    time_step: Tensor,
    sequences: Tensor,
) -> Float[Array, "batch decodes max_decode_len"]:
    batch, num_decodes, length = sequences.shape
    scores = jnp.zeros((batch, length - 1), jnp.float32)
    if prefix_scores is not None:
        size = min(prefix_scores.shape[1], length - 1)
        in_prompt = jnp.arange(size)[None] < time_step[:, None]
        scores = scores.at[:, :size].set(
            jnp.where(in_prompt, prefix_scores[:, :size], 0.0)
        )
    return add_decoding_dim(scores, num_decodes)


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
        """
        ...


def brevity_penalty_fn(
    *, alpha: float = 0.0, bp_type: Literal["t5", "hf"] = "t5"
) -> BrevityPenaltyFn:
    """Divides scores by a power of the length.

    Args:
      alpha: the power; larger values favor longer sequences, 0 changes nothing.
      bp_type: "t5" divides by `((5 + length) / 6)^alpha` ([Wu et al.,
        2016](https://arxiv.org/abs/1609.08144), equation 14), "hf" by `length^alpha`.

    Raises ArgumentValueError for any other `bp_type`.

    >>> brevity_penalty_fn(alpha=1.0)(length=jnp.array(7), raw_scores=jnp.array(-6.0)).item()
    -3.0
    """
    if bp_type not in ("t5", "hf"):
        raise errors.ArgumentValueError(
            f"bp_type={bp_type!r}; expected 't5' or 'hf'."
        )

    def penalize(*, length: Tensor, raw_scores: Tensor) -> Tensor:
        size = jnp.asarray(length, jnp.float32)
        return (
            raw_scores
            / (size if bp_type == "hf" else (5.0 + size) / 6.0) ** alpha
        )

    return penalize


class PrefixMerger(Protocol):
    """Merging of equivalent hypotheses, such as two alignments of one transcript.

    Beam search adds up the probabilities of merged hypotheses.
    """

    def init_state(
        self, *, tokens: Int[Array, "batch decodes length"]
    ) -> NestedTensor:
        """Returns the state for padded prompts; its arrays begin with the axes (batch, decodes)."""
        ...

    def update(
        self, *, tokens: Int[Array, "batch decodes"], state: NestedTensor
    ) -> NestedTensor:
        """Returns the state after the newest token of each hypothesis.

        The first step has the last token of each prompt.
        """
        ...

    def compute(
        self, state: NestedTensor
    ) -> Int[Array, "batch decodes decodes"]:
        """Returns 1 at (b, i, j) if hypothesis j of prompt b counts as its hypothesis i, else 0."""
        ...


def compute_merge_matrix_by_prefix_ids(
    prefix_ids: Int[Array, "batch decodes *length"],
) -> Int[Array, "batch decodes decodes"]:
    """Merges the hypotheses of a prompt with equal ids into the first of them.

    Ids are one number per hypothesis, such as a hash, or several.

    >>> compute_merge_matrix_by_prefix_ids(jnp.array([[5, 6, 5]])).tolist()
    [[[1, 0, 1], [0, 1, 0], [0, 0, 0]]]
    """
    same = prefix_ids[:, :, None] == prefix_ids[:, None, :]
    same = jnp.all(same, axis=range(3, same.ndim))
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


@dataclasses.dataclass(frozen=True)
class _BeamSearch:
    """Step of the loop, and when it ends."""

    last: int
    penalize: BrevityPenaltyFn
    tokens_to_scores: TokensToScores
    eos_ids: tuple[int, ...]
    merger: PrefixMerger | None
    prompts: Tensor
    pad_id: int

    def is_unfinished(self, state: _BeamState) -> Tensor:
        # Scores only fall as sequences grow, and penalties only shrink.
        best = jnp.max(state.live_scores, axis=1)
        bound = self.penalize(length=jnp.array(self.last), raw_scores=best)
        return (state.index < self.last) & (
            bound > jnp.min(state.scores, axis=1)
        )

    def step(self, state: _BeamState) -> _BeamState:
        is_open = self.is_unfinished(state)
        log_probs, cache = next_token_scores(
            self.tokens_to_scores,
            state.live_sequences,
            state.index,
            state.cache,
        )
        vocab = log_probs.shape[-1]
        pad_id, eos_ids = self.pad_id, jnp.array(self.eos_ids)
        for eos_id in self.eos_ids:
            if not 0 <= eos_id < vocab:
                raise errors.ArgumentValueError(
                    f"eos_id={eos_id} is not in the vocabulary of {vocab} tokens that "
                    f"tokens_to_scores scores; expected 0 <= eos_id < {vocab}."
                )
        index = state.index + 1
        candidates = jnp.maximum(
            state.live_scores[:, :, None] + log_probs, NEG_INF
        )
        forced = jnp.take_along_axis(
            self.prompts, index[:, None], axis=1, mode="clip"
        )
        is_forced = (forced != pad_id)[..., None]
        candidates = jnp.where(is_forced, NEG_INF, candidates)

        # Finished hypotheses: the old ones, and the live ones with each end token.
        scores, sequences = [state.scores], [state.sequences]
        for eos_id in self.eos_ids:
            ended = jnp.full(state.live_sequences.shape[:2], eos_id)
            penalized = self.penalize(
                length=index[:, None], raw_scores=candidates[:, :, eos_id]
            )
            scores.append(
                jnp.where(
                    candidates[:, :, eos_id] > NEG_INF, penalized, NEG_INF
                )
            )
            sequences.append(
                write_tokens_at(state.live_sequences, index, ended)
            )
        scores, chosen = jax.lax.top_k(
            jnp.concatenate(scores, axis=1), state.scores.shape[1]
        )
        sequences = gather_hypotheses(
            jnp.concatenate(sequences, axis=1), chosen
        )

        # Live hypotheses: the best that do not end. Within a prompt, only its token can follow.
        live_candidates = candidates.at[:, :, eos_ids].set(NEG_INF)
        prompt_scores = jnp.where(
            jax.nn.one_hot(forced, vocab, dtype=bool), 0.0, NEG_INF
        )
        first_candidates = jnp.where(
            is_forced, prompt_scores, live_candidates[:, :1]
        )
        live_candidates = live_candidates.at[:, :1].set(first_candidates)
        live_candidates = live_candidates.reshape(len(live_candidates), -1)
        live_scores, chosen = jax.lax.top_k(
            live_candidates, state.live_scores.shape[1]
        )
        parents, tokens = chosen // vocab, chosen % vocab
        live_sequences = write_tokens_at(
            gather_hypotheses(state.live_sequences, parents), index, tokens
        )
        merger_state = jax.tree.map(
            lambda x: gather_hypotheses(x, parents), state.merger_state
        )
        live_scores, merger_state = _merge_prefixes(
            self.merger, tokens, live_scores, merger_state
        )

        def if_open(new: Tensor, old: Tensor) -> Tensor:
            return jnp.where(
                is_open.reshape(-1, *[1] * (new.ndim - 1)), new, old
            )

        return _BeamState(
            index=if_open(index, state.index),
            live_sequences=if_open(live_sequences, state.live_sequences),
            live_scores=if_open(live_scores, state.live_scores),
            sequences=if_open(sequences, state.sequences),
            scores=if_open(scores, state.scores),
            cache=gather_cache(cache, parents),
            merger_state=merger_state,
        )


def beam_search_decode(
    *,
    inputs: Int[Array, "batch length"],
    time_step: Int[Array, " batch"],
    cache: NestedTensor,
    tokens_to_scores: TokensToScores,
    eos_id: int | Sequence[int],
    num_decodes: int,
    max_decode_len: int | None = None,
    loop: Literal["lax", "python"] = "lax",
    brevity_penalty: BrevityPenaltyFn | None = None,
    pad_id: int = 0,
    prefix_merger: PrefixMerger | None = None,
) -> BeamSearchOutputs:
    """Searches for the likeliest continuations of prompts.

    Args:
      inputs, time_step, cache, tokens_to_scores, max_decode_len, loop: as for `sample_decode`, but
        tokens of `inputs` after `time_step` that are not `pad_id` are forced: they are the next
        ones of the only hypothesis, whose score is 0.
      eos_id: the id of the end token, or several that each end a hypothesis.
      num_decodes: number of hypotheses to keep, and to return, per prompt.
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
    sequences = initial_sequences(
        inputs,
        time_step,
        num_decodes=num_decodes,
        max_decode_len=last,
        pad_id=pad_id,
    )
    nothing = jnp.full(sequences.shape[:2], NEG_INF, jnp.float32)
    merger_state = (
        None
        if prefix_merger is None
        else prefix_merger.init_state(tokens=sequences)
    )
    # The hypotheses of a prompt are equal at first, so all but one start dead.
    live_scores, merger_state = _merge_prefixes(
        prefix_merger,
        tokens_at(sequences, time_step),
        nothing.at[:, 0].set(0.0),
        merger_state,
    )
    padding = ((0, 0), (0, last + 1 - inputs.shape[1]))
    state = _BeamState(
        index=time_step.astype(jnp.int32),
        live_sequences=sequences,
        live_scores=live_scores,
        sequences=jnp.full_like(sequences, pad_id),
        scores=nothing,
        cache=expand_cache(cache, num_decodes),
        merger_state=merger_state,
    )
    prompts = jnp.pad(inputs, padding, constant_values=pad_id)
    search = _BeamSearch(
        last,
        penalize,
        tokens_to_scores,
        end_ids(eos_id),
        prefix_merger,
        prompts=prompts,
        pad_id=pad_id,
    )
    state = run_loop(
        loop,
        lambda state: jnp.any(search.is_unfinished(state)),
        search.step,
        state,
    )
    return BeamSearchOutputs(
        state.sequences[:, :, 1:],
        state.scores,
        state.live_sequences[:, :, 1:],
        state.live_scores,
    )


def _merge_prefixes(
    merger: PrefixMerger | None, tokens: Tensor, scores: Tensor, state: Any
) -> tuple[Tensor, Any]:
    """Adds up the probabilities of merged hypotheses, and marks all but one of them dead."""
    if merger is None:
        return scores, state
    state = merger.update(tokens=tokens, state=state)
    merged = jax.nn.logsumexp(
        scores[:, None, :], axis=2, b=merger.compute(state)
    )
    return jnp.maximum(merged, NEG_INF), state
