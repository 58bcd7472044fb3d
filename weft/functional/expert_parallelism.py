"""Expert parallelism: devices along a mesh axis hold different experts and exchange tokens.

Each device sends a token to the devices of the experts that it chose, and gets their results back
(Lepikhin et al., 2021, https://arxiv.org/abs/2006.16668), by all-to-all. Shapes are static: in one
round a device sends equally many rows to each other one, some more than if all experts were chosen
equally often. What is left follows in further rounds, as many as needed, so that nothing is dropped
and the memory is the same however uneven the choices are:

    device 0's choices, sorted by device    to 0: a b c d e    to 1: f
    round 0                                       a b c              f - -
    round 1                                       d e -              - - -

The backward pass computes each round again, so that nothing is kept of a round.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from weft.functional.routing import sort_by_expert
from weft.typing import PyTree

# Rows that a device may send to another one in a round, in multiples of an equal share. With less
# room there are more rounds; with more, devices send more padding and need more memory.
_ROOM = 1.5

ApplyExperts = Callable[[Array, Array, Array, PyTree], Array]
"""Function from rows, the expert of each on this device, their gates and the weights to results."""


class _Arrays(NamedTuple):
    """Arrays that have gradients."""

    tokens: Array  # (tokens, dim)
    gates: Array  # (choices,)
    weights: PyTree


class _Queues(NamedTuple):
    """Choices of a device's tokens, in one queue for each device that has experts.

    Attributes:
        choices: `(choices,)`, their numbers, queue after queue. The choices of token `t` are
            `choices_per_token * t` and those that follow.
        experts: `(choices,)`, by these numbers, the expert among those of its device.
        starts: `(devices,)`, the place in `choices` where a queue starts.
        sizes: `(devices,)`, the length of a queue.
        num_rounds: after how many rounds all queues of all devices are empty.
    """

    choices: Array
    experts: Array
    starts: Array
    sizes: Array
    num_rounds: Array


class _Exchange(NamedTuple):
    """Exchange of rows with the devices along some mesh axes."""

    apply: ApplyExperts
    axis_names: tuple[str, ...]
    num_experts: int  # of a device
    choices_per_token: int
    rows_per_round: int  # from one device to another

    def move(self, tree: PyTree) -> PyTree:
        """Sends `x[i]` to device `i`; the result has what device `i` sent at the same place."""
        return jax.tree.map(
            lambda x: jax.lax.all_to_all(x, self.axis_names, 0, 0), tree
        )


def dispatch_and_combine(
    apply: ApplyExperts,
    tokens: Float[Array, "tokens dim"],
    experts: Int[Array, "tokens k"],
    gates: Float[Array, "tokens k"],
    weights: PyTree,
    *,
    num_experts: int,
    axis_names: tuple[str, ...],
    token_axis_names: tuple[str, ...],
) -> Float[Array, "tokens dim"]:
    """Returns the sum of what the experts of a token, on their devices, make of it.

    Called on each device, in a `jax.shard_map`, with its tokens and the weights of its experts.
    There is a gradient, but no forward-mode derivative.

    Args:
        apply: applies the experts of this device to rows, `(rows, dim)`, and multiplies by gates,
            `(rows,)`. Experts are `(rows,)`, from 0 on; rows of the expert `num_experts` are
            padding. It must not use any other arrays.
        experts: indices among the experts of all devices; those beyond the last have no result.
        num_experts: number of experts of a device.
        axis_names: mesh axes over which experts are split.
        token_axis_names: all mesh axes over which tokens are split.
    """
    num_devices = math.prod(map(jax.lax.axis_size, axis_names))
    share = experts.size / num_devices
    exchange = _Exchange(
        apply,
        axis_names,
        num_experts,
        choices_per_token=experts.shape[-1],
        rows_per_round=math.ceil(min(_ROOM * share, experts.size)),
    )
    by_expert = sort_by_expert(
        experts,
        first=0,
        num_experts=num_devices * num_experts,
        num_rows=experts.size,
    )
    sizes = jnp.sum(by_expert.sizes.reshape(num_devices, num_experts), axis=1)
    num_rounds = -(-jnp.max(sizes) // exchange.rows_per_round)
    queues = _Queues(
        choices=by_expert.choices,
        experts=experts.reshape(-1) % num_experts,
        starts=jnp.cumsum(sizes) - sizes,
        sizes=sizes,
        # Those who exchange rows need each other in all of their rounds.
        num_rounds=jax.lax.pmax(num_rounds, token_axis_names),
    )
    arrays = _Arrays(tokens, gates.reshape(-1), weights)
    results: Any = _all_rounds(exchange, arrays, queues)
    return results.astype(tokens.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(exchange: _Exchange, arrays: _Arrays, queues: _Queues) -> Array:
    dtype = jnp.promote_types(arrays.tokens.dtype, jnp.float32)
    results = jnp.zeros(arrays.tokens.shape, dtype)

    def add_round(number: Array, results: Array) -> Array:
        return results + _one_round(exchange, arrays, queues, number, dtype)

    return jax.lax.fori_loop(0, queues.num_rounds, add_round, results)


def _one_round(
    exchange: _Exchange,
    arrays: _Arrays,
    queues: _Queues,
    number: Array,
    dtype: Any,
) -> Array:
    """Returns what the choices of one round add to each token."""
    # The part of each queue that this round sends, (devices, rows); after its end comes padding.
    rows = jnp.arange(exchange.rows_per_round)[None, :]
    places = number * exchange.rows_per_round + rows
    is_real = places < queues.sizes[:, None]
    choices = queues.choices[queues.starts[:, None] + places]
    tokens = choices // exchange.choices_per_token
    outgoing = (
        jnp.where(is_real[..., None], arrays.tokens[tokens], 0),
        jnp.where(is_real, queues.experts[choices], exchange.num_experts),
        jnp.where(is_real, arrays.gates[choices], 0),
    )
    # Experts do not care which device a row comes from, but its result returns there.
    incoming = exchange.move(outgoing)
    inputs, experts, gates = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), incoming
    )
    results = exchange.apply(inputs, experts, gates, arrays.weights)
    returned_results = exchange.move(results.reshape(*is_real.shape, -1))
    returned_results = jnp.where(is_real[..., None], returned_results, 0)
    # A token has the results of several choices, some of them perhaps in other rounds.
    sums = jnp.zeros(arrays.tokens.shape, dtype)
    return sums.at[tokens].add(returned_results.astype(dtype))


def _forward(
    exchange: _Exchange, arrays: _Arrays, queues: _Queues
) -> tuple[Array, tuple[_Arrays, _Queues]]:
    results: Any = _all_rounds(exchange, arrays, queues)
    return results, (arrays, queues)


def _backward(
    exchange: _Exchange, saved: tuple[_Arrays, _Queues], cotangent: Array
) -> tuple[_Arrays, None]:
    arrays, queues = saved

    def add_round(number: Array, gradients: _Arrays) -> _Arrays:
        def one_round(arrays: _Arrays) -> Array:
            return _one_round(exchange, arrays, queues, number, cotangent.dtype)

        _, pull_back = jax.vjp(one_round, arrays)
        (round_gradients,) = pull_back(cotangent)
        return jax.tree.map(jnp.add, gradients, round_gradients)

    gradients = jax.tree.map(jnp.zeros_like, arrays)
    gradients = jax.lax.fori_loop(0, queues.num_rounds, add_round, gradients)
    return gradients, None


_all_rounds.defvjp(_forward, _backward)
