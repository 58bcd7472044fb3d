import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tests.keys import draw
from weft.errors import ArgumentShapeError, LayerConfigError, UnknownActivationError
from weft.hierarchy.convolution import (
    Conv1D,
    Conv1DTranspose,
    Conv1DWithPadding,
    Conv2D,
    Conv2DTranspose,
    Conv2DTransposeWith1DPadding,
    Conv2DWith1DPadding,
    Conv3D,
    Conv3DTranspose,
    MaxPool2D,
    SqueezeExcitation,
    StackOverTime,
)
from weft.hierarchy.module import functional as F

RNG = np.random.default_rng(0)
SPATIAL = (7, 6, 5)
CONVS = {1: Conv1D, 2: Conv2D, 3: Conv3D}


def array(*shape):
    return jnp.array(RNG.normal(size=shape).astype(np.float32))


def make_conv(cls, **kwargs):
    layer = cls.default_config().set(name="conv", **kwargs).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run_conv(layer, params, x):
    return jax.jit(lambda *args: F(layer, None, args[0], args[1:], is_training=True)[0])(params, x)


def sizes(n, *values):
    """Returns one value per axis, in the form that a config of `n` axes takes."""
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
    layer, params = make_conv(
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
    y = run_conv(layer, params, x)
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
    layer, params = make_conv(
        CONVS[n], input_dim=4, output_dim=6, window=sizes(n, 3, 3, 3), bias=False
    )
    assert set(params) == {"weight"}
    spec = layer.create_parameter_specs_recursively()["weight"]
    assert spec.mesh_axes == PartitionSpec(*[None] * (n + 1), "model" if n == 1 else None)
    assert spec.fans()["fan_in"] == 3**n * 4
    assert spec.fans()["fan_out"] == 3**n * 6


def test_initial_values_keep_the_size_of_activations():
    layer, _ = make_conv(Conv1D, input_dim=64, output_dim=64, window=3)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    assert (params["bias"] == 0).all()
    np.testing.assert_allclose(params["weight"].std(), (3 * 64) ** -0.5, rtol=0.05)


def test_default_padding_is_valid():
    layer, params = make_conv(Conv1D, input_dim=2, output_dim=3, window=3)
    assert run_conv(layer, params, jnp.ones((1, 5, 2))).shape == (1, 3, 3)
    layer, params = make_conv(Conv2D, input_dim=2, output_dim=3)
    assert run_conv(layer, params, jnp.ones((1, 5, 4, 2))).shape == (1, 5, 4, 3)


@pytest.mark.parametrize("shape", [(1, 5, 3), (1, 5, 5, 2)])
def test_mismatched_input_shape_is_rejected(shape):
    layer, _ = make_conv(Conv1D, input_dim=2, output_dim=3, window=3)
    with pytest.raises(ArgumentShapeError, match=r"conv: input_shape=.*1 spatial sizes, 2 channel"):
        layer.output_shape(input_shape=shape)


@pytest.mark.parametrize("name", ["input_dim", "output_dim"])
def test_indivisible_groups_are_rejected(name):
    dims = {"input_dim": 6, "output_dim": 6, name: 4}
    with pytest.raises(LayerConfigError, match=f"conv: {name}=4 is not divisible"):
        make_conv(Conv1D, window=3, num_input_dim_groups=3, **dims)


PADDINGS = jnp.array([[0, 0, 0, 0, 1, 1, 1], [0] * 7])


def make_over_time(cls, **kwargs):
    layer = cls.default_config().set(name="conv", **kwargs).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run_over_time(layer, params, *inputs, **kwargs):
    if kwargs:
        name = "inputs" if isinstance(layer, StackOverTime) else "x"
        inputs = {name: inputs[0], **kwargs}
    return jax.jit(lambda *args: F(layer, None, *args, is_training=True)[0])(params, inputs)


@pytest.mark.parametrize("padding", ["SAME", "CAUSAL", ((2, 2),)])
def test_padding_does_not_change_a_sequence(padding):
    options = {"input_dim": 2, "output_dim": 3, "window": 3, "strides": 2, "padding": padding}
    layer, params = make_over_time(Conv1DWithPadding, **options)
    x = array(2, 7, 2).at[0, 4:].set(jnp.nan)
    y, out_paddings = run_over_time(layer, params, x, paddings=PADDINGS)
    length = int((out_paddings[0] == 0).sum())
    alone, _ = make_over_time(Conv1D, **options)
    np.testing.assert_allclose(
        y[0, :length], run_over_time(alone, params, x[:1, :4])[0, :length], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        y[1],
        run_over_time(alone, params, x[1:])[0] * (out_paddings[1] == 0)[:, None],
        rtol=1e-4,
        atol=1e-5,
    )
    assert (y[0, length:] == 0).all()


def test_paddings_of_outputs():
    def out(**kwargs):
        layer, _ = make_over_time(Conv1DWithPadding, input_dim=1, output_dim=1, window=3, **kwargs)
        return layer.conv_paddings(PADDINGS)[0].tolist()

    assert out(padding="SAME") == [0, 0, 0, 0, 1, 1, 1]
    assert out(padding="VALID") == [0, 0, 0, 0, 1]
    assert out(padding="VALID", anchor=2) == [0, 0, 1, 1, 1]
    assert out(padding="SAME", strides=2) == [0, 0, 1, 1]
    assert out(padding="CAUSAL", dilation=2) == [0, 0, 0, 0, 1, 1, 1]


def test_first_axis_is_time():
    layer, params = make_over_time(
        Conv2DWith1DPadding,
        input_dim=2,
        output_dim=3,
        window=(3, 5),
        strides=(2, 1),
        padding=((1, 1), (0, 0)),
    )
    x = array(2, 7, 6, 2)
    y, out_paddings = run_over_time(layer, params, x, paddings=PADDINGS)
    assert y.shape == (2, 4, 2, 3)
    assert tuple(layer.output_shape(input_shape=x.shape)) == y.shape
    assert out_paddings.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    noisy, _ = run_over_time(layer, params, x.at[0, 4:].set(jnp.nan), paddings=PADDINGS)
    np.testing.assert_array_equal(y, noisy)
    assert (y[0, 2:] == 0).all()


def test_stacking_keeps_padding_at_zero():
    layer, params = make_over_time(StackOverTime, stride=2)
    x = jnp.ones((2, 7, 3)).at[0, 4:].set(jnp.nan)
    y, out_paddings = run_over_time(layer, params, x, paddings=PADDINGS)
    assert out_paddings.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert (y[0, 2] == 0).all() and (y[0, :2] == 1).all()
    assert layer.output_shape(input_shape=(None, None, 3)) == [None, None, 6]


def make_transpose(cls, **kwargs):
    cfg = cls.default_config().set(name="conv", input_dim=4, output_dim=6, **kwargs)
    layer = cfg.instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run_transpose(layer, params, *args, **kwargs):
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
    layer, params = make_transpose(cls, window=window, strides=strides, padding=padding)
    n = 1 if cls is Conv1DTranspose else len(window)
    x = array(2, *(5, 4, 3)[:n], 4)
    y = run_transpose(layer, params, x)
    if cls is Conv1DTranspose:
        y, paddings = y
        assert paddings is None
    axes = "DHW"[:n]
    strides = (strides,) if n == 1 else strides
    layout = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    expected = lax.conv_transpose(x, params["weight"], strides, padding, dimension_numbers=layout)
    np.testing.assert_allclose(y, np.add(expected, params["bias"]), rtol=1e-4, atol=1e-5)
    assert tuple(layer.output_shape(input_shape=x.shape)) == y.shape


@pytest.mark.parametrize("cls", [Conv1DTranspose, Conv2DTransposeWith1DPadding])
@pytest.mark.parametrize("padding", ["SAME", "CAUSAL"])
def test_padding_is_ignored_and_zero_in_the_output(cls, padding):
    n = 1 if cls is Conv1DTranspose else 2
    options = {"window": 3, "strides": 2} if n == 1 else {"window": (3, 3), "strides": (2, 1)}
    layer, params = make_transpose(cls, padding=padding, **options)
    paddings = jnp.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    x = array(2, 5, *[3] * (n - 1), 4)
    y, out_paddings = run_transpose(layer, params, x, paddings=paddings)
    np.testing.assert_array_equal(out_paddings, jnp.repeat(paddings, 2, axis=1))
    assert (y[0, 6:] == 0).all()
    noisy, _ = run_transpose(layer, params, x.at[0, 3:].set(jnp.nan), paddings=paddings)
    np.testing.assert_array_equal(y, noisy)


def test_anchor_moves_the_paddings():
    layer, _ = make_transpose(Conv1DTranspose, window=3, strides=1, padding="SAME", anchor=2)
    paddings = jnp.array([[0, 0, 0, 1, 1]])
    assert layer.conv_paddings(paddings).tolist() == [[0, 0, 1, 1, 1]]


KEY = jax.random.key(0)
X = draw(1, 2, 5, 6, 4)


def make_pooling(cls, **kwargs):
    layer = cls.default_config().set(name="pool", **kwargs).instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def run_pooling(layer, params, x):
    return F(layer, None, params, (x,), is_training=True)[0]


@pytest.mark.parametrize("window, strides", [((2, 2), (1, 1)), ((3, 2), (2, 2))])
def test_max_pool_takes_the_largest_of_each_window(window, strides):
    layer, params = make_pooling(MaxPool2D, window=window, strides=strides)
    assert params == {}
    y = run_pooling(layer, params, X)
    view = np.lib.stride_tricks.sliding_window_view(np.array(X), window, axis=(1, 2))
    np.testing.assert_array_equal(y, view[:, :: strides[0], :: strides[1]].max((-1, -2)))
    assert tuple(layer.output_shape(input_shape=X.shape)) == y.shape
    assert layer.output_shape(input_shape=(None, None, 6, 4))[:2] == [None, None]


@pytest.mark.parametrize("size", [{"se_ratio": 0.5}, {"num_reduced_filters": 2}])
def test_squeeze_excitation_gates_by_channel_mean(size):
    layer, params = make_pooling(SqueezeExcitation, input_dim=4, **size)
    for specs in layer.create_parameter_specs_recursively().values():
        assert specs["weight"].mesh_axes == PartitionSpec(None, None, None, "model")
    assert jax.tree.map(jnp.shape, params) == {
        "reduce": {"weight": (1, 1, 4, 2), "bias": (2,)},
        "expand": {"weight": (1, 1, 2, 4), "bias": (4,)},
    }
    reduce, expand = params["reduce"]["weight"][0, 0], params["expand"]["weight"][0, 0]
    gate = jax.nn.sigmoid(jax.nn.relu(X.mean((1, 2)) @ reduce) @ expand)
    np.testing.assert_allclose(run_pooling(layer, params, X), X * gate[:, None, None], rtol=1e-4)
    grads = jax.jit(jax.grad(lambda params: run_pooling(layer, params, X).sum()))(params)
    assert all(jnp.abs(g).sum() > 0 for g in jax.tree.leaves(grads))


def test_squeeze_excitation_without_reduced_dim_is_identity():
    layer, params = make_pooling(SqueezeExcitation, input_dim=4)
    assert params == {}
    np.testing.assert_array_equal(run_pooling(layer, params, X), X)


def test_squeeze_excitation_names_an_unknown_activation():
    with pytest.raises(UnknownActivationError, match=r"'nn\.relo'"):
        make_pooling(SqueezeExcitation, input_dim=4, se_ratio=0.5, activation="nn.relo")
