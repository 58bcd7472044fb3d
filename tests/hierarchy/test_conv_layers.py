import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from weft.errors import ArgumentShapeError, LayerConfigError
from weft.hierarchy.conv_layers import Conv1D, Conv2D, Conv3D
from weft.hierarchy.module import functional as F

RNG = np.random.default_rng(0)
SPATIAL = (7, 6, 5)
CONVS = {1: Conv1D, 2: Conv2D, 3: Conv3D}


def array(*shape):
    return jnp.array(RNG.normal(size=shape).astype(np.float32))


def make(cls, **kwargs):
    layer = cls.default_config().set(name="conv", **kwargs).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run(layer, params, x):
    return jax.jit(lambda *args: F(layer, None, args[0], args[1:], is_training=True)[0])(params, x)


def sizes(n, *values):
    """One value per axis, in the form that a config of `n` axes takes."""
    return values[0] if n == 1 else tuple(values[:n])


@pytest.mark.parametrize("padding", ["VALID", "SAME", "CAUSAL", "explicit"])
@pytest.mark.parametrize("n", CONVS)
def test_convolves_with_its_weight(n, padding):
    pads = {
        "VALID": [(0, 0)] * n,
        "SAME": [(1, 1), (2, 2), (1, 1)][:n],
        "CAUSAL": [(1, 1), (2, 2), (1, 1)][:n],
        "explicit": [(0, 3), (1, 0), (2, 2)][:n],
    }[padding]
    layer, params = make(
        CONVS[n],
        input_dim=4,
        output_dim=6,
        num_input_dim_groups=2,
        window=sizes(n, 3, 5, 2),
        strides=sizes(n, 2, 1, 1),
        dilation=sizes(n, 1, 1, 2),
        padding=tuple(pads) if padding == "explicit" else padding,
    )
    assert params["weight"].shape == (*(3, 5, 2)[:n], 2, 6)
    assert params["bias"].shape == (6,)
    x = array(2, *SPATIAL[:n], 4)
    y = run(layer, params, x)
    axes = "DHW"[:n]
    expected = lax.conv_general_dilated(
        x,
        params["weight"],
        (2, 1, 1)[:n],
        pads,
        rhs_dilation=(1, 1, 2)[:n],
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        feature_group_count=2,
    )
    np.testing.assert_allclose(y, np.add(expected, params["bias"]), rtol=1e-4, atol=1e-5)
    assert tuple(layer.output_shape(input_shape=x.shape)) == y.shape


@pytest.mark.parametrize("n", CONVS)
def test_specs(n):
    layer, params = make(CONVS[n], input_dim=4, output_dim=6, window=sizes(n, 3, 3, 3), bias=False)
    assert set(params) == {"weight"}
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert spec.mesh_axes == PartitionSpec(*[None] * (n + 1), "model")
    assert spec.fans()["fan_in"] == 3**n * 4
    assert spec.fans()["fan_out"] == 3**n * 6


def test_first_values_keep_the_size_of_activations():
    layer, _ = make(Conv1D, input_dim=64, output_dim=64, window=3)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    assert (params["bias"] == 0).all()
    np.testing.assert_allclose(params["weight"].std(), (3 * 64) ** -0.5, rtol=0.05)


def test_by_default_nothing_is_padded():
    layer, params = make(Conv1D, input_dim=2, output_dim=3, window=3)
    assert run(layer, params, jnp.ones((1, 5, 2))).shape == (1, 3, 3)
    layer, params = make(Conv2D, input_dim=2, output_dim=3)
    assert run(layer, params, jnp.ones((1, 5, 4, 2))).shape == (1, 5, 4, 3)


def test_under_jit_and_grad():
    layer, params = make(Conv1D, input_dim=2, output_dim=3, window=3, padding="SAME")
    x = array(2, 5, 2)
    grads = jax.jit(jax.grad(lambda params: jnp.sum(run(layer, params, x) ** 2)))(params)
    np.testing.assert_allclose(
        grads["bias"], 2 * run(layer, params, x).sum((0, 1)), rtol=1e-4, atol=1e-5
    )


def test_unknown_sizes_stay_unknown():
    layer, _ = make(Conv2D, input_dim=2, output_dim=3, window=(3, 3), padding="SAME")
    assert layer.output_shape(input_shape=(None, None, 8, 2)) == [None, None, 8, 3]


@pytest.mark.parametrize("shape", [(1, 5, 3), (1, 5, 5, 2)])
def test_shapes_of_other_inputs_are_refused(shape):
    layer, _ = make(Conv1D, input_dim=2, output_dim=3, window=3)
    with pytest.raises(ArgumentShapeError, match=r"conv: input_shape=.*1 spatial sizes, 2 channel"):
        layer.output_shape(input_shape=shape)


@pytest.mark.parametrize("name", ["input_dim", "output_dim"])
def test_groups_that_do_not_divide_are_refused(name):
    dims = {"input_dim": 6, "output_dim": 6, name: 4}
    with pytest.raises(LayerConfigError, match=f"conv: {name}=4 is not divisible"):
        make(Conv1D, window=3, num_input_dim_groups=3, **dims)
