"""Models whose frozen weights are stored in 8 or 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.keys import quick_key
from weft.functional import quantize_weight
from weft.hierarchy import (
    Linear,
    RepeatedTransformerLayer,
    TransformerLayer,
    merge_adapters,
    set_bias_recursively,
    set_lora_recursively,
    set_weight_format_recursively,
    without_lora,
)
from weft.hierarchy.lora import base_state
from weft.hierarchy.module import functional
from weft.hierarchy.stored_weight import (
    ParameterFromParts,
    dequantized_state,
    with_stored_weights,
    without_stored_weights,
)

DIM = 16


def stack(weight_format=None, *, lora=False):
    layer = TransformerLayer.default_config()
    layer.self_attention.attention.set(num_heads=2)
    layer.feed_forward.set(hidden_dim=32, activation=("nn.silu", "linear"))
    set_bias_recursively(layer, False)
    cfg = RepeatedTransformerLayer.default_config().set(
        name="stack", input_dim=DIM, num_layers=2, layer=layer
    )
    set_weight_format_recursively(cfg, weight_format)
    if lora:
        set_lora_recursively(cfg, rank=2, alpha=4.0)
    return cfg


def run(cfg, state, x):
    layer = cfg.clone().instantiate(parent=None)

    @jax.jit
    def call(state, x):
        outputs, vjp = jax.vjp(
            lambda x: functional(layer, None, state, (x,), is_training=False)[0].data, x
        )
        return outputs, vjp(outputs)[0]

    return call(state, x)


def initial(cfg):
    layer = cfg.clone().instantiate(parent=None)
    return jax.jit(layer.initialize_parameters_recursively)(quick_key(0))


def quantized(plain, like):
    """Returns a plain state with codes where another one has them."""

    def convert(x, target):
        parameter = ParameterFromParts(target)
        parameter.write((), np.asarray(x))
        return parameter.on_devices()

    return without_stored_weights(jax.tree.map(convert, plain, with_stored_weights(like)))


def test_model_computes_with_the_nearest_weights():
    plain_cfg, cfg = stack(), stack("nf4")
    plain = initial(plain_cfg)
    shapes = jax.eval_shape(lambda: initial(cfg))
    state = quantized(plain, shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    x = jax.random.normal(jax.random.key(1), (2, 3, DIM))
    outputs, gradient = run(cfg, state, x)
    expected, expected_gradient = run(plain_cfg, dequantized_state(state), x)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-4)
    assert np.abs(outputs - run(plain_cfg, plain, x)[0]).max() > 1e-4
    specs = cfg.clone().instantiate(parent=None).create_parameter_specs_recursively()
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)


def test_new_layer_has_the_nearest_weights_to_a_new_plain_one():
    cfg = Linear.default_config().set(name="linear", input_dim=8, output_dim=16)
    plain = initial(cfg)
    state = initial(cfg.set(weight_format="int8"))
    expected = quantize_weight(plain["weight"], "int8")
    np.testing.assert_array_equal(state["weight_codes"], expected.codes)
    np.testing.assert_array_equal(state["weight_scales"], expected.scales)
    np.testing.assert_array_equal(state["bias"], plain["bias"])


def test_backward_pass_keeps_codes_and_no_weight():
    cfg = Linear.default_config().set(
        name="linear", input_dim=64, output_dim=128, bias=False, weight_format="nf4"
    )
    layer = cfg.instantiate(parent=None)
    state = layer.initialize_parameters_recursively(jax.random.key(0))

    def kept_shapes(x):
        _, vjp = jax.vjp(lambda x: functional(layer, None, state, (x,), is_training=False)[0], x)
        return vjp

    kept = jax.eval_shape(kept_shapes, jnp.ones((2, 64)))
    assert all(np.prod(x.shape) < 64 * 128 for x in jax.tree.leaves(kept))


def test_adapters_on_a_quantized_base_merge_into_plain_weights():
    cfg = stack("nf4", lora=True)
    state = jax.tree.map(
        lambda x: x + 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else x, initial(cfg)
    )
    attention = state["repeat"]["layer"]["self_attention"]["attention"]
    assert attention["o_proj"]["layer"]["weight_codes"].dtype == jnp.uint8
    assert attention["o_proj"]["adapter"]["lora_up"]["weight"].dtype == jnp.float32
    merged = merge_adapters(cfg.clone().instantiate(parent=None), state)
    merged_cfg = without_lora(cfg)
    assert merged_cfg == stack()
    x = jax.random.normal(jax.random.key(1), (2, 3, DIM))
    np.testing.assert_allclose(run(merged_cfg, merged, x)[0], run(cfg, state, x)[0], atol=1e-4)
    base = dequantized_state(base_state(state))
    assert jax.tree.structure(base) == jax.tree.structure(merged)
