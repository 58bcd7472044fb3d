"""The values and parameter trees of AXLearn's layers, and the example of its documentation."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import REQUIRED, config_for_function
from weft.hierarchy import attention as A
from weft.hierarchy.layers import RMSNorm
from weft.hierarchy.module import functional as F

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "attention_golden.json").read_text(encoding="utf-8")
)
DIM, HEADS, HIDDEN, BATCH, LENGTH = 8, 2, 16, 2, 4
CAUSAL = A.make_causal_biases(LENGTH)[None, None]


def mha(cls=A.MultiheadAttention, **fields):
    fields = {"num_heads": HEADS, **fields}
    return cls.default_config().set(query_dim=DIM, key_dim=DIM, value_dim=DIM, **fields)


def scaled(query=None, key=None):
    def of(cls, **fields):
        return cls.default_config().set(**fields)

    fields = {}
    if query:
        fields["query_scale"] = of(A.ScaleQuery, **query)
    if key:
        fields["key_scale"] = of(A.ScaleKey, **key)
    return mha(**fields)


def factor(fn, **kwargs):
    return {"scale_factor": config_for_function(fn).set(**kwargs)}


def rope(rotary_value):
    return A.RoFormerQKVLinear.default_config().set(rotary_value=rotary_value)


def grouped(cls, num_heads, num_kv_heads):
    linear = cls.default_config().set(num_kv_heads=num_kv_heads)
    return mha(A.GroupedQueryAttention, num_heads=num_heads, input_linear=linear)


def without_bias():
    cfg = mha()
    cfg.input_linear.layer.bias = False
    cfg.output_linear.bias = False
    return cfg


ATTENTION = {
    "mha_causal": mha(),
    "mha_nobias": without_bias(),
    "mha_fused": mha(input_linear=A.FusedQKVLinear.default_config()),
    "mha_per_dim_scale": scaled({"per_dim_scale": A.PerDimScale.default_config()}),
    "mha_scale_q_pow-0.25_k_pow-0.25": scaled(
        factor(A.pow_scale_fn, exp=-0.25), factor(A.pow_scale_fn, exp=-0.25)
    ),
    "mha_scale_q_const1": scaled(factor(A.constant_scale_fn, value=1.0)),
    "mha_qk_norm_rms": scaled(
        {"norm": RMSNorm.default_config()}, {"norm": RMSNorm.default_config()}
    ),
    "mha_atten_logit_cap5": mha(atten_logit_cap=5.0),
    "mha_rope_rotary_value_false": mha(input_linear=rope(False)),
    "mha_rope_rotary_value_true": mha(input_linear=rope(True)),
    "gqa_kv1": grouped(A.GroupedQKVLinear, 2, 1),
    "gqa4_kv2": grouped(A.GroupedQKVLinear, 4, 2),
    "gqa4_kv2_fused": grouped(A.FusedGroupedQKVLinear, 4, 2),
}


def transformer(structure="prenorm", activation="nn.relu", norm=None):
    cfg = A.TransformerLayer.default_config().set(input_dim=DIM)
    cfg.self_attention.attention.num_heads = HEADS
    cfg.feed_forward.set(hidden_dim=HIDDEN, activation=activation)
    for part in (cfg.self_attention, cfg.feed_forward):
        part.structure = structure
        part.norm = norm or part.norm
    return cfg


def stack(cls):
    layer = transformer().set(input_dim=REQUIRED)
    return cls.default_config().set(input_dim=DIM, num_layers=2, layer=layer)


def parallel():
    cfg = A.ParallelTransformerLayer.default_config().set(input_dim=DIM)
    cfg.self_attention.num_heads = HEADS
    cfg.feed_forward.hidden_dim = HIDDEN
    return cfg


TRANSFORMERS = {
    "transformer_prenorm": transformer(),
    "transformer_postnorm": transformer("postnorm"),
    "transformer_hybridnorm": transformer("hybridnorm"),
    "transformer_prenorm_silu_gated_rms": transformer(
        activation=("nn.silu", "linear"), norm=RMSNorm.default_config()
    ),
    "transformer_parallel": parallel(),
    "transformer_stacked": stack(A.StackedTransformerLayer),
    "transformer_repeated": stack(A.RepeatedTransformerLayer),
}


def ffn(**fields):
    fields = {"hidden_dim": HIDDEN, **fields}
    return A.TransformerFeedForwardLayer.default_config().set(input_dim=DIM, **fields)


ACTIVATIONS = [
    "nn.relu",
    "nn.gelu",
    "exact_gelu",
    "nn.silu",
    "nn.tanh",
    "squared_relu",
    "quick_gelu",
    ("nn.silu", "linear"),
    ("linear", "exact_gelu"),
]


def activation_name(name):
    return name if isinstance(name, str) else "_".join(name)


FEED_FORWARD = {
    **{f"ffn_{activation_name(name)}": ffn(activation=name) for name in ACTIVATIONS},
    "ffn_residual0.5": ffn(residual_weight=0.5),
    "ffn_scaled_hidden_dim": ffn(hidden_dim=A.scaled_hidden_dim(2.5)),
}


def shapes(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {"/".join(key.key for key in path): list(x.shape) for path, x in leaves}


def assert_equal(golden, outputs):
    if "shape" not in golden:
        for name, value in golden.items():
            assert_equal(value, getattr(outputs, name))
        return
    assert list(outputs.shape) == golden["shape"]
    np.testing.assert_allclose(np.ravel(outputs), golden["data"], rtol=1e-5, atol=2e-6)


def check(name, cfg, filled, inputs):
    layer = cfg.clone(name="layer").instantiate(parent=None)
    state = filled(layer)
    assert shapes(state) == GOLDEN[name]["params"]
    outputs, _ = F(layer, prng_key=None, state=state, inputs=inputs, is_training=False)
    assert_equal(GOLDEN[name]["outputs"], outputs)


@pytest.fixture
def x(wave):
    return wave((BATCH, LENGTH, DIM))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, filled, x):
    inputs = {"query": x, "attention_logit_biases": CAUSAL, "return_aux": {"probs"}}
    check(name, ATTENTION[name], filled, inputs)


def test_attention_without_a_mask(filled, x):
    check("mha_nomask", mha(), filled, {"query": x, "return_aux": {"probs"}})


def test_cross_attention(filled, x, wave):
    other = {"key": wave((BATCH, 5, DIM), 1.0), "value": wave((BATCH, 5, DIM), 2.0)}
    check("mha_kv", mha(), filled, {"query": x, **other, "return_aux": {"probs"}})


def test_transformer_xl(filled, x):
    cfg = mha(A.MultiheadAttentionXL)
    check("mha_xl", cfg, filled, {"query": x, "return_aux": {"probs"}})


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name, filled, x):
    inputs = {"data": x, "self_attention_logit_biases": CAUSAL}
    check(name, TRANSFORMERS[name], filled, {**inputs, "return_aux": {"self_attention_probs"}})


def test_transformer_with_cross_attention(filled, x, wave):
    cfg = transformer()
    cfg.cross_attention = A.TransformerAttentionLayer.default_config().set(source_dim=6)
    cfg.cross_attention.attention.num_heads = HEADS
    inputs = {
        "data": x,
        "self_attention_logit_biases": CAUSAL,
        "cross_attention_data": wave((BATCH, 3, 6), 0.5),
        "return_aux": {"self_attention_probs", "cross_attention_probs"},
    }
    check("transformer_cross", cfg, filled, inputs)


@pytest.mark.parametrize("name", FEED_FORWARD)
def test_feed_forward(name, filled, x):
    check(name, FEED_FORWARD[name], filled, {"inputs": x})


def test_rotary_projection(filled, x):
    cfg = rope(False).set(query_dim=DIM, key_dim=DIM, value_dim=DIM, num_heads=2, per_head_dim=4)
    check("rope_qkv_linear", cfg, filled, {"query": x})


POSITIONS = jnp.broadcast_to(jnp.arange(4), (2, 4))
SEGMENTS = jnp.array([[1, 1, 1, 1], [1, 1, 2, 2]])


@pytest.mark.parametrize(
    "name, cfg",
    [
        ("alibi", A.ALiBiAttentionLogitBiasLayer.default_config().set(num_heads=3)),
        ("alibi_sym", A.SymmetricALiBiAttentionLogitBiasLayer.default_config().set(num_heads=2)),
        ("causal_bias", A.CausalAttentionLogitBiasLayer.default_config()),
        ("full_bias", A.FullAttentionLogitBiasLayer.default_config()),
    ],
)
def test_logit_biases(name, cfg, filled):
    check(name, cfg, filled, {"segment_ids": SEGMENTS, "positions": POSITIONS})


@pytest.mark.parametrize(
    "name, cfg, inputs",
    [
        (
            "rope_sinusoidal",
            A.RoFormerSinusoidalPositionalEmbedding.default_config().set(dim=6),
            {"positions": jnp.arange(4)[None]},
        ),
        (
            "sinusoidal_pos_emb",
            A.SinusoidalPositionalEmbedding.default_config().set(dim=6),
            {"positions": jnp.arange(4)},
        ),
        (
            "learned_pos_emb",
            A.LearnedPositionalEmbedding.default_config().set(shape=(5,), dim=3),
            {"positions": jnp.array([[0, 2, 4], [1, 1, 0]])},
        ),
    ],
)
def test_positions(name, cfg, inputs, filled):
    check(name, cfg, filled, inputs)


def test_per_dim_scale(filled, wave):
    check(
        "per_dim_scale",
        A.PerDimScale.default_config().set(dim=4),
        filled,
        {"x": wave((2, 3, 2, 4))},
    )


@pytest.mark.parametrize("num_heads", GOLDEN["alibi_get_slopes"])
def test_alibi_slopes(num_heads):
    slopes = A.alibi_get_slopes(int(num_heads))
    np.testing.assert_allclose(slopes, GOLDEN["alibi_get_slopes"][num_heads], rtol=1e-6)


def test_swapping_attention_and_norm(x):
    layer_cfg = A.TransformerAttentionLayer.default_config().set(
        attention=A.GroupedQueryAttention.default_config(),
        norm=RMSNorm.default_config(),
    )
    layer_cfg.set(name="layer", target_dim=DIM, source_dim=DIM).attention.set(num_heads=HEADS)
    layer = layer_cfg.instantiate(parent=None)
    state = layer.initialize_parameters_recursively(jax.random.PRNGKey(0))
    assert sorted(state["norm"]) == ["scale"]
    y, _ = F(layer, None, state, {"target": x}, is_training=False)
    assert y.data.shape == x.shape
