"""Routing of tokens to experts.

Each token of a group chooses `k` experts by the router's scores. An expert has `capacity` slots per
group, assigned to all first choices in the order of the tokens, then to all second choices, and so
on; choices without a slot are dropped, and add nothing to the token's output (GShard: Lepikhin et
al., 2021; Switch: Fedus et al., 2022).

Tokens that are not `live`, such as padding, take no slot and count in no statistic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from weft.errors import ArgumentValueError
from weft.functional.arrays import counted
from weft.functional.norm import l2_normalize


class Routing(NamedTuple):
    """The experts that tokens chose.

    Attributes:
        experts: `Int[Array, "*groups tokens k"]`, the chosen experts, best first.
        gates: `Float[Array, "*groups tokens k"]`, their weights; 0 for dropped choices.
        positions: `Int[Array, "*groups tokens k"]`, each choice's slot with its expert.
        kept: `Bool[Array, "*groups tokens k"]`, whether there was a slot.
    """

    experts: Array
    gates: Array
    positions: Array
    kept: Array


def top_k(
    scores: Float[Array, "*tokens experts"], k: int
) -> tuple[Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """Returns the `k` largest scores and their indices, as `jax.lax.top_k`, for a small `k`.

    On the devices of a mesh, each has its own tokens: `jax.lax.top_k` would gather all of them.

    >>> top_k(jnp.array([1.0, 3.0, 2.0]), 2)[1].tolist()
    [1, 2]
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        values, experts = jax.lax.top_k(scores, k)
        return values, experts
    num_experts = scores.shape[-1]
    # Above the mark of a taken expert, so that no expert is taken twice where scores are -inf.
    lowest = jnp.finfo(scores.dtype).min
    remaining = jnp.maximum(jax.lax.stop_gradient(scores), lowest)
    indices: list[Array] = []
    for _ in range(k):
        largest = jnp.argmax(remaining, axis=-1)
        indices.append(largest)
        is_taken = jax.nn.one_hot(largest, num_experts, dtype=jnp.bool_)
        remaining = jnp.where(is_taken, -jnp.inf, remaining)
    experts = jnp.stack(indices, axis=-1)
    return jnp.take_along_axis(scores, experts, axis=-1), experts


def expert_capacity(
    group_size: int,
    num_experts: int,
    *,
    factor: float | None,
    minimum: int | None = None,
) -> int:
    """Returns an expert's number of slots for the tokens of a group.

    Args:
        factor: multiple of an equal share, `group_size / num_experts`, rounded up. None, without a
            minimum, makes slots for the whole group.

    Raises ArgumentValueError if the result is less than 1.

    >>> expert_capacity(10, 4, factor=1.0), expert_capacity(10, 4, factor=None)
    (3, 10)
    """
    if (factor is not None and factor <= 0) or (
        minimum is not None and minimum < 1
    ):
        raise ArgumentValueError(
            f"an expert's capacity is given by a factor of {factor} and a minimum of {minimum}; "
            "without room for a token nothing is routed: expected a factor above 0 and a minimum "
            "of at least 1."
        )
    if factor is None:
        return group_size if minimum is None else min(minimum, group_size)
    # More slots than the group has tokens would stay empty.
    return min(
        group_size,
        max(math.ceil(group_size * factor / num_experts), minimum or 1),
    )


