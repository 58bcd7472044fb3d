import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from weft.hierarchy.conv_transpose_layers import (
    Conv1DTranspose,
    Conv2DTranspose,
    Conv2DTransposeWith1DPadding,
    Conv3DTranspose,
)
from weft.hierarchy.module import functional as F

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.array(RNG.normal(size=shape).astype(np.float32))


def make(cls, **kwargs):
    cfg = cls.default_config().set(name="conv", input_dim=4, output_dim=6, **kwargs)
    layer = cfg.instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run(layer, params, *args, **kwargs):
    x = dict(zip(("x",), args, strict=True), **kwargs)
    return jax.jit(lambda *args: F(layer, None, *args, is_training=True)[0])(params, x)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    "cls, window, strides",
    [
        (Conv1DTranspose, 3, 2),
        (Conv2DTranspose, (3, 2), (2, 3)),
        (Conv3DTranspose, (2, 3, 2), (1, 2, 2)),
    ],
)
def test_agrees_with_lax(cls, window, strides, padding):
    layer, params = make(cls, window=window, strides=strides, padding=padding)
    n = 1 if cls is Conv1DTranspose else len(window)
    x = array(2, *(5, 4, 3)[:n], 4)
    y = run(layer, params, x)
    if cls is Conv1DTranspose:
        y, paddings = y
        assert paddings is None
    axes = "DHW"[:n]
    strides = (strides,) if n == 1 else strides
    layout = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    expected = lax.conv_transpose(x, params["weight"], strides, padding, dimension_numbers=layout)
    np.testing.assert_allclose(y, np.add(expected, params["bias"]), rtol=1e-4, atol=1e-5)
    assert tuple(layer.output_shape(input_shape=x.shape)) == y.shape


def test_a_transposed_kernel_is_stored_as_that_of_the_convolution():
    options = {"window": (3, 3), "strides": (2, 2), "padding": "SAME", "transpose_kernel": True}
    layer, params = make(Conv2DTranspose, **options)
    assert params["weight"].shape == (3, 3, 6, 4)
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert (spec.fans()["fan_in"], spec.fans()["fan_out"]) == (36, 54)
    x = array(2, 5, 4, 4)
    layout = ("NHWC", "HWIO", "NHWC")
    expected = lax.conv_transpose(
        x, params["weight"], (2, 2), "SAME", dimension_numbers=layout, transpose_kernel=True
    )
    y = run(layer, params, x)
    np.testing.assert_allclose(y, np.add(expected, params["bias"]), rtol=1e-4, atol=1e-5)


def test_groups_have_weights_of_their_own():
    layer, params = make(
        Conv2DTranspose, window=(3, 3), strides=(2, 2), padding="SAME", num_input_dim_groups=2
    )
    assert params["weight"].shape == (3, 3, 2, 6)
    x = array(1, 4, 4, 4)
    first = run(layer, params, x.at[..., 2:].set(0.0))
    np.testing.assert_allclose(first[..., :3], run(layer, params, x)[..., :3], rtol=1e-5)


@pytest.mark.parametrize("cls", [Conv1DTranspose, Conv2DTransposeWith1DPadding])
@pytest.mark.parametrize("padding", ["SAME", "CAUSAL"])
def test_what_is_padding_has_no_influence_and_is_zero(cls, padding):
    n = 1 if cls is Conv1DTranspose else 2
    options = {"window": 3, "strides": 2} if n == 1 else {"window": (3, 3), "strides": (2, 1)}
    layer, params = make(cls, padding=padding, **options)
    paddings = jnp.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    x = array(2, 5, *[3] * (n - 1), 4)
    y, out_paddings = run(layer, params, x, paddings=paddings)
    np.testing.assert_array_equal(out_paddings, jnp.repeat(paddings, 2, axis=1))
    assert (y[0, 6:] == 0).all()
    noisy, _ = run(layer, params, x.at[0, 3:].set(jnp.nan), paddings=paddings)
    np.testing.assert_array_equal(y, noisy)


def test_an_anchor_moves_the_paddings():
    layer, _ = make(Conv1DTranspose, window=3, strides=1, padding="SAME", anchor=2)
    paddings = jnp.array([[0, 0, 0, 1, 1]])
    assert layer.conv_paddings(paddings).tolist() == [[0, 0, 1, 1, 1]]
