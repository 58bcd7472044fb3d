"""Routing, against a loop that gives out the rooms one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ArgumentValueError
from weft.functional import routing as R


def reference(experts, gates, num_experts, capacity, live):
    """Returns (token, expert, slot, gate) of one group, and the number of dropped choices."""
    tokens, k = experts.shape
    used, placed, dropped = [0] * num_experts, [], [0] * k
    for rank in range(k):
        for token in range(tokens):
            if not live[token]:
                continue
            expert = experts[token, rank]
            if used[expert] < capacity:
                placed.append((token, expert, used[expert], gates[token, rank]))
                used[expert] += 1
            else:
                dropped[rank] += 1
    return placed, dropped


@functools.partial(jax.jit, static_argnames=("num_experts", "capacity"))
def routed(experts, gates, live, **sizes):
    routing = R.route(experts, gates, live=live, **sizes)
    tensors = R.combine_tensor(routing, **sizes), R.dispatch_tensor(routing, **sizes)
    return *tensors, R.over_capacity(routing, live)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.booleans())
def test_slots_match_loop_reference(seed, k, capacity, padded):
    rng = np.random.default_rng(seed)
    groups, tokens, num_experts = 2, 6, 4
    experts = np.argsort(rng.random((groups, tokens, num_experts)), axis=-1)[..., :k]
    gates = rng.random((groups, tokens, k)).astype("f") + 0.1
    live = rng.random((groups, tokens)) < (0.7 if padded else 2)
    sizes = {"num_experts": num_experts, "capacity": capacity}
    combined, dispatched, dropped_share = routed(experts, gates, live, **sizes)
    combine = np.zeros((groups, tokens, num_experts, capacity), "f")
    missed = np.zeros(k)
    for group in range(groups):
        placed, dropped = reference(
            experts[group], gates[group], num_experts, capacity, live[group]
        )
        missed += dropped
        for token, expert, room, gate in placed:
            combine[group, token, expert, room] = gate
    np.testing.assert_allclose(combined, combine, rtol=1e-6)
    np.testing.assert_array_equal(dispatched, combine > 0)
    expected = missed / max(1, live.sum())
    np.testing.assert_allclose(dropped_share, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("padded", [False, True])
def test_losses_match_the_papers(padded):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 5, 3)).astype("f")
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = np.argsort(-logits, axis=-1)[..., :2]
    live = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], bool) if padded else np.ones((2, 5), bool)
    expected, squares = [], []
    for group in range(2):
        tokens = [t for t in range(5) if live[group, t]]
        f, p = np.zeros(3), np.zeros(3)
        for t in tokens:
            p += probs[group, t] / len(tokens)
            f[experts[group, t]] += 1 / (2 * len(tokens))
            squares.append(np.log(np.exp(logits[group, t]).sum()) ** 2)
        expected.append(3 * (f * p).sum())
    mask = jnp.asarray(live) if padded else None
    got = R.load_balance_loss(jnp.asarray(probs), jnp.asarray(experts), mask)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    z_loss = R.router_z_loss(jnp.asarray(logits), mask)
    np.testing.assert_allclose(z_loss, np.mean(squares), rtol=1e-5)


def test_no_live_tokens_give_zero_statistics():
    live = jnp.zeros((1, 4), bool)
    probs, experts = jnp.full((1, 4, 2), 0.5), jnp.zeros((1, 4, 1), jnp.int32)
    assert R.load_balance_loss(probs, experts, live).tolist() == [0]
    assert R.router_z_loss(probs, live) == 0


@pytest.mark.parametrize(
    "factor, minimum, expected",
    [(1.0, None, 3), (2.0, None, 5), (0.1, None, 1), (0.1, 2, 2), (None, None, 10), (None, 4, 4),
     (99.0, None, 10)],
)  # fmt: skip
def test_capacity(factor, minimum, expected):
    assert R.expert_capacity(10, 4, factor=factor, minimum=minimum) == expected


@pytest.mark.parametrize("factor, minimum", [(0.0, None), (-1.0, 2), (None, 0)])
def test_zero_capacity_is_rejected(factor, minimum):
    with pytest.raises(
        ArgumentValueError, match=f"a factor of {factor} and a minimum of {minimum}"
    ):
        R.expert_capacity(10, 4, factor=factor, minimum=minimum)


def test_groups_of_one_expert():
    scores = jnp.array([[1.0, 3.0, 2.0]])
    assert R.limit_to_groups(scores, num_groups=3, num_kept=2).tolist() == [[-jnp.inf, 3.0, 2.0]]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_largest_scores_of_tokens_on_many_devices():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    # With ties.
    scores = np.random.default_rng(0).integers(0, 5, (64, 8)).astype("f")
    expected = jax.lax.top_k(scores, 3)
    with jax.set_mesh(mesh):
        scores = jax.device_put(scores, jax.NamedSharding(mesh, jax.P("data")))
        program = jax.jit(R.top_k, static_argnums=1).lower(scores, 3).compile()
    jax.tree.map(np.testing.assert_array_equal, program(scores), tuple(expected))
    assert "all-gather" not in program.as_text()


def test_top_k_on_a_mesh_takes_no_expert_twice():
    scores = jnp.array([[-jnp.inf, 1.0, -jnp.inf, 0.5], [-jnp.inf] * 4])
    values, experts = jax.lax.top_k(scores, 3)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        values_on_mesh, experts_on_mesh = R.top_k(scores, 3)
    np.testing.assert_array_equal(values_on_mesh, values)
    np.testing.assert_array_equal(experts_on_mesh, experts)
