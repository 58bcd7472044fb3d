import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy.attention import (
    GroupedQKVLinear,
    GroupedQueryAttention,
    RepeatedTransformerLayer,
    RoFormerQKVLinear,
    StackedTransformerLayer,
    TransformerLayer,
)
from weft.hierarchy.attention.qkv_linear import QLinear
from weft.hierarchy.layers import LayerNorm
from weft.hierarchy.lora import (
    LoraExperts,
    base_state,
    merge_adapters,
    set_lora_recursively,
    with_base_state,
    without_lora,
)
from weft.hierarchy.mixture_of_experts import (
    TransformerFeedForwardDropFreeMoE,
    TransformerFeedForwardMoE,
)
from weft.hierarchy.module import functional as F

DIM = 8


def stack(cls=RepeatedTransformerLayer, *, grouped=False):
    layer = TransformerLayer.default_config()
    attention = layer.self_attention.attention.set(num_heads=4)
    if grouped:
        qkv = GroupedQKVLinear.default_config().set(num_kv_heads=2)
        qkv = RoFormerQKVLinear.default_config().set(input_linear=qkv, rotary_value=False)
        attention = GroupedQueryAttention.default_config().set(num_heads=4, input_linear=qkv)
    layer.self_attention.attention = attention
    layer.feed_forward.set(hidden_dim=6, activation=("nn.silu", "linear"))
    return cls.default_config().set(name="stack", input_dim=DIM, num_layers=2, layer=layer)


def adapted(cfg, **kwargs):
    cfg = cfg.clone()
    set_lora_recursively(cfg, rank=2, alpha=4.0, **kwargs)
    return cfg


def layer_of(cfg):
    return cfg.clone().instantiate(parent=None)


def of_adapters(state, fn):
    """Returns a state with the second map of each adapter changed, which begins as 0."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: fn(x) if "lora_up" in jax.tree_util.keystr(path) else x, state
    )


def paths(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


@pytest.mark.parametrize(
    ("cls", "grouped"),
    [(RepeatedTransformerLayer, False), (StackedTransformerLayer, True)],
    ids=["repeated", "stacked and grouped"],
)
def test_initial_adapters_on_a_base_merge_to_it(cls, grouped, filled):
    cfg = stack(cls, grouped=grouped)
    base, layer = layer_of(cfg), layer_of(adapted(cfg))
    of_base, state = filled(base), filled(layer)
    trained = with_base_state(state, of_base)
    assert jax.tree.structure(base_state(state)) == jax.tree.structure(of_base)
    assert paths(state) == paths(trained)
    state = of_adapters(trained, jnp.zeros_like)
    x = jnp.sin(jnp.arange(2 * 3 * DIM, dtype=jnp.float32)).reshape(2, 3, DIM)

    @functools.partial(jax.jit, static_argnums=0)
    def run(layer, state):
        return F(layer, None, state, (x,), is_training=False)[0].data

    np.testing.assert_array_equal(run(layer, state), run(base, of_base))
    expected = run(layer, trained)
    assert np.abs(expected - run(base, of_base)).max() > 0.1
    merged = merge_adapters(layer, trained)
    assert jax.tree.structure(merged) == jax.tree.structure(of_base)
    np.testing.assert_allclose(run(base, merged), expected, atol=1e-5)


def test_which_layers_get_adapters():
    cfg = stack(grouped=True)
    layers = adapted(cfg).layer
    qkv = layers.self_attention.attention.input_linear.input_linear
    assert qkv.adapter.enable_lora == {"query": True, "key": True, "value": True}
    shared = stack(grouped=True)
    shared.layer.self_attention.attention.input_linear.input_linear = QLinear.default_config()
    qkv = adapted(shared).layer.self_attention.attention.input_linear.input_linear
    assert qkv.adapter.enable_lora == {"query": True, "key": False, "value": False}
    of = {}
    for which in ("attention", "feed_forward"):
        layer = layer_of(adapted(cfg, **{which: False}))
        state = jax.eval_shape(layer.initialize_parameters_recursively, jax.random.key(0))
        of[which] = {p for p in paths(state) if "/adapter/" in p}
    assert all("feed_forward" in p for p in of["attention"])
    assert all("self_attention" in p for p in of["feed_forward"])


def test_settings_reach_all_adapters_and_are_idempotent():
    cfg = adapted(stack(), dropout_rate=0.25)
    adapter = cfg.layer.feed_forward.linear2.adapter
    assert (adapter.rank, adapter.alpha, adapter.lora_dropout.rate) == (2, 4.0, 0.25)
    with pytest.raises(LayerConfigError, match=r"has no attention and .* could be added"):
        adapted(cfg)


def test_config_without_layers_to_adapt():
    with pytest.raises(LayerConfigError, match=r"LayerNorm.* has no attention"):
        adapted(LayerNorm.default_config())


def test_adapters_are_removed():
    cfg = stack(grouped=True)
    assert without_lora(adapted(cfg)) == cfg
    assert without_lora(cfg) == cfg


def test_experts_are_a_target_that_a_dense_model_lacks():
    cfg = TransformerLayer.default_config()
    with pytest.raises(LayerConfigError, match=r"no mixture of experts, and targets has 'experts'"):
        set_lora_recursively(cfg, rank=2, alpha=2.0, targets=["experts"])


@pytest.mark.parametrize(
    ("cls", "activation"),
    [
        (TransformerFeedForwardMoE, "nn.relu"),
        (TransformerFeedForwardDropFreeMoE, ("nn.silu", "linear")),
    ],
)
def test_adapters_of_experts_merge_into_their_weights(cls, activation, filled):
    cfg = LoraExperts.default_config().set(name="experts", input_dim=DIM)
    cfg.layer = cls.default_config().set(
        hidden_dim=6, num_experts=4, num_groups=1, activation=activation
    )
    cfg.adapter.set(rank=2, alpha=6.0)
    layer = layer_of(cfg)
    state = filled(layer)
    x = jnp.sin(jnp.arange(2 * 4 * DIM, dtype=jnp.float32)).reshape(2, 4, DIM)
    outputs = F(layer, None, state, (x,), is_training=False)[0]
    merged = merge_adapters(layer, state)
    alone = layer_of(cfg.layer.clone(name="experts", input_dim=DIM))
    expected = F(alone, None, merged, (x,), is_training=False)[0]
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    without = F(alone, None, base_state(state), (x,), is_training=False)[0]
    assert np.abs(without - expected).max() > 0.1
    cfg.adapter.rank = 0
    with pytest.raises(LayerConfigError, match=r"rank=0 leaves no dimensions"):
        layer_of(cfg)
