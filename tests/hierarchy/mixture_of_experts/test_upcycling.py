import re
from typing import Any

import jax
import numpy as np
import pytest

from weft.errors import ParameterSpecError
from weft.hierarchy.attention import (
    RepeatedTransformerLayer,
    StackedTransformerLayer,
    TransformerLayer,
)
from weft.hierarchy.mixture_of_experts import (
    TransformerFeedForwardMoE,
    convert_dense_to_moe_parameters,
)
from weft.hierarchy.mixture_of_experts.gating import TopKGating
from weft.hierarchy.module import functional as F

DIM = 4


def transformer(experts=None, bias=False):
    layer = TransformerLayer.default_config()
    layer.self_attention.attention.num_heads = 2
    layer.feed_forward.set(hidden_dim=6, activation=("nn.silu", "linear"))
    for linear in (layer.feed_forward.linear1, layer.feed_forward.linear2):
        linear.bias = bias
    if experts:
        layer.feed_forward = TransformerFeedForwardMoE.default_config().set(
            hidden_dim=6,
            activation=("nn.silu", "linear"),
            num_experts=experts,
            num_groups=1,
            gating=TopKGating.default_config(),
        )
    return layer


def stacked(layers, n, cls: Any = RepeatedTransformerLayer):
    return cls.default_config().set(layer=layers, num_layers=n)


def every_second(n, cls: Any = RepeatedTransformerLayer):
    """Config of a stack whose every second layer has experts."""
    pair = [transformer(), transformer(experts=3)]
    if cls is StackedTransformerLayer:
        return stacked(pair * (n // 2), n, cls)
    return stacked(stacked(pair, 2, StackedTransformerLayer), n // 2)


def made(cfg):
    return cfg.set(name="stack", input_dim=DIM).instantiate(parent=None)


def stack(experts=None, bias=False):
    return made(stacked(transformer(experts, bias), 2))


STACKS = {
    "repeated to repeated": (
        lambda: stacked(transformer(), 2),
        lambda: stacked(transformer(experts=3), 2),
    ),
    "stacked to every second": (
        lambda: stacked(transformer(), 4, StackedTransformerLayer),
        lambda: every_second(4),
    ),
    "repeated to children": (
        lambda: stacked(transformer(), 2),
        lambda: every_second(2, StackedTransformerLayer),
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_upcycled_model_equals_the_dense_model(name, filled, wave):
    dense, moe = (made(cfg()) for cfg in STACKS[name])
    source, x = filled(dense), wave((2, 3, DIM))
    specs = moe.create_parameter_specs_recursively()
    prebuilt = convert_dense_to_moe_parameters(source, target_parameter_specs=specs)
    state = jax.jit(lambda key: moe.initialize_parameters_recursively(key, prebuilt=prebuilt))(
        jax.random.PRNGKey(0)
    )
    assert jax.tree.map(np.shape, state) == jax.tree.map(lambda s: s.shape, specs)
    # Weights of the chosen experts add up to 1, and all experts are the same.
    got, expected = (
        jax.jit(lambda s, m=model: F(m, None, s, (x,), is_training=False)[0].data)(s)
        for model, s in ((moe, state), (dense, source))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_numbers_of_layers_must_be_equal(filled):
    specs = made(every_second(4)).create_parameter_specs_recursively()
    said = "the target has 4 layers, but the source has 3; set num_layers"
    with pytest.raises(ParameterSpecError, match=said):
        converted(filled(made(stacked(transformer(), 3))), specs)


def converted(source, target):
    return convert_dense_to_moe_parameters(source, target_parameter_specs=target)


def test_mismatched_parameters_raise(filled):
    specs = stack(experts=3).create_parameter_specs_recursively()
    with pytest.raises(ParameterSpecError, match=r"wi_0_weight is copied from .* with \['bias'\]"):
        converted(filled(stack(bias=True)), specs)
    at = "repeat/layer/feed_forward"
    source = filled(stack())
    feed_forward = source["repeat"]["layer"]["feed_forward"]
    feed_forward["linear3"] = feed_forward["linear2"]
    with pytest.raises(ParameterSpecError, match=rf"{at} has the parameters \['linear3'\]"):
        converted(source, specs)
    del feed_forward["linear3"]
    feed_forward["linear2"] = {"weight": np.zeros((2, 5, DIM))}
    said = f"{at}/wo_weight has shape (2, 3, 6, 4) in the target, but the source has (2, 3, 5"
    with pytest.raises(ParameterSpecError, match=re.escape(said)):
        converted(source, specs)
    del feed_forward["linear2"]
    with pytest.raises(ParameterSpecError, match=f"{at}/wo_weight is copied from 'linear2'"):
        converted(source, specs)
