import jax
import numpy as np
from jax.sharding import PartitionSpec

from weft.hierarchy.attention_sharding import (
    set_attention_partition_specs,
    set_double_shard_weights_config,
    set_feed_forward_partition_specs,
)
from weft.hierarchy.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.module import functional as F
from weft.hierarchy.multihead_attention import MultiheadAttention
from weft.hierarchy.rope import RoFormerQKVLinear
from weft.hierarchy.transformer import TransformerAttentionLayer, TransformerLayer


def config(**fields):
    cfg = TransformerLayer.default_config().set(name="layer", input_dim=8, **fields)
    cfg.self_attention.attention.num_heads = 4
    cfg.feed_forward.hidden_dim = 16
    return cfg


def test_weights_are_sharded_twice():
    cross = TransformerAttentionLayer.default_config().set(source_dim=8)
    cross.attention.num_heads = 4
    cfgs = [config(), config(cross_attention=cross)]
    set_double_shard_weights_config(cfgs)
    specs = cfgs[1].instantiate(parent=None).create_parameter_specs_recursively()
    for name in ("self_attention", "cross_attention"):
        attention = specs[name]["attention"]
        expected = PartitionSpec("fsdp", "model", None)
        assert attention["i_proj"]["q_proj"]["weight"].mesh_axes == expected
        assert attention["o_proj"]["weight"].mesh_axes == expected
    ffn = specs["feed_forward"]
    assert ffn["linear1"]["weight"].mesh_axes == PartitionSpec("fsdp", "model")
    assert ffn["linear2"]["weight"].mesh_axes == PartitionSpec("model", "fsdp")
    assert cfgs[0].self_attention.attention.q_partition_spec is None


def test_one_layer_and_its_activations():
    cfg = config()
    set_double_shard_weights_config(cfg, batch_axis_names="data", set_attn_activation_specs=True)
    attention = cfg.self_attention.attention
    assert attention.q_partition_spec == ("data", "seq", "model", None)
    assert attention.k_partition_spec == attention.v_partition_spec == attention.q_partition_spec
    assert attention.o_partition_spec == ("data", "seq", None)
    assert cfg.feed_forward.linear1.output_partition_spec == ("data", "seq", "model")


def test_projections_inside_of_others():
    cfg = MultiheadAttention.default_config().set(input_linear=RoFormerQKVLinear.default_config())
    set_attention_partition_specs(cfg, tp_axis_names="tensor")
    expected = ("fsdp", "tensor", None)
    assert cfg.input_linear.input_linear.layer.param_partition_spec == expected


def test_feed_forward_alone():
    cfg = TransformerFeedForwardLayer.default_config()
    set_feed_forward_partition_specs(cfg, fsdp_axis_names=("data", "fsdp"))
    assert cfg.linear2.param_partition_spec == ("model", ("data", "fsdp"))


def test_the_mesh_changes_no_value(filled, wave):
    n = jax.device_count()
    shape = (n // 2, 2) if n > 1 else (1, 1)
    cfg = config()
    axes = {"batch_axis_names": "data", "fsdp_axis_names": "data", "seq_axis_names": None}
    set_double_shard_weights_config(cfg, set_attn_activation_specs=True, **axes)
    layer = cfg.instantiate(parent=None)
    state, x = filled(layer), wave((shape[0] * 2, 3, 8))

    def apply(state, x):
        return F(layer, None, state, (x,), is_training=False)[0].data

    plain = jax.jit(apply)(state, x)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=axis_types)
    specs = layer.create_parameter_specs_recursively()
    laid_out = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding(mesh)), state, specs)
    with jax.set_mesh(mesh):
        y = jax.jit(apply)(laid_out, x)
    np.testing.assert_allclose(y, plain, rtol=1e-4, atol=1e-5)
    assert y.sharding.spec[0] == "data" or n == 1
