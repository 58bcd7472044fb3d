import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention import (
    GroupedQueryAttention,
    RepeatedTransformerLayer,
    RoFormerQKVLinear,
    TransformerLayer,
)
from weft.hierarchy.attention.qkv_linear import (
    BaseQKVLinear,
    FusedGroupedQKVLinear,
    FusedQKVLinear,
    GroupedQKVLinear,
    MultiheadInputLinear,
    QKVLinear,
    QLinear,
)
from weft.hierarchy.lora import (
    LoraFusedQKVLinear,
    LoraLinear,
    LoraMultiheadOutputLinear,
    merge_adapters,
)
from weft.hierarchy.module import functional as F
from weft.trainer.learner import Learner, UpdateType
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.optimizers.base import OptParam
from weft.trainer.update_transformation import ForwardOutputs

DIM, HEADS, HEAD, RANK, ALPHA = 8, 4, 2, 3, 6.0
ALL = {"query": True, "key": True, "value": True}


def with_adapter(cfg, **fields):
    cfg.adapter.set(rank=RANK, alpha=ALPHA, **fields)
    return cfg


def lora_linear(**fields):
    return with_adapter(LoraLinear.default_config()).set(**fields)


def lora_qkv(layer=None, enable_lora=None):
    cfg = LoraFusedQKVLinear.default_config()
    if layer is not None:
        cfg.layer = layer
    return with_adapter(cfg, enable_lora=enable_lora or {"query": True, "value": True})


def lora_output():
    return with_adapter(LoraMultiheadOutputLinear.default_config())


def made(cfg, **fields):
    return cfg.set(name="lora", **fields).instantiate(parent=None)


def qkv_layer(layer=None, enable_lora=None, dim=DIM):
    dims = dict.fromkeys(("query_dim", "key_dim", "value_dim"), dim)
    return made(lora_qkv(layer, enable_lora), num_heads=HEADS, per_head_dim=HEAD, **dims)


@functools.partial(jax.jit, static_argnums=0)
def run(layer, state, *args, **kwargs):
    return F(layer, None, state, kwargs or args, is_training=False)[0]


def plain_of(adapted):
    """Returns the layer without its adapter, as a root."""
    return adapted.layer.config.clone().instantiate(parent=None)


def test_linear_adapter_is_two_products(filled, wave):
    layer, x = made(lora_linear(), input_dim=DIM, output_dim=5), wave((2, 3, DIM))
    state = filled(layer)
    down, up = (state["adapter"][name]["weight"] for name in ("lora_down", "lora_up"))
    base = np.add(x @ state["layer"]["weight"], state["layer"]["bias"])
    expected = base + (x @ down @ up) * ALPHA / RANK
    np.testing.assert_allclose(run(layer, state, x), expected, rtol=1e-5, atol=1e-6)


def test_qkv_adapter_adds_to_enabled_projections(filled, wave):
    layer, x = qkv_layer(), wave((2, 3, DIM))
    state = filled(layer)
    got = run(layer, state, x)
    base = run(plain_of(layer), state["layer"], x)
    down, up = (state["adapter"][name]["weight"] for name in ("lora_down", "lora_up"))
    assert down.shape == (2, DIM, RANK)
    assert up.shape == (2, RANK, HEADS, HEAD)
    for i, name in ((0, "query"), (1, "value")):
        added = np.tensordot(x @ down[i], up[i], 1) * ALPHA / RANK
        expected = getattr(base, name) + added
        np.testing.assert_allclose(getattr(got, name), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.key, base.key)


@pytest.mark.parametrize("cls", [GroupedQKVLinear, FusedGroupedQKVLinear])
def test_grouped_adapter_has_fewer_key_heads(cls, filled, wave):
    layer, x = qkv_layer(cls.default_config().set(num_kv_heads=2), ALL), wave((2, 3, DIM))
    state = filled(layer)
    got = run(layer, state, x)
    base = run(plain_of(layer), state["layer"], x)
    down, up = (state["adapter"][name]["weight"] for name in ("lora_down", "lora_up"))
    assert up.shape == (RANK, HEADS + 2 + 2, HEAD)
    for i, heads in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
        added = np.tensordot(x @ down[i], up[:, heads], 1) * ALPHA / RANK
        np.testing.assert_allclose(got[i], base[i] + added, rtol=1e-5, atol=1e-6)


