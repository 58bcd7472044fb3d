import jax
import numpy as np
from jax.sharding import PartitionSpec

from weft.hierarchy.attention_sharding import (
    set_attention_partition_specs,
    set_double_shard_weights_config,
    set_feed_forward_partition_specs,
)
from weft.hierarchy.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.lora_setters import set_lora_recursively
from weft.hierarchy.mixture_of_experts import ApproximateTokenDropFreeMoE
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


def test_adapters_stand_beside_what_is_sharded():
    cfg = config()
    attention = cfg.self_attention.attention
    attention.input_linear = RoFormerQKVLinear.default_config().set(rotary_value=False)
    set_lora_recursively(cfg, rank=2, alpha=2.0)
    set_double_shard_weights_config(cfg)
    specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    of_attention = specs["self_attention"]["attention"]
    expected = PartitionSpec("fsdp", "model", None)
    projections = of_attention["i_proj"]["i_proj"]["layer"]
    assert projections["q_proj"]["weight"].mesh_axes == expected
    assert of_attention["o_proj"]["layer"]["weight"].mesh_axes == expected
    linear1 = specs["feed_forward"]["linear1"]["layer"]
    assert linear1["weight"].mesh_axes == PartitionSpec("fsdp", "model")


def test_experts_are_sharded_twice_beside_their_own_axis():
    cfg = config()
    cfg.feed_forward = ApproximateTokenDropFreeMoE.default_config().set(
        hidden_dim=16, num_experts=4
    )
    set_double_shard_weights_config(cfg, batch_axis_names=["data", "fsdp"])
    layer = cfg.instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()["feed_forward"]
    assert specs["wi_weight"].mesh_axes == PartitionSpec("expert", "fsdp", "model")
    assert specs["wo_weight"].mesh_axes == PartitionSpec("expert", "model", "fsdp")
    axes = cfg.feed_forward.dim_to_mesh_axis_map
    assert axes["ogsm"] == PartitionSpec(("data", "fsdp"), "expert", None, None)
    tokens = PartitionSpec(("data", "fsdp"), "seq", None)
    assert cfg.feed_forward.input_dim_to_partition_spec["bsm"] == tokens
    # Where experts are applied, the dimensions that FSDP cuts up are whole.
    weight = PartitionSpec("expert", None, "model")
    assert cfg.feed_forward.input_dim_to_partition_spec["emh"] == weight