def route(
    experts: Int[Array, "*groups tokens k"],
    gates: Float[Array, "*groups tokens k"],
    *,
    num_experts: int,
    capacity: int,
    live: Bool[Array, "*groups tokens"] | None = None,
) -> Routing:
    """Assigns slots to choices.

    Args:
        experts: the choices of each token, all different, best first.
        capacity: number of slots of each expert, per group.
        live: tokens that take part; all by default.

    >>> route(jnp.array([[0], [0], [1]]), jnp.ones((3, 1)), num_experts=2, capacity=1).kept[:, 0]
    Array([ True, False,  True], dtype=bool)
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
    if live is not None:
        chosen = chosen * live[..., None, None]
    # A choice's slot is the number of those before it in the queue for its expert: all tokens'
    # better choices, and earlier tokens' equally good ones.
    by_rank = jnp.moveaxis(chosen, -2, -3)  # (*groups, k, tokens, experts)
    queue = by_rank.reshape(*by_rank.shape[:-3], -1, num_experts)
    queue_lengths = jnp.cumsum(queue, axis=-2) - queue
    queue_lengths = jnp.moveaxis(queue_lengths.reshape(by_rank.shape), -3, -2)
    positions = jnp.sum(queue_lengths * chosen, axis=-1)
    has_slot = (positions < capacity) & jnp.any(chosen, axis=-1)
    gates = jnp.where(has_slot, gates, 0.0)
    return Routing(experts, gates, positions, has_slot)


def combine_tensor(
    routing: Routing, *, num_experts: int, capacity: int
) -> Float[Array, "*groups tokens experts capacity"]:
    """Returns the weight of each expert's slots in each token's output."""
    dtype = routing.gates.dtype
    expert_onehots = jax.nn.one_hot(routing.experts, num_experts, dtype=dtype)
    # A dropped choice has a position beyond all slots, or a gate of 0.
    slot_onehots = jax.nn.one_hot(routing.positions, capacity, dtype=dtype)
    weights = expert_onehots * routing.gates[..., None]
    return jnp.einsum("...ske,...skc->...sec", weights, slot_onehots)


def dispatch_tensor(
    routing: Routing, *, num_experts: int, capacity: int
) -> Bool[Array, "*groups tokens experts capacity"]:
    """Returns whether a token occupies a slot of an expert, regardless of its weight."""
    unweighted = routing._replace(gates=routing.kept.astype(jnp.float32))
    return (
        combine_tensor(unweighted, num_experts=num_experts, capacity=capacity)
        > 0
    )


def load_balance_loss(
    probs: Float[Array, "*groups tokens experts"],
    experts: Int[Array, "*groups tokens k"],
    live: Bool[Array, "*groups tokens"] | None = None,
) -> Float[Array, " *groups"]:
    """Returns `num_experts * sum_e f_e * P_e` of each group; 1 if all experts are equally likely.

    `f_e` is the share of choices of expert `e`, `P_e` the router's mean probability of it (Fedus et
    al., 2022, equations 4 to 6). Only `live` tokens count.

    >>> load_balance_loss(jnp.full((4, 2), 0.5), jnp.array([[0], [1], [0], [1]])).item()
    1.0
    """
    num_experts = probs.shape[-1]
    num_choices = experts.shape[-1]
    onehots = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    choices = jnp.sum(onehots, axis=-2)  # (*groups, tokens, experts)
    choice_shares = _token_mean(choices, live, axis=-2) / num_choices
    mean_probs = _token_mean(probs, live, axis=-2)
    return num_experts * jnp.sum(choice_shares * mean_probs, axis=-1)


def router_z_loss(
    logits: Float[Array, "*groups tokens experts"],
    live: Bool[Array, "*groups tokens"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of `logsumexp(logits) ** 2`, which keeps logits small (Zoph et al., 2022).

    Only `live` tokens count.

    >>> round(router_z_loss(jnp.zeros((3, 2))).item(), 4)
    0.4805
    """
    if live is not None:
        logits = counted(logits, live[..., None])
    log_normalizers = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return _token_mean(jnp.square(log_normalizers), live, axis=None)


def over_capacity(
    routing: Routing, live: Bool[Array, "*groups tokens"] | None = None
) -> Float[Array, " k"]:
    """Returns the share of first, second, ... choices of `live` tokens that were dropped."""
    is_dropped = 1.0 - routing.kept
    shares = []
    for rank in range(is_dropped.shape[-1]):
        shares.append(_token_mean(is_dropped[..., rank], live, axis=None))
    return jnp.stack(shares)


