import pytest

from weft.config import REQUIRED, InstantiableConfig, config_class
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.config_setters import (
    set_bias_recursively,
    set_dropout_rate_recursively,
    set_layer_norm_eps_recursively,
    set_norm_recursively,
)
from weft.hierarchy.dropout import Dropout
from weft.hierarchy.linear import Linear
from weft.hierarchy.normalization import L2Norm, LayerNorm, RMSNorm


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


def test_biases_are_set_wherever_there_is_a_field():
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


def test_the_config_itself_may_be_what_is_set():
    cfg = Dropout.default_config()
    set_dropout_rate_recursively(cfg, 0.3)
    assert cfg.rate == 0.3
