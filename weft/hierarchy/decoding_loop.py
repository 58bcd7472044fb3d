"""Layout of hypotheses in arrays, and the loop itself, shared by all decoding methods.

A batch of `batch` prompts is decoded into `num_decodes` hypotheses each. Sequences have the shape
`(batch, num_decodes, length)`; the model and its cache see both leading axes as one. Each prompt
has its own position, so that prompts of different lengths are decoded together:

    position   0    1    2    3
               bos  a    b    .        the last known token is at `index` (here 2);
                              ^        its scores determine the token at `index + 1`
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
"""Score of an impossible choice: finite, so that sums of such scores are not NaN."""

TokensToScores = Callable[[Tensor, NestedTensor], tuple[Tensor, NestedTensor]]
"""Function from token ids `(batch * num_decodes, 1)` and the cache to the log probabilities of the
next token, `(batch * num_decodes, vocab)`, and the new cache."""

State = TypeVar("State")


def infer_initial_time_step(
    prefix: Int[Array, "batch length"], *, pad_id: int
) -> Int[Array, " batch"]:
    """Returns the position of each prompt's last token that is not padding, at least 0.

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
    return x if x.ndim == 0 else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def unflatten_decoding_dim(
    x: Shaped[Array, "rows ..."], batch_size: int, num_decodes: int
) -> Shaped[Array, "batch decodes ..."]:
    """Splits the first axis into prompts and hypotheses; a scalar is unchanged."""
    return x if x.ndim == 0 else x.reshape(batch_size, num_decodes, *x.shape[1:])


def expand_cache(cache: NestedTensor, num_decodes: int) -> NestedTensor:
    """Repeats a cache of one entry per prompt for each hypothesis, merging both axes.

    In a `VDict` the arrays of several layers are stacked, and the prompts are the second axis.
    """
    return map_blocks(lambda x: flatten_decoding_dim(add_decoding_dim(x, num_decodes)), cache)


def gather_cache(cache: NestedTensor, hypotheses: Int[Array, "batch decodes"]) -> NestedTensor:
    """Gathers for each new hypothesis the cache, as of `expand_cache`, of the one it continues."""
    batch, num_decodes = hypotheses.shape
    rows = (jnp.arange(batch)[:, None] * num_decodes + hypotheses).reshape(-1)
    return map_blocks(lambda x: x if x.ndim == 0 else x[rows], cache)


def gather_hypotheses(
    x: Shaped[Array, "batch decodes ..."], hypotheses: Int[Array, "batch chosen"]
) -> Shaped[Array, "batch chosen ..."]:
    """Gathers hypotheses of each prompt."""
    return jax.vmap(lambda of_prompt, chosen: of_prompt[chosen])(x, hypotheses)


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
        raise ArgumentValueError(f"num_decodes={num_decodes}; expected at least 1.")
    length = inputs.shape[1]
    if length > max_decode_len + 1:
        raise ArgumentShapeError(
            f"inputs of shape {inputs.shape} are longer than max_decode_len={max_decode_len} "
            f"allows, which is {max_decode_len + 1} with the first token; "
            f"raise max_decode_len to {length - 1} or more."
        )
    prompt = jnp.where(jnp.arange(length)[None] <= time_step[:, None], inputs, pad_id)
    padded = jnp.pad(prompt, ((0, 0), (0, max_decode_len + 1 - length)), constant_values=pad_id)
    return add_decoding_dim(padded.astype(jnp.int32), num_decodes)


def tokens_at(
    sequences: Int[Array, "batch decodes length"], index: Int[Array, " batch"]
) -> Int[Array, "batch decodes"]:
    """Returns the tokens at each prompt's position, the last ones for a position beyond the end."""
    return jnp.take_along_axis(sequences, index[:, None, None], axis=2, mode="clip")[:, :, 0]


def put_at(
    x: Shaped[Array, "batch decodes length"],
    index: Int[Array, " batch"],
    values: Shaped[Array, "batch decodes"],
) -> Shaped[Array, "batch decodes length"]:
    """Returns `x` with new values at each prompt's position; those beyond the end are ignored."""
    return x.at[jnp.arange(x.shape[0]), :, index].set(values.astype(x.dtype), mode="drop")


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
    kind: str, cond: Callable[[State], Any], body: Callable[[State], State], state: State
) -> State:
    """Runs `jax.lax.while_loop`, or the same in Python.

    Args:
      kind: "lax" or "python"; the latter shows concrete values to a debugger.

    Raises:
      ArgumentValueError: for any other `kind`.
    """
    if kind == "lax":
        return lax.while_loop(cond, body, state)
    if kind != "python":
        raise ArgumentValueError(f"loop={kind!r}; expected 'lax' or 'python'.")
    while cond(state):
        state = body(state)
    return state