BASES = {
    "fused": (FusedQKVLinear.default_config(), ALL),
    "fused, queries and values": (FusedQKVLinear.default_config(), None),
    "separate": (QKVLinear.default_config(), ALL),
    "grouped": (GroupedQKVLinear.default_config().set(num_kv_heads=2), ALL),
    "grouped, queries": (
        GroupedQKVLinear.default_config().set(num_kv_heads=2),
        {"query": True, "key": False},
    ),
    "fused and grouped": (FusedGroupedQKVLinear.default_config().set(num_kv_heads=1), ALL),
    "fused and grouped, values": (
        FusedGroupedQKVLinear.default_config().set(num_kv_heads=2),
        {"value": True},
    ),
    "fused, as many heads": (FusedGroupedQKVLinear.default_config().set(num_kv_heads=HEADS), ALL),
}


@pytest.mark.parametrize("name", BASES)
def test_merged_projections_equal_the_unmerged(name, filled, wave):
    layer, x = qkv_layer(*BASES[name]), wave((2, 3, DIM))
    state = filled(layer)
    merged = merge_adapters(layer, state)
    got = run(plain_of(layer), merged, x)
    assert jax.tree.structure(merged) == jax.tree.structure(state["layer"])
    for a, b in zip(got, run(layer, state, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def stack(lora):
    """Returns two repeated transformer layers with rotary positions and grouped heads, with or
    without adapters on all that they project.
    """
    attention = GroupedQueryAttention.default_config().set(num_heads=HEADS)
    qkv = FusedGroupedQKVLinear.default_config().set(num_kv_heads=2)
    attention.input_linear = RoFormerQKVLinear.default_config().set(
        input_linear=lora_qkv(qkv, ALL) if lora else qkv, rotary_value=False
    )
    layer = TransformerLayer.default_config()
    layer.feed_forward.hidden_dim = 6
    layer.self_attention.attention = attention
    if lora:
        attention.output_linear = lora_output()
        layer.feed_forward.set(linear1=lora_linear(), linear2=lora_linear())
    cfg = RepeatedTransformerLayer.default_config().set(name="model", input_dim=DIM, layer=layer)
    return cfg.set(num_layers=2).instantiate(parent=None)


@pytest.fixture(scope="module")
def drawn(filled):
    """A state in which the adapters have initial values, which nothing else needs to have."""

    def initial(path, spec, value):
        if "lora_up" not in jax.tree_util.keystr(path):
            return value
        fields = {"shape": spec.shape, "dtype": spec.dtype, "axes": spec.fan_axes}
        return spec.initializer.initialize(path[-1].key, prng_key=jax.random.key(0), **fields)

    module = stack(lora=True)
    specs = module.create_parameter_specs_recursively()
    return jax.tree_util.tree_map_with_path(initial, specs, filled(module))


def is_adapter(path):
    return "'adapter'" in jax.tree_util.keystr(path)


def test_initial_adapters_are_identity(drawn, wave):
    x = wave((2, 3, DIM))
    got = run(stack(lora=True), drawn, x).data
    merged = merge_adapters(stack(lora=True), drawn)
    plain = stack(lora=False)
    specs = plain.create_parameter_specs_recursively()
    assert jax.tree.structure(merged) == jax.tree.structure(specs)
    np.testing.assert_array_equal(got, run(plain, merged, x).data)


def trained(params, x, steps=2):
    """Parameters after a few steps in which only adapters are trained."""
    rules = [(".*/adapter/.*", UpdateType.ALL_UPDATES), (".*", UpdateType.NO_UPDATE)]
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=0.02, decouple_weight_decay=True, momentum=0.9, weight_decay=0.1
    )
    cfg = Learner.default_config().set(name="learner", optimizer=optimizer, update_rules=rules)
    learner, model = cfg.instantiate(parent=None), stack(lora=True)

    def forward(*, model_params, inputs):
        output, collection = F(model, None, model_params, (inputs,), is_training=True)
        return ForwardOutputs(jnp.mean(jnp.square(output.data - 1)), {}, collection)

    def opt_params(values):
        return jax.tree.map(OptParam, values)

    @jax.jit
    def step(state, params):
        inputs = {"fn": forward, "inputs": x, "opt_params": opt_params(params)}
        results, collection = F(
            learner, None, state, inputs, method="forward_and_backward", is_training=True
        )
        loss = results.forward_outputs.loss
        return collection.state_updates, results.backward_outputs.updated_params, loss

    state, losses = learner.init(opt_params(params)), []
    for _ in range(steps):
        state, params, loss = step(state, params)
        losses.append(loss)
    return params, losses, state


def test_only_adapters_train_and_merge_afterwards(drawn, wave):
    x = wave((2, 3, DIM))
    params, losses, state = trained(drawn, x, steps=3)
    assert losses[-1] < losses[0]
    before = dict(jax.tree_util.tree_leaves_with_path(drawn))
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(path):
            assert not np.array_equal(value, before[path]), path
        else:
            np.testing.assert_array_equal(value, before[path])
    # Frozen parameters have no optimizer state.
    kept = [path for path, x in jax.tree_util.tree_leaves_with_path(state) if np.ndim(x)]
    assert kept
    assert all(map(is_adapter, kept))
    merged = merge_adapters(stack(lora=True), params)
    got = run(stack(lora=False), merged, x).data
    np.testing.assert_allclose(got, run(stack(lora=True), params, x).data, rtol=1e-4, atol=1e-5)


def test_adapter_dropout_keeps_layer_output(filled, wave):
    cfg = lora_linear(input_dim=DIM, output_dim=5)
    cfg.adapter.lora_dropout.rate = 0.5
    layer, x = made(cfg), wave((2, 3, DIM))
    state = filled(layer)
    state["adapter"] = jax.tree.map(jnp.zeros_like, state["adapter"])
    y, _ = F(layer, jax.random.PRNGKey(0), state, (x,), is_training=True)
    np.testing.assert_array_equal(y, run(layer, state, x))


def test_only_queries_allow_cross_attention(filled, wave):
    layer = qkv_layer(QKVLinear.default_config(), {"query": True})
    x, y = wave((2, 3, DIM)), wave((2, 5, DIM), 1.0)
    got = run(layer, filled(layer), query=x, key=y, value=y)
    assert got.key.shape == (2, 5, HEADS, HEAD)
    assert layer.num_kv_heads == HEADS
    layer = qkv_layer()
    with pytest.raises(ArgumentValueError, match=r"lora has one adapter for query, value of the"):
        run(layer, filled(layer), query=x, key=x)


def test_shared_keys_can_have_no_adapter():
    assert LoraFusedQKVLinear.is_kv_sharing(lora_qkv(QLinear.default_config()))
    assert not LoraFusedQKVLinear.is_kv_sharing(lora_qkv())
    with pytest.raises(LayerConfigError, match=r"lora: layer is a QLinear, .* has \['value'\]"):
        qkv_layer(QLinear.default_config())


def no_rank():
    cfg = lora_linear()
    cfg.adapter.rank = 0
    return cfg


class OneWeight(BaseQKVLinear):
    """Projections stored in an unknown form."""


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: made(no_rank(), input_dim=2, output_dim=2),
            "lora.adapter: rank=0 leaves no dimension",
        ),
        (
            lambda: made(
                lora_linear(layer=MultiheadInputLinear.default_config()), input_dim=2, output_dim=2
            ),
            "lora: layer is a MultiheadInputLinear, which this adapter does not fit",
        ),
        (
            lambda: made(
                lora_output().set(layer=MultiheadInputLinear.default_config()),
                model_dim=2,
                num_heads=1,
                per_head_dim=2,
            ),
            "expected a MultiheadOutputLinear",
        ),
        (
            lambda: qkv_layer(RoFormerQKVLinear.default_config().set(rotary_value=False)),
            "lora: layer is a RoFormerQKVLinear, which changes queries and keys after",
        ),
        (
            lambda: qkv_layer(enable_lora={"queries": True}),
            "lora.adapter: enable_lora has ['queries']; its keys are",
        ),
        (
            lambda: qkv_layer(enable_lora={"query": False}),
            "lora.adapter: enable_lora={'query': False} enables nothing",
        ),
        (
            lambda: merge_adapters(
                qkv_layer(OneWeight.default_config()),
                {
                    "layer": {"all": 0},
                    "adapter": {
                        "lora_down": {"weight": jnp.zeros((2, DIM, RANK))},
                        "lora_up": {"weight": jnp.zeros((2, RANK, HEADS, HEAD))},
                    },
                },
            ),
            "lora: the weights of a OneWeight are unknown",
        ),
    ],
    ids=["rank", "linear", "output", "rotary", "unknown", "nothing", "merge"],
)
def test_invalid_config_raises(make, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        make()
