import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.bias import CausalAttentionBias
from weft.hierarchy.attention.transformer import (
    BottleNeckAdapterTransformerLayer,
    ParallelTransformerLayer,
    TransformerAttentionLayer,
    TransformerLayer,
)
from weft.hierarchy.layers import Dropout, LayerNorm
from weft.hierarchy.module import functional as F

DIM, SOURCE, BATCH, LENGTH = 8, 6, 2, 5
CAUSAL = CausalAttentionBias.default_config()


def plain(**fields):
    cfg = TransformerLayer.default_config().set(name="layer", input_dim=DIM, **fields)
    cfg.self_attention.attention.set(num_heads=2, mask=CAUSAL)
    cfg.feed_forward.hidden_dim = 16
    return cfg


def with_cross_attention():
    cross = TransformerAttentionLayer.default_config().set(source_dim=SOURCE)
    cross.attention.num_heads = 2
    return plain(cross_attention=cross)


def parallel():
    cfg = ParallelTransformerLayer.default_config().set(name="layer", input_dim=DIM)
    cfg.self_attention.set(num_heads=2, mask=CAUSAL)
    cfg.feed_forward.hidden_dim = 16
    return cfg


def adapted(**fields):
    cfg = BottleNeckAdapterTransformerLayer.default_config().set(name="layer", input_dim=DIM)
    layer = plain()
    return cfg.set(layer=layer, **fields)


def parallel_with_two_norms():
    dropout = Dropout.default_config().set(rate=0.0)
    norm = LayerNorm.default_config()
    return parallel().set(feed_forward_norm=norm, dropout=dropout)


LAYERS = {
    "plain": plain,
    "cross": with_cross_attention,
    "parallel": parallel,
    "parallel_with_two_norms": parallel_with_two_norms,
    "adapted": adapted,
}


def build(cfg):
    return cfg.instantiate(parent=None)


def run(layer, state, method="forward", prng_key=None, is_training=False, **inputs):
    static = {name: inputs.pop(name) for name in ("return_aux", "is_prefill") if name in inputs}

    def apply(state, inputs):
        inputs = {**inputs, **static}
        return F(layer, prng_key, state, inputs, method=method, is_training=is_training)[0]

    return jax.jit(apply)(state, inputs)


@pytest.fixture
def x(wave):
    return wave((BATCH, LENGTH, DIM)) + wave((BATCH, 1, DIM), 0.4)


def more_inputs(name, wave):
    return {"cross_attention_data": wave((BATCH, 3, SOURCE))} if name == "cross" else {}


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_equals_the_whole_sequence(name, filled, x, wave):
    layer = build(LAYERS[name]())
    state, inputs = filled(layer), more_inputs(name, wave)
    expected = run(layer, state, data=x, **inputs).data
    cached = layer.init_states(batch_size=BATCH, max_len=LENGTH + 1, dtype=jnp.float32)
    cached, output = run(
        layer, state, "extend_step", cached_states=cached, data=x[:, :3], is_prefill=True, **inputs
    )
    outputs = [output.data]

    @jax.jit
    def step(cached, x):
        arrays = {"cached_states": cached, "data": x, **inputs}
        return F(layer, None, state, arrays, method="extend_step", is_training=False)[0]

    for t in (3, 4):
        cached, output = step(cached, x[:, t : t + 1])
        outputs.append(output.data)
    got = jnp.concatenate(outputs, axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_return_aux(name, filled, x, wave):
    layer = build(LAYERS[name]())
    aux = {"self_attention_probs", "self_attention_kv_state"}
    aux |= {"cross_attention_probs"} if name == "cross" else set()
    inputs = more_inputs(name, wave)
    output = run(layer, filled(layer), data=x, return_aux=aux, **inputs)
    assert output.self_attention_probs.shape == (BATCH, 2, LENGTH, LENGTH)
    assert output.self_attention_kv_state.k_proj.shape == (BATCH, LENGTH, 2, 4)
    if name == "cross":
        assert output.cross_attention_probs.shape == (BATCH, 2, LENGTH, 3)
    output = run(layer, filled(layer), data=x, **inputs)
    assert output[1:] == (None, None, None)


def test_adapter_is_a_bottleneck(filled, x):
    layer = build(adapted(bottleneck_ratio=0.25))
    assert layer.create_parameter_specs_recursively()["adapter"]["linear1"]["weight"].shape == (
        8,
        2,
    )
    assert layer.config.adapter.structure == "postnorm"


@pytest.mark.parametrize(
    "name, inputs, message",
    [
        ("cross", {}, "layer has a cross_attention, but was given no cross_attention_data"),
        (
            "plain",
            {"cross_attention_data": jnp.ones((BATCH, 3, SOURCE))},
            "layer was given cross_attention_data, but has no cross_attention",
        ),
    ],
)
def test_cross_attention_and_its_data(name, inputs, message, filled, x):
    layer = build(LAYERS[name]())
    with pytest.raises(ArgumentValueError, match=re.escape(message)):
        run(layer, filled(layer), data=x, **inputs)


def test_adapter_without_dimensions():
    with pytest.raises(LayerConfigError, match=r"bottleneck_ratio=0\.1 of input_dim=8"):
        build(adapted(bottleneck_ratio=0.1))
