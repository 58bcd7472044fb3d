"""Options of layers that families of published models have, against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy import (
    DynamicNTKSinusoidalPositionalEmbedding,
    LongRoPESinusoidalPositionalEmbedding,
    MultiheadRMSNorm,
    RMSNorm,
    TopKDropFreeGating,
    TransformerAttentionLayer,
    TransformerFeedForwardDropFreeMoE,
    TransformerFeedForwardLayer,
)
from weft.hierarchy.module import functional

X = np.random.RandomState(0).randn(2, 3, 4).astype(np.float32)


def run(cfg, *args, state=None, **kwargs):
    layer = cfg.set(name="layer").instantiate(parent=None)
    if state is None:
        state = layer.initialize_parameters_recursively(jax.random.key(0))
    inputs = kwargs or args
    outputs, _ = functional(layer, None, state, inputs, is_training=False)
    return outputs, state


def rms(x, axis=-1):
    return np.sqrt(np.mean(np.square(x), axis=axis, keepdims=True) + 1e-8)


def test_scale_of_a_norm_with_an_offset():
    cfg = RMSNorm.default_config().set(input_dim=4, scale_offset=1.0)
    y, state = run(cfg, X)
    np.testing.assert_array_equal(state["scale"], np.zeros(4))
    np.testing.assert_allclose(y, X / rms(X), rtol=1e-5)
    scale = np.array([0.5, -0.5, 0.001, 2.0], np.float32)
    y, _ = run(cfg, X.astype(jnp.bfloat16), state={"scale": scale})
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, X / rms(X) * (1 + scale), atol=0.05)


def test_norm_of_all_heads_together():
    x = np.random.RandomState(1).randn(2, 3, 2, 4).astype(np.float32)
    scale = np.random.RandomState(2).randn(2, 4).astype(np.float32)
    cfg = MultiheadRMSNorm.default_config().set(input_dim=4, num_heads=2)
    y, _ = run(cfg, x, state={"scale": scale})
    np.testing.assert_allclose(y, x / rms(x, axis=(-1, -2)) * scale, rtol=1e-5)


def test_weight_of_the_output_of_attention():
    cfg = TransformerAttentionLayer.default_config().set(target_dim=4, source_dim=4)
    cfg.attention.num_heads = 2
    plain, state = run(cfg.clone(), target=X)
    weighted, _ = run(cfg.set(residual_weight=0.3), state=state, target=X)
    np.testing.assert_allclose(weighted.data, X + 0.3 * (plain.data - X), atol=1e-6)


@pytest.mark.parametrize("length", [4, 12])
def test_dynamic_rotary_positions(length):
    cfg = DynamicNTKSinusoidalPositionalEmbedding.default_config().set(
        dim=8, original_max_seq_length=4, scaling_factor=2.0
    )
    y, _ = run(cfg, positions=jnp.arange(length)[None])
    theta = 1e4 * (2.0 * length / 4 - 1) ** (8 / 6)
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, 8, 2) / 8)
    wanted = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    np.testing.assert_allclose(y[0], wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "factors"), [(4, [1.0, 2.0]), (5, [3.0, 4.0])])
def test_positions_with_a_factor_per_frequency(length, factors):
    cfg = LongRoPESinusoidalPositionalEmbedding.default_config().set(
        dim=4, original_max_seq_length=4, short_factors=[1.0, 2.0], long_factors=[3.0, 4.0]
    )
    y, _ = run(cfg.set(attn_factor=1.5), positions=jnp.arange(length)[None])
    angles = np.arange(length)[:, None] * np.array([1.0, 0.01]) / np.array(factors)
    wanted = 1.5 * np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    np.testing.assert_allclose(y[0], wanted, atol=1e-6)
    with pytest.raises(
        LayerConfigError, match=r"long_factors has 1 numbers; expected one for each"
    ):
        cfg.set(long_factors=[1.0], name="rope").instantiate(parent=None)


def experts():
    cfg = TransformerFeedForwardDropFreeMoE.default_config().set(
        input_dim=4, hidden_dim=6, num_experts=3, activation=("nn.silu", "linear")
    )
    cfg.set(structure="nonorm", norm={})
    cfg.gating = TopKDropFreeGating.default_config().set(normalize_gates=False)
    return cfg


def gated(x, up, gate, down):
    return (jax.nn.silu(x @ up) * (x @ gate)) @ down


def test_gates_that_do_not_sum_to_1_and_an_expert_of_all_tokens():
    shared = TransformerFeedForwardLayer.default_config().set(
        structure="nonorm", hidden_dim=5, activation=("nn.silu", "linear")
    )
    shared.linear1.bias = shared.linear2.bias = False
    cfg = experts().set(shared_expert=shared, shared_expert_gate=True)
    y, state = run(cfg, X)
    probs = jax.nn.softmax(X @ state["gate_weight"], axis=-1)
    wanted = np.zeros_like(X)
    smallest = np.argmin(probs, axis=-1)
    for expert in range(3):
        weights = [state[name][expert] for name in ("wi_0_weight", "wi_1_weight", "wo_weight")]
        is_chosen = (smallest != expert)[..., None]  # two of three
        wanted += np.where(is_chosen, probs[..., expert, None] * gated(X, *weights), 0)
    shared_weights = [
        state["shared_expert"][name]["weight"] for name in ("linear1_0", "linear1_1", "linear2")
    ]
    gate = jax.nn.sigmoid(X @ state["shared_expert_gate_weight"])
    np.testing.assert_allclose(y, wanted + gate * gated(X, *shared_weights), atol=1e-5)


def test_gate_without_a_shared_expert():
    cfg = experts().set(shared_expert_gate=True, name="experts")
    with pytest.raises(LayerConfigError, match="there is no shared_expert to weigh; set one"):
        cfg.instantiate(parent=None)
