"""The layer that drops no token, against a loop over tokens, on a mesh and through the kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import config_for_function
from weft.errors import LayerConfigError
from weft.hierarchy.attention import TransformerLayer
from weft.hierarchy.mixture_of_experts import (
    ApproximateTokenDropFreeMoE,
    GMMBackend,
    TransformerFeedForwardDropFreeMoE,
    set_interpret_in_moe_config_recursively,
    sigmoid,
)
from weft.hierarchy.mixture_of_experts.gating import Top2Gating, TopKBiasGating
from weft.hierarchy.module import functional as F

DIM, HIDDEN, EXPERTS = 8, 6, 4


def layer(cls=TransformerFeedForwardDropFreeMoE, **fields):
    fields = {"hidden_dim": HIDDEN, "structure": "nonorm", **fields}
    cfg = cls.default_config().set(
        name="moe", input_dim=DIM, num_experts=EXPERTS, activation=("nn.tanh", "linear"), **fields
    )
    return cfg.instantiate(parent=None)


RNG = np.random.default_rng(0)
STATE = {
    name: RNG.normal(size=shape).astype("f")
    for name, shape in {
        "gate_weight": (DIM, EXPERTS),
        "wi_0_weight": (EXPERTS, DIM, HIDDEN),
        "wi_1_weight": (EXPERTS, DIM, HIDDEN),
        "wo_weight": (EXPERTS, HIDDEN, DIM),
    }.items()
}
X = RNG.normal(size=(4, 3, DIM)).astype("f")


def reference(x=X, state=STATE, paddings=None):
    tokens = x.reshape(-1, DIM)
    probs = np.exp(tokens @ state["gate_weight"])
    probs /= probs.sum(-1, keepdims=True)
    out = np.zeros_like(tokens)
    for t, token in enumerate(tokens):
        if paddings is not None and paddings.ravel()[t]:
            continue
        best = np.argsort(-probs[t])[:2]
        for e in best:
            hidden = np.tanh(token @ state["wi_0_weight"][e]) * (token @ state["wi_1_weight"][e])
            out[t] += probs[t, e] / probs[t, best].sum() * (hidden @ state["wo_weight"][e])
    return out.reshape(x.shape)


def run(moe, state=STATE, x=X, **kwargs):
    @jax.jit
    def compiled(state, args):
        return F(moe, None, state, args, is_training=True, drop_output_collections=())

    return compiled(state, {"inputs": x, **kwargs})


def gradients(moe):
    """Returns a function to the gradients, and the output and outputs they are computed with."""

    def loss(state, x):
        y, outputs = F(moe, None, state, (x,), is_training=True)
        return jnp.sum(jnp.square(y - 1)), (y, outputs)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.fixture(scope="module")
def expected_gradients():
    return gradients(layer())(STATE, X)[0]


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), a, b)


def test_equals_a_loop_over_tokens():
    y, outputs = run(layer(seq_load_balance_loss_weight=0.1))
    np.testing.assert_allclose(y, reference(), rtol=1e-4, atol=1e-5)
    of_gating = outputs.summaries["gating"]
    expected = 0.01 * of_gating["load_balance_loss"] + of_gating["seq_load_balance_loss"]
    np.testing.assert_allclose(outputs.module_outputs["aux_loss"], expected, rtol=1e-5)
    paddings = RNG.random((4, 3)) < 0.5
    y, _ = run(layer(), paddings=paddings)
    np.testing.assert_allclose(y, reference(paddings=paddings), rtol=1e-4, atol=1e-5)


def test_gradients_match_finite_differences(expected_gradients):
    grads, of_x = expected_gradients

    def loss(state, x):
        return np.square(reference(x, state) - 1).sum()

    rng = np.random.default_rng(5)
    state64 = {name: value.astype("d") for name, value in STATE.items()}
    for name in ("wi_0_weight", "wo_weight", "gate_weight"):
        step = 1e-4 * rng.normal(size=STATE[name].shape)
        ends = [loss({**state64, name: state64[name] + s * step}, X.astype("d")) for s in (1, -1)]
        np.testing.assert_allclose(np.sum(grads[name] * step), (ends[0] - ends[1]) / 2, rtol=1e-3)
    step = 1e-4 * rng.normal(size=X.shape)
    ends = [loss(state64, X.astype("d") + s * step) for s in (1, -1)]
    np.testing.assert_allclose(np.sum(of_x * step), (ends[0] - ends[1]) / 2, rtol=1e-3)


@pytest.mark.long
def test_kernel_computes_the_same(expected_gradients):
    moe = layer(gmm_backend=GMMBackend.MEGABLOX, tiling=(16, 128, 128), interpret=True)
    grads, (y, _) = gradients(moe)(STATE, X)
    np.testing.assert_allclose(y, reference(), rtol=1e-4, atol=1e-5)
    close(grads, expected_gradients)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize(
    "cls, fields, drops",
    [
        (TransformerFeedForwardDropFreeMoE, {}, False),
        (ApproximateTokenDropFreeMoE, {"expert_parallel_capacity": 2.0}, False),
        (ApproximateTokenDropFreeMoE, {"expert_parallel_capacity": 1.0}, True),
    ],
    ids=["whole", "over experts", "little room"],
)
def test_on_a_mesh(cls, fields, drops, expected_gradients):
    moe = layer(cls, **fields)
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "model"), axis_types=auto)
    specs = moe.create_parameter_specs_recursively()
    state = {n: jax.device_put(v, specs[n].sharding(mesh)) for n, v in STATE.items()}
    local = (EXPERTS // (2 if fields else 1), DIM, HIDDEN // 2)
    assert state["wi_0_weight"].addressable_shards[0].data.shape == local
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        grads, (y, outputs) = gradients(moe)(state, x)
    if not fields:
        with pytest.deprecated_call(), mesh:
            np.testing.assert_allclose(run(moe, state, x)[0], y, rtol=1e-5)
    if not drops:
        np.testing.assert_allclose(y, reference(), rtol=1e-4, atol=1e-5)
        close(grads, expected_gradients)
    if fields:
        share = float(outputs.summaries["over_capacity"])
        assert (0 < share < 0.5) if drops else share == 0
        # A token without room with one expert has what its other expert made of it.
        off = np.abs(np.asarray(y) - reference()).max(axis=-1) > 1e-4
        assert np.any(off) == drops


def test_nothing_is_dropped_on_one_device():
    y, outputs = run(layer(ApproximateTokenDropFreeMoE, expert_parallel_capacity=1.0))
    np.testing.assert_allclose(y, reference(), rtol=1e-4, atol=1e-5)
    assert outputs.summaries["over_capacity"] == 0


def test_bias_is_updated_through_the_layer():
    gating = TopKBiasGating.default_config().set(score_fn=config_for_function(sigmoid))
    state = {**STATE, "gating": {"gating_bias": jnp.zeros(EXPERTS)}}
    _, outputs = run(layer(gating=gating), state)
    assert outputs.state_updates["gating"]["gating_bias"].shape == (EXPERTS,)


def test_dropout_on_output_only():
    assert [n for n in layer(structure="prenorm").children if "dropout" in n] == ["dropout"]


def test_interpretation_is_set_everywhere():
    cfg = TransformerLayer.default_config().set(
        feed_forward=TransformerFeedForwardDropFreeMoE.default_config()
    )
    set_interpret_in_moe_config_recursively(cfg)
    assert cfg.feed_forward.interpret
    assert cfg.feed_forward.preferred_element_type == jnp.bfloat16


@pytest.mark.parametrize(
    "cls, fields, said",
    [
        (
            TransformerFeedForwardDropFreeMoE,
            {"gating": Top2Gating.default_config()},
            "moe: gating is a Top2Gating, which drops tokens",
        ),
        (
            TransformerFeedForwardDropFreeMoE,
            {"gmm_backend": GMMBackend.MEGABLOX},
            "moe: gmm_backend=GMMBackend.MEGABLOX needs a tiling",
        ),
        (
            ApproximateTokenDropFreeMoE,
            {"expert_parallel_capacity": 0.5},
            "moe: expert_parallel_capacity=0.5 leaves each device less than an equal share",
        ),
    ],
    ids=["gating", "tiling", "capacity"],
)
def test_invalid_config_raises(cls, fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        layer(cls, **fields)
