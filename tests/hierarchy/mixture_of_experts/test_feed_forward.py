"""The layer of experts, against a loop over tokens in numpy, and on a mesh."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.errors import ArgumentShapeError, ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.feed_forward import scaled_hidden_dim
from weft.hierarchy.mixture_of_experts.feed_forward import (
    TransformerFeedForwardMoE,
    get_outer_batch_from_mesh,
)
from weft.hierarchy.mixture_of_experts.gating import Top2Gating
from weft.hierarchy.module import functional as F

DIM, HIDDEN, EXPERTS = 8, 6, 4


def config(**fields):
    fields = {"hidden_dim": HIDDEN, "num_groups": 2, "structure": "nonorm", **fields}
    return TransformerFeedForwardMoE.default_config().set(
        name="moe", input_dim=DIM, num_experts=EXPERTS, **fields
    )


def layer(**fields):
    return config(**fields).instantiate(parent=None)


def state_of(moe):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape), "f"),
        moe.create_parameter_specs_recursively(),
    )


def inputs(batch=4, time=3):
    return np.random.default_rng(1).normal(size=(batch, time, DIM)).astype("f")


def reference(state, x, *, groups, capacity, k=2, paddings=None, activation=None):
    """Computes token by token: choose, take a slot, apply the expert, add up."""
    state = {name: np.asarray(value) for name, value in state.items() if len(value)}
    tokens = x.reshape(groups, -1, DIM)
    live = np.ones(tokens.shape[:2], bool)
    if paddings is not None:
        live = ~paddings.reshape(live.shape)
    out = np.zeros_like(tokens)
    for g in range(groups):
        logits = tokens[g] @ state["gate_weight"]
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        order = np.argsort(-probs, axis=-1)[:, :k]
        used = [0] * EXPERTS
        for rank in range(k):
            for t in range(len(logits)):
                e = order[t, rank]
                if not live[g, t] or used[e] >= capacity:
                    continue
                used[e] += 1
                if activation is None:
                    hidden = np.maximum(tokens[g, t] @ state["wi_weight"][e], 0)
                else:
                    hidden = activation(tokens[g, t] @ state["wi_0_weight"][e])
                    hidden = hidden * (tokens[g, t] @ state["wi_1_weight"][e])
                weight = probs[t, e] / probs[t, order[t]].sum()
                out[g, t] += weight * (hidden @ state["wo_weight"][e])
    return out.reshape(x.shape)


def run(moe, state, x, is_training=True, key=None, **kwargs):
    @jax.jit
    def compiled(key, state, args):
        return F(moe, key, state, args, is_training=is_training, drop_output_collections=())

    return compiled(key, state, {"inputs": x, **kwargs})


def gating(cls=Top2Gating, **fields):
    return cls.default_config().set(**fields)


@pytest.mark.parametrize("factor, capacity", [(2.0, 3), (0.7, 2), (0.1, 1)])
def test_equals_a_loop_over_tokens(factor, capacity):
    moe, x = layer(gating=gating(train_capacity_factor=factor)), inputs()
    state = state_of(moe)
    y, outputs = run(moe, state, x)
    expected = reference(state, x, groups=2, capacity=capacity)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    summaries = outputs.summaries["gating"]
    aux_loss = outputs.module_outputs["aux_loss"]
    np.testing.assert_allclose(aux_loss, 0.01 * summaries["load_balance_loss"], rtol=1e-6)


def test_gated_experts_and_outer_batches():
    moe = layer(activation=("nn.tanh", "linear"), outer_batch=2, num_groups=3)
    state, x = state_of(moe), inputs()
    assert sorted(n for n in state if n.startswith("w")) == [
        "wi_0_weight",
        "wi_1_weight",
        "wo_weight",
    ]
    expected = reference(state, x, groups=6, capacity=1, activation=np.tanh)
    np.testing.assert_allclose(run(moe, state, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_losses_are_weighted_and_summed():
    moe = layer(load_balance_loss_weight=0.5, router_z_loss_weight=0.1, corr_loss_weight=2.0)
    state, x = state_of(moe), inputs()
    _, outputs = run(moe, state, x)
    of_gating = outputs.summaries["gating"]
    columns = state["gate_weight"] / np.linalg.norm(state["gate_weight"], axis=0, keepdims=True)
    cosines = columns.T @ columns
    corr = np.mean([cosines[i, j] ** 2 for i in range(EXPERTS) for j in range(EXPERTS) if i != j])
    np.testing.assert_allclose(outputs.summaries["corr_loss"], corr, rtol=1e-4)
    expected = 0.5 * of_gating["load_balance_loss"] + 0.1 * of_gating["router_z_loss"] + 2 * corr
    np.testing.assert_allclose(outputs.module_outputs["aux_loss"], expected, rtol=1e-5)


def test_residual_branch_and_dropout():
    cfg = config(structure="prenorm", hidden_dim=scaled_hidden_dim(2), residual_weight=0.5)
    cfg.dropout.rate = 0.5
    moe, x = cfg.instantiate(parent=None), inputs()
    specs = moe.create_parameter_specs_recursively()
    assert specs["wi_weight"].shape == (EXPERTS, DIM, 2 * DIM)
    state = state_of(moe)
    y, _ = run(moe, state, x, is_training=False)
    normed, _ = F(moe.norm, None, state["norm"], (x,), is_training=False)
    bare = layer(hidden_dim=2 * DIM)
    inner = {k: v for k, v in state.items() if k != "norm"}
    branch, _ = run(bare, inner, normed, is_training=False)
    np.testing.assert_allclose(y, x + 0.5 * branch, rtol=1e-4, atol=1e-5)
    assert not np.allclose(run(moe, state, x, key=jax.random.PRNGKey(0))[0], y)


def test_evaluation_uses_the_largest_number_of_groups():
    moe = layer(num_groups=4, outer_batch=2)
    state, x = state_of(moe), inputs(batch=1, time=1)
    y, _ = run(moe, state, x, is_training=False)
    np.testing.assert_allclose(y, reference(state, x, groups=1, capacity=1), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ArgumentShapeError,
        match=r"moe: 6 tokens do not divide into outer_batch=2 times num_groups=4 groups; set "
        r"num_groups to a divisor of 3\.",
    ):
        run(moe, state, inputs(batch=2))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("outer_batch", [1, 2])
def test_tokens_are_sent_to_expert_devices(outer_batch):
    moe = layer(outer_batch=outer_batch, num_groups=4 // outer_batch)
    state, x = state_of(moe), inputs(batch=4, time=4)
    expected = np.asarray(run(moe, state, x)[0])
    mesh = jax.make_mesh(
        (2, 2, 2),
        ("data", "expert", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    specs = moe.create_parameter_specs_recursively()
    laid_out = jax.tree.map(lambda s, v: jax.device_put(v, s.sharding(mesh)), specs, state)
    # Half of the experts, and half of their hidden dimensions, lie on each device.
    assert laid_out["wi_weight"].addressable_shards[0].data.shape == (2, DIM, HIDDEN // 2)
    batch = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "expert"))))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda s, x: run(moe, s, x)[0]).lower(laid_out, batch).compile()
        got = compiled(laid_out, batch)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    # No device ever holds all experts.
    text = compiled.as_text()
    assert f"f32[{EXPERTS},{DIM}," not in text
    assert "all-to-all" in text


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_groups": 0}, "moe: num_groups=0; expected at least 1"),
        ({"outer_batch": 0}, "moe: outer_batch=0; expected at least 1"),
        (
            {"dim_to_mesh_axis_map": {"emf": None}},
            "moe: dim_to_mesh_axis_map has ['emf']; expected keys among me, emh",
        ),
    ],
    ids=["groups", "outer", "map"],
)
def test_invalid_layers_raise(fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        layer(**fields)


def test_outer_batch_of_a_mesh():
    names = {"mesh_axis_names": ("data", "expert"), "outer_batch_axis_names": ("data",)}
    assert get_outer_batch_from_mesh(**names, mesh_shape=None) is None
    hybrid = types.SimpleNamespace(ici_mesh_shape=(2, 4), dcn_mesh_shape=(3, 1))
    assert get_outer_batch_from_mesh(**names, mesh_shape=hybrid) == 6
    with pytest.raises(ArgumentValueError, match=r"the mesh axis 'data', whose size in .*-1"):
        get_outer_batch_from_mesh(**names, mesh_shape=(-1, 2))
    with pytest.raises(ArgumentValueError, match="the mesh axis 'seq'"):
        get_outer_batch_from_mesh(
            **{**names, "outer_batch_axis_names": ("seq",)}, mesh_shape=(1, 2)
        )
