"""What the decoding loops share: how hypotheses lie in arrays, and the loop itself.

A batch of `batch` prompts is decoded into `num_decodes` hypotheses each. Sequences have the shape
`(batch, num_decodes, length)`; the model sees both leading axes as one, and its cache has both as
one. Each prompt has its own position in time, so that prompts of different lengths are decoded side
by side:

    position   0    1    2    3
               bos  a    b    .        the last token that is known stands at `index` (here 2);
                              ^        its scores tell the token at `index + 1`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.typing import NestedTensor, Tensor
from weft.vdict import map_blocks

NEG_INF = -1.0e7
"""The score of what cannot be chosen: finite, so that sums of such scores stay numbers."""

TokensToScores = Callable[[Tensor, NestedTensor], tuple[Tensor, NestedTensor]]
"""Takes token ids `(batch * num_decodes, 1)` and the cache; gives the log probabilities of the next
token, `(batch * num_decodes, vocab)`, and the new cache."""

State = TypeVar("State")


def infer_initial_time_step(
    prefix: Int[Array, "batch length"], *, pad_id: int
) -> Int[Array, " batch"]:
    """The position of each prompt's last token: of the last one that is no padding.

    Args:
      prefix: prompts, padded on the right. One that is all padding counts as one token.
      pad_id: the token that pads.

    >>> infer_initial_time_step(jnp.array([[1, 5, 6, 0], [1, 0, 0, 0]]), pad_id=0).tolist()
    [2, 0]
    """
    positions = jnp.arange(prefix.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(prefix == pad_id, 0, positions), axis=1)


def add_decoding_dim(
    x: Shaped[Array, "batch ..."], num_decodes: int
) -> Shaped[Array, "batch decodes ..."]:
    """Repeats `x` for each hypothesis; a scalar stays as it is.

    Args:
      x: one entry per prompt.
      num_decodes: the number of hypotheses per prompt.
    """
    return x if x.ndim == 0 else jnp.repeat(x[:, None], num_decodes, axis=1)


def flatten_decoding_dim(
    x: Shaped[Array, "batch decodes ..."],
) -> Shaped[Array, "rows ..."]:
    """Makes the first two axes one; a scalar stays as it is."""
    return x if x.ndim == 0 else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def unflatten_decoding_dim(
    x: Shaped[Array, "rows ..."], batch_size: int, num_decodes: int
) -> Shaped[Array, "batch decodes ..."]:
    """Makes the first axis two again; a scalar stays as it is.

    Args:
      x: as the model gives it.
      batch_size: the number of prompts.
      num_decodes: the number of hypotheses per prompt.
    """
    return x if x.ndim == 0 else x.reshape(batch_size, num_decodes, *x.shape[1:])


def expand_cache(cache: NestedTensor, num_decodes: int) -> NestedTensor:
    """Repeats a cache of one entry per prompt for each hypothesis, both axes in one.

    In a `VDict` the arrays of several layers are stacked, so there the prompts are the second axis.
    """
    return map_blocks(lambda x: flatten_decoding_dim(add_decoding_dim(x, num_decodes)), cache)


def gather_cache(cache: NestedTensor, hypotheses: Int[Array, "batch decodes"]) -> NestedTensor:
    """Gives each hypothesis the cache of the one that it continues.

    Args:
      cache: as `expand_cache` lays it out.
      hypotheses: for each new hypothesis, which old one of the same prompt it continues.
    """
    batch, num_decodes = hypotheses.shape
    rows = (jnp.arange(batch)[:, None] * num_decodes + hypotheses).reshape(-1)
    return map_blocks(lambda x: x if x.ndim == 0 else x[rows], cache)


def gather_hypotheses(
    x: Shaped[Array, "batch decodes ..."], hypotheses: Int[Array, "batch chosen"]
) -> Shaped[Array, "batch chosen ..."]:
    """Chooses hypotheses of each prompt.

    Args:
      x: one entry per hypothesis.
      hypotheses: for each prompt, which ones.
    """
    return jax.vmap(lambda of_prompt, chosen: of_prompt[chosen])(x, hypotheses)


def initial_sequences(
    inputs: Int[Array, "batch length"],
    time_step: Int[Array, " batch"],
    *,
    num_decodes: int,
    max_decode_len: int,
    pad_id: int,
) -> Int[Array, "batch decodes max_decode_len+1"]:
    """The prompts, for each hypothesis, padded to the length of what will be decoded.

    Args:
      inputs: prompts that begin with a token that is not part of the result.
      time_step: the position of each prompt's last token; what follows is not read.
      num_decodes: the number of hypotheses per prompt.
      max_decode_len: the length of a result, without the first token.
      pad_id: the token that pads.

    Raises:
      ArgumentShapeError: if the prompts are longer than what will be decoded.
      ArgumentValueError: if `num_decodes` is not positive.
    """
    if num_decodes < 1:
        raise ArgumentValueError(f"num_decodes={num_decodes}; expected at least 1.")
    length = inputs.shape[1]
    if length > max_decode_len + 1:
        raise ArgumentShapeError(
            f"inputs of shape {inputs.shape} are longer than max_decode_len={max_decode_len} "
            f"leaves room for, which is {max_decode_len + 1} with the first token; "
            f"raise max_decode_len to {length - 1} or more."
        )
    prompt = jnp.where(jnp.arange(length)[None] <= time_step[:, None], inputs, pad_id)
    padded = jnp.pad(prompt, ((0, 0), (0, max_decode_len + 1 - length)), constant_values=pad_id)
    return add_decoding_dim(padded.astype(jnp.int32), num_decodes)


def tokens_at(
    sequences: Int[Array, "batch decodes length"], index: Int[Array, " batch"]
) -> Int[Array, "batch decodes"]:
    """The tokens at each prompt's position, the last ones for a position beyond the end."""
    return jnp.take_along_axis(sequences, index[:, None, None], axis=2, mode="clip")[:, :, 0]


def put_at(
    x: Shaped[Array, "batch decodes length"],
    index: Int[Array, " batch"],
    values: Shaped[Array, "batch decodes"],
) -> Shaped[Array, "batch decodes length"]:
    """`x` with new values at each prompt's position; a position beyond the end changes nothing."""
    return x.at[jnp.arange(x.shape[0]), :, index].set(values.astype(x.dtype), mode="drop")


def next_token_scores(
    tokens_to_scores: TokensToScores,
    sequences: Int[Array, "batch decodes length"],
    index: Int[Array, " batch"],
    cache: NestedTensor,
) -> tuple[Float[Array, "batch decodes vocab"], NestedTensor]:
    """The log probabilities of the token after each prompt's position, and the new cache."""
    batch, num_decodes, _ = sequences.shape
    tokens = flatten_decoding_dim(tokens_at(sequences, index))
    scores, cache = tokens_to_scores(tokens[:, None], cache)
    return unflatten_decoding_dim(scores, batch, num_decodes), cache


def run_loop(
    kind: str, cond: Callable[[State], Any], body: Callable[[State], State], state: State
) -> State:
    """`jax.lax.while_loop`, or the same in Python.

    Args:
      kind: "lax" or "python"; the latter shows concrete values to a debugger.
      cond: whether to go on.
      body: one step.
      state: the first state.

    Raises:
      ArgumentValueError: if `kind` is neither.
    """
    if kind == "lax":
        return lax.while_loop(cond, body, state)
    if kind != "python":
        raise ArgumentValueError(f"loop={kind!r}; expected 'lax' or 'python'.")
    while cond(state):
        state = body(state)
    return state
