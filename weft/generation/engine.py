"""The loop of generation: rows of a batch, each with a sequence that grows by a token per step.

    waiting requests ── prefill ── insert into a free row ─┐
                                                           ├── decode ── new tokens of all rows
                             rows of unfinished sequences ─┘      (up to 64 steps at once)

A row whose sequence ends is free for the next request, so that short sequences do not wait for long
ones. Programs are compiled for a number of rows and for lengths that are powers of two, or sums of
two of them: `prefill` for the length of the prompt, `decode` for the largest number of positions.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from weft import errors, struct
from weft.functional.arrays import platform
from weft.generation.decoding_models import DecodingModel
from weft.generation.sampler import (
    Sampling,
    SamplingRules,
    SamplingValues,
    choose_tokens,
)
from weft.trainer.compilation import options_for_steps
from weft.typing import NestedTensor

_MAX_STEPS = 64
"""Largest number of steps of a call of `decode`."""

_MIN_LENGTH = 16
"""Smallest number of positions that programs are compiled for."""

_NO_TOKEN = -1


class Request(NamedTuple):
    """A sequence to generate.

    Attributes:
        prompt: ids of the tokens before it, at least one.
        tokens: largest number of tokens to add, at least one.
        key: of everything that is drawn for the sequence.
    """

    prompt: np.ndarray
    tokens: int
    key: Key[Array, ""]


class Sink(Protocol):
    """Receiver of the tokens of a request."""

    def add(self, tokens: Sequence[int]) -> bool:
        """Takes further tokens, the last one an end where there is one.

        Returns whether the sequence shall go on, if it has not ended.
        """
        ...


class _Rows(struct.PyTreeNode):
    """State of all rows.

    Attributes:
        model: the state of the model, before the last token.
        last_tokens: the newest token of each row, which the model has not seen yet.
        num_left: number of tokens that may follow.
        is_active: False for rows that are free.
        num_tokens: number of tokens that were generated.
        keys: of each sequence.
        seen: the tokens of each sequence, `(batch, vocab)`, if a repetition penalty needs them.
    """

    model: NestedTensor
    last_tokens: Int[Array, " batch"]
    num_left: Int[Array, " batch"]
    is_active: Bool[Array, " batch"]
    num_tokens: Int[Array, " batch"]
    keys: Key[Array, " batch"]
    seen: Bool[Array, "batch vocab"] | None


class _Program(NamedTuple):
    """Parts that the compiled functions depend on, besides the shapes of their arguments."""

    model: DecodingModel
    rules: SamplingRules
    end_ids: tuple[int, ...]


def _prepare(model: DecodingModel, params: NestedTensor) -> NestedTensor:
    return model.prepare(params)


def _prefill(
    model: DecodingModel,
    params: NestedTensor,
    tokens: Int[Array, " length"],
    length: Int[Array, ""],
) -> tuple[NestedTensor, Array]:
    return model.prefill(params, tokens, length)


def _insert(
    program: _Program,
    values: SamplingValues,
    rows: _Rows,
    row: Int[Array, ""],
    prompt_state: NestedTensor,
    logits: Array,
    tokens: Int[Array, " length"],
    length: Int[Array, ""],
    num_tokens: Int[Array, ""],
    key: Key[Array, ""],
) -> tuple[_Rows, Int[Array, ""]]:
    """Puts a sequence after its prompt into a row, and chooses its first token."""
    seen = rows.seen
    seen_in_prompt = None
    if seen is not None:
        vocab_size = seen.shape[1]
        is_token = jnp.arange(len(tokens)) < length
        index = jnp.where(is_token, tokens, vocab_size)
        seen_in_prompt = jnp.zeros((1, vocab_size), bool)
        seen_in_prompt = seen_in_prompt.at[0, index].set(True, mode="drop")
    first_key = jax.random.fold_in(key, 0)
    token = choose_tokens(
        program.rules, values, logits[None], first_key[None], seen_in_prompt
    )[0]
    if seen is not None:
        assert seen_in_prompt is not None
        seen = seen.at[row].set(seen_in_prompt[0].at[token].set(True))
    is_end = _is_end(token, program.end_ids)
    rows = rows.replace(
        model=program.model.insert(rows.model, prompt_state, row, length),
        last_tokens=rows.last_tokens.at[row].set(token),
        num_left=rows.num_left.at[row].set(num_tokens - 1),
        is_active=rows.is_active.at[row].set(~is_end & (num_tokens > 1)),
        num_tokens=rows.num_tokens.at[row].set(1),
        keys=rows.keys.at[row].set(key),
        seen=seen,
    )
    return rows, token


class _Decoded(NamedTuple):
    """Result of some steps: new tokens `(batch, _MAX_STEPS)`, and the rows that go on."""

    tokens: Int[Array, "batch steps"]
    is_active: Bool[Array, " batch"]


def _decode(
    program: _Program,
    params: NestedTensor,
    values: SamplingValues,
    rows: _Rows,
    goes_on: Bool[Array, " batch"],
    max_steps: Int[Array, ""],
    returns_early: Bool[Array, ""],
) -> tuple[_Rows, _Decoded]:
    """Takes up to `max_steps` steps of all rows.

    Args:
        goes_on: False for rows whose sequence the caller has ended.
        returns_early: whether to return as soon as a row ends, so that it gets another sequence.
    """
    rows = rows.replace(is_active=rows.is_active & goes_on)
    active_at_start = rows.is_active

    def is_unfinished(carry: tuple[Any, _Rows, Any]) -> Array:
        step, rows, _ = carry
        has_free_row = jnp.any(active_at_start & ~rows.is_active)
        return (
            (step < max_steps)
            & jnp.any(rows.is_active)
            & ~(returns_early & has_free_row)
        )

    def take_step(carry: tuple[Any, _Rows, Any]) -> tuple[Any, _Rows, Any]:
        step, rows, new_tokens = carry
        model_state, logits = program.model.step(
            params, rows.model, rows.last_tokens
        )
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.num_tokens)
        tokens = choose_tokens(program.rules, values, logits, keys, rows.seen)
        is_active = rows.is_active
        num_left = rows.num_left - is_active
        seen = rows.seen
        if seen is not None:
            seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
        new_tokens = jax.lax.dynamic_update_slice_in_dim(
            new_tokens,
            jnp.where(is_active, tokens, _NO_TOKEN)[:, None],
            step,
            axis=1,
        )
        is_end = _is_end(tokens, program.end_ids)
        rows = rows.replace(
            model=model_state,
            last_tokens=tokens,
            num_left=num_left,
            is_active=is_active & ~is_end & (num_left > 0),
            num_tokens=rows.num_tokens + is_active,
            seen=seen,
        )
        return step + 1, rows, new_tokens

    batch = len(rows.last_tokens)
    no_tokens = jnp.full((batch, _MAX_STEPS), _NO_TOKEN, jnp.int32)
    _, rows, new_tokens = jax.lax.while_loop(
        is_unfinished, take_step, (jnp.int32(0), rows, no_tokens)
    )
    return rows, _Decoded(new_tokens, rows.is_active)


def _is_end(tokens: Array, end_ids: tuple[int, ...]) -> Array:
    is_end = jnp.zeros(tokens.shape, bool)
    for end_id in end_ids:
        is_end |= tokens == end_id
    return is_end


class _Prompt(NamedTuple):
    """A prompt that was computed, for all requests that begin with it."""

    ids: np.ndarray
    tokens: Int[Array, " length"]
    state: NestedTensor
    logits: Array


class Engine:
    """Generates sequences of tokens with a model; keeps its caches from call to call.

    Args:
        model: see `decoding_model`.
        params: the model's parameters.
        end_ids: the tokens that end a sequence.
        batch_size: number of sequences to compute at once, if there are so many.
        expected_tokens: number of tokens to generate in all calls; None for many. For few tokens
            of a small model, programs are compiled in less time, and not to be fast.
    """

    def __init__(
        self,
        model: DecodingModel,
        params: NestedTensor,
        *,
        end_ids: Sequence[int],
        batch_size: int = 32,
        expected_tokens: int | None = None,
    ):
        if batch_size < 1:
            raise errors.GenerationError(
                f"batch_size={batch_size}; expected 1, or more."
            )
        self._model = model
        self._end_ids = tuple(sorted(set(end_ids)))
        self._batch_size = batch_size
        self._idle_rows: dict[tuple[int, int], _Rows] = {}
        self._vocab_size = model.vocab_size
        options = None
        if expected_tokens is not None:
            options = options_for_steps(
                platform(),
                params,
                lambda: np.zeros(1),
                expected_tokens,
            )
        jit = functools.partial(jax.jit, compiler_options=options)
        self._prepare = jit(_prepare, static_argnums=0)
        self._prefill = jit(_prefill, static_argnums=0)
        self._insert = jit(_insert, static_argnums=0, donate_argnums=2)
        self._decode = jit(_decode, static_argnums=0, donate_argnums=3)
        self._init_rows = jit(_init_rows, static_argnums=(0, 2, 3))
        self.set_params(params)

    def set_params(self, params: NestedTensor) -> None:
        """Replaces the parameters, such as by those after further training."""
        self._params = self._prepare(self._model, params)

    def run(
        self,
        requests: Sequence[Request],
        sinks: Sequence[Sink],
        sampling: Sampling,
        *,
        steps: int = _MAX_STEPS,
    ) -> Iterator[None]:
        """Generates the sequences of requests; yields after each call of the model's program.

        Args:
            sinks: get the tokens, one for each request.
            steps: number of tokens per sequence and call, at most 64. The more, the later the
                sinks have them, and the less time is lost between calls.
        """
        if not requests:
            return
        num_rows = min(self._batch_size, len(requests))
        num_positions = _num_positions(requests)
        program = _Program(self._model, sampling.rules, self._end_ids)
        values = sampling.values
        rows = self._take_rows(num_rows, num_positions, sampling)
        waiting = collections.deque(range(len(requests)))
        request_by_row: dict[int, int] = {}
        prompt: _Prompt | None = None
        while waiting or request_by_row:
            first_tokens: dict[int, Array] = {}
            for row in range(num_rows):
                if row in request_by_row or not waiting:
                    continue
                index = waiting.popleft()
                request = requests[index]
                if prompt is None or not np.array_equal(
                    prompt.ids, request.prompt
                ):
                    prompt = self._compute_prompt(request.prompt)
                rows, token = self._insert(
                    program,
                    values,
                    rows,
                    np.int32(row),
                    prompt.state,
                    prompt.logits,
                    prompt.tokens,
                    np.int32(len(request.prompt)),
                    np.int32(request.tokens),
                    request.key,
                )
                request_by_row[row] = index
                first_tokens[row] = token
            goes_on = np.zeros(num_rows, bool)
            for row, index in list(request_by_row.items()):
                goes_on[row] = True
                if row not in first_tokens:
                    continue
                token = int(first_tokens[row])
                wants_more = sinks[index].add([token])
                is_last = token in self._end_ids or requests[index].tokens == 1
                if is_last or not wants_more:
                    goes_on[row] = False
                    del request_by_row[row]
            if first_tokens:
                yield
            if not request_by_row:
                continue
            rows, decoded = self._decode(
                program,
                self._params,
                values,
                rows,
                goes_on,
                np.int32(min(steps, _MAX_STEPS)),
                np.bool_(len(waiting) > 0),
            )
            new_tokens, is_active = jax.device_get(decoded)
            for row, index in list(request_by_row.items()):
                tokens = new_tokens[row]
                wants_more = sinks[index].add(
                    tokens[tokens != _NO_TOKEN].tolist()
                )
                if not (is_active[row] and wants_more):
                    del request_by_row[row]
            yield
        self._idle_rows = {(num_rows, num_positions): rows}

    def _compute_prompt(self, ids: np.ndarray) -> _Prompt:
        tokens = np.zeros(_power_of_two(len(ids)), np.int32)
        tokens[: len(ids)] = ids
        state, logits = self._prefill(
            self._model, self._params, tokens, np.int32(len(ids))
        )
        return _Prompt(ids, jnp.asarray(tokens), state, logits)

    def _take_rows(
        self, num_rows: int, num_positions: int, sampling: Sampling
    ) -> _Rows:
        """Returns rows without sequences, those of the last call if they have the same shape."""
        rows = self._idle_rows.pop((num_rows, num_positions), None)
        self._idle_rows = {}  # there is room for one cache
        if rows is None:
            rows = self._init_rows(
                self._model, self._params, num_rows, num_positions
            )
        seen = None
        if sampling.rules.has_penalty:
            if self._vocab_size is None:
                self._vocab_size = self._size_of_logits()
            seen = jnp.zeros((num_rows, self._vocab_size), bool)
        return rows.replace(seen=seen)

    def _size_of_logits(self) -> int:
        _, logits = jax.eval_shape(
            functools.partial(_prefill, self._model),
            self._params,
            jax.ShapeDtypeStruct((_MIN_LENGTH,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return logits.shape[0]


def _init_rows(
    model: DecodingModel,
    params: NestedTensor,
    num_rows: int,
    num_positions: int,
) -> _Rows:
    zeros = jnp.zeros(num_rows, jnp.int32)
    return _Rows(
        model=model.init_states(
            params, batch_size=num_rows, max_length=num_positions
        ),
        last_tokens=zeros,
        num_left=zeros,
        is_active=jnp.zeros(num_rows, bool),
        num_tokens=zeros,
        keys=jax.random.split(jax.random.key(0), num_rows),
        seen=None,
    )


def _num_positions(requests: Sequence[Request]) -> int:
    """Returns the room of a cache for each sequence, of few sizes in all.

    Attention reads the whole cache in each step. A power of two for the prompts and another for the
    new tokens is less than one for both where these are just above one.
    """
    longest_prompt = max(len(request.prompt) for request in requests)
    most_tokens = max(request.tokens for request in requests)
    longest = max(len(request.prompt) + request.tokens for request in requests)
    room_for_parts = _power_of_two(longest_prompt) + _power_of_two(most_tokens)
    return min(room_for_parts, _power_of_two(longest))


def _power_of_two(length: int) -> int:
    """Returns the smallest power of two that is not less than a length."""
    return max(_MIN_LENGTH, 1 << (length - 1).bit_length())
