import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.config import REQUIRED, InstantiableConfig, config_class
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.attention.transformer import TransformerAttentionLayer, TransformerLayer
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.config_setters import (
    set_bias_recursively,
    set_double_shard_weights_config,
    set_dropout_rate_recursively,
    set_feed_forward_partition_specs,
    set_layer_norm_eps_recursively,
    set_norm_recursively,
)
from weft.hierarchy.layers.linear import Dropout, Linear
from weft.hierarchy.layers.normalization import L2Norm, LayerNorm, RMSNorm
from weft.hierarchy.lora import set_lora_recursively
from weft.hierarchy.mixture_of_experts import ApproximateTokenDropFreeMoE
from weft.hierarchy.module import functional as F


class Block(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        linear: Linear.Config = Linear.default_config()
        norm: InstantiableConfig = LayerNorm.default_config()
        length: InstantiableConfig = L2Norm.default_config()
        dropout: Dropout.Config = Dropout.default_config()
        norms: dict[str, InstantiableConfig] = {"in": LayerNorm.default_config()}


class Stack(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        blocks: list[Block.Config] = []
        dropout: Dropout.Config = Dropout.default_config().set(rate=0.5)


def make():
    return Stack.default_config().set(blocks=[Block.default_config(), Block.default_config()])


@pytest.mark.parametrize("only_if_none, outer", [(False, 0.1), (True, 0.5)])
def test_dropout_rates_are_set_everywhere(only_if_none, outer):
    cfg = make()
    set_dropout_rate_recursively(cfg, 0.1, set_only_if_none=only_if_none)
    assert [block.dropout.rate for block in cfg.blocks] == [0.1, 0.1]
    assert cfg.dropout.rate == outer


def test_eps_is_set_in_layer_norms_only():
    cfg = make()
    before = cfg.blocks[0].length.eps
    set_layer_norm_eps_recursively(cfg, 0.25)
    for block in cfg.blocks:
        assert block.norm.eps == block.norms["in"].eps == 0.25
        assert block.length.eps == before
    set_layer_norm_eps_recursively(cfg, 0.5, set_only_if_none=True)
    assert cfg.blocks[0].norm.eps == 0.25


def test_biases_are_set_in_all_layers():
    cfg = make()
    set_bias_recursively(cfg)
    assert [block.linear.bias for block in cfg.blocks] == [False, False]
    set_bias_recursively(cfg, bias=True)
    assert cfg.blocks[1].linear.bias


def test_norms_are_replaced_and_keep_the_size_of_their_input():
    cfg = make()
    cfg.blocks[0].norm.input_dim = 7
    norm = RMSNorm.default_config().set(eps=0.5)
    set_norm_recursively(cfg, norm)
    for block in cfg.blocks:
        assert block.norm.klass is block.norms["in"].klass is RMSNorm
        assert block.norm.eps == 0.5
        assert block.length.klass is L2Norm
    assert cfg.blocks[0].norm.input_dim == 7
    assert cfg.blocks[1].norm.input_dim is REQUIRED
    norm.eps = 0.25
    assert cfg.blocks[0].norm.eps == 0.5  # a copy


def config(**fields):
    cfg = TransformerLayer.default_config().set(name="layer", input_dim=8, **fields)
    cfg.self_attention.attention.num_heads = 4
    cfg.feed_forward.hidden_dim = 16
    return cfg


def test_weights_use_both_axes():
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


def test_feed_forward_only():
    cfg = TransformerFeedForwardLayer.default_config()
    set_feed_forward_partition_specs(cfg, fsdp_axis_names=("data", "fsdp"))
    assert cfg.linear2.param_partition_spec == ("model", ("data", "fsdp"))


def test_mesh_keeps_values(filled, wave):
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


def test_weights_with_adapters_are_sharded():
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


def test_experts_use_both_axes():
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