def choices_per_expert(
    experts: Int[Array, "*groups tokens k"],
    *,
    num_experts: int,
    where: Bool[Array, "*groups tokens k"] | None = None,
) -> Float[Array, " experts"]:
    """Returns how many choices fell on each expert, counting those `where` is True.

    >>> choices_per_expert(jnp.array([[0, 2], [2, 1]]), num_experts=4).tolist()
    [1.0, 1.0, 2.0, 0.0]
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    if where is not None:
        chosen = jnp.where(where[..., None], chosen, 0.0)
    return jnp.sum(chosen, axis=tuple(range(experts.ndim)))


def dropped_tokens(
    routing: Routing, live: Bool[Array, "*groups tokens"] | None = None
) -> Float[Array, ""]:
    """Returns the share of `live` tokens that have no expert, as all their choices were dropped."""
    is_dropped = 1.0 - jnp.any(routing.kept, axis=-1)
    return _token_mean(is_dropped, live, axis=None)


def limit_to_groups(
    scores: Float[Array, "*tokens experts"], *, num_groups: int, num_kept: int
) -> Float[Array, "*tokens experts"]:
    """Sets the scores to -inf except for the `num_kept` best groups of neighboring experts.

    A group's score is the sum of its two best experts' scores (DeepSeek-AI, 2024, section 2.1.2).
    `num_groups` must divide the number of experts.

    >>> limit_to_groups(jnp.array([3.0, 0.0, 2.0, 2.0]), num_groups=2, num_kept=1).tolist()
    [-inf, -inf, 2.0, 2.0]
    """
    grouped = scores.reshape(
        *scores.shape[:-1], num_groups, -1
    )  # (*tokens, groups, group_size)
    best_two, _ = top_k(grouped, min(2, grouped.shape[-1]))
    _, chosen_groups = top_k(best_two.sum(axis=-1), num_kept)
    onehots = jax.nn.one_hot(chosen_groups, num_groups, dtype=jnp.bool_)
    is_chosen = jnp.any(onehots, axis=-2)  # (*tokens, groups)
    limited = jnp.where(is_chosen[..., None], grouped, -jnp.inf)
    return limited.reshape(scores.shape)


def _token_mean(x: Array, live: Array | None, *, axis: int | None) -> Array:
    """Returns the mean over live tokens: over all axes, or over `axis` of `(tokens, features)`."""
    if live is None:
        return jnp.mean(x, axis=axis)
    if axis is not None:
        live = live[..., None]
    total = jnp.sum(jnp.where(live, x, 0.0), axis=axis)
    return total / jnp.maximum(1, jnp.sum(live, axis=axis))


def decorrelation_loss(weight: Float[Array, "dim experts"]) -> Float[Array, ""]:
    """Returns the mean squared cosine between a router's weights of two experts.

    >>> decorrelation_loss(jnp.array([[1.0, 2.0], [0.0, 0.0]])).item()
    1.0
    """
    num_experts = weight.shape[-1]
    columns = l2_normalize(weight.astype(jnp.float32), axis=0, eps=1e-12)
    squares = jnp.square(columns.T @ columns)  # (experts, experts)
    is_same = jnp.eye(num_experts, dtype=bool)
    num_pairs = max(1, num_experts * (num_experts - 1))
    return jnp.sum(jnp.where(is_same, 0.0, squares)) / num_pairs


class ExpertRows(NamedTuple):
    """The choices of tokens, sorted by expert.

    Attributes:
        choices: `Int[Array, "rows"]`, the choice, `token * k + rank`, of each row.
        sizes: `Int[Array, "experts"]`, each expert's number of rows, in order.
        is_real: `Bool[Array, "rows"]`, whether a row belongs to an expert.
    """

    choices: Array
    sizes: Array
    is_real: Array


def sort_by_expert(
    experts: Int[Array, "tokens k"],
    *,
    first: Int[Array, ""] | int,
    num_experts: int,
    num_rows: int,
) -> ExpertRows:
    """Sorts the choices of `num_experts` experts from `first` on into `num_rows` rows.

    Other experts' choices and overflow are dropped.

    >>> rows = sort_by_expert(jnp.array([[2], [0], [2], [1]]), first=1, num_experts=2, num_rows=3)
    >>> rows.choices.tolist(), rows.sizes.tolist()
    ([3, 0, 2], [1, 2])
    """
    local_experts = experts.reshape(-1) - first
    is_local = (local_experts >= 0) & (local_experts < num_experts)
    sort_key = jnp.where(
        is_local, local_experts, num_experts
    )  # those of other experts go last
    choices = jnp.argsort(sort_key, stable=True)[:num_rows]
    counts = jnp.bincount(sort_key, length=num_experts)
    ends = jnp.minimum(jnp.cumsum(counts), num_rows)
    is_real = jnp.arange(choices.shape[0]) < ends[-1]
    return ExpertRows(choices, jnp.diff(ends, prepend=0), is_real)
