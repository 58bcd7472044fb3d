import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.conv_layers import Conv1D
from weft.hierarchy.conv_time import Conv1DWithPadding, Conv2DWith1DPadding, StackOverTime
from weft.hierarchy.module import functional as F

RNG = np.random.default_rng(0)
PADDINGS = jnp.array([[0, 0, 0, 0, 1, 1, 1], [0] * 7])


def array(*shape):
    return jnp.array(RNG.normal(size=shape).astype(np.float32))


def make(cls, **kwargs):
    layer = cls.default_config().set(name="conv", **kwargs).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    return layer, {name: array(*spec.shape) for name, spec in specs.items()}


def run(layer, params, *inputs, **kwargs):
    if kwargs:
        name = "inputs" if isinstance(layer, StackOverTime) else "x"
        inputs = {name: inputs[0], **kwargs}
    return jax.jit(lambda *args: F(layer, None, *args, is_training=True)[0])(params, inputs)


@pytest.mark.parametrize("padding", ["SAME", "CAUSAL", ((2, 2),)])
def test_a_padded_sequence_gives_what_it_gives_alone(padding):
    options = {"input_dim": 2, "output_dim": 3, "window": 3, "strides": 2, "padding": padding}
    layer, params = make(Conv1DWithPadding, **options)
    x = array(2, 7, 2).at[0, 4:].set(jnp.nan)
    y, out_paddings = run(layer, params, x, paddings=PADDINGS)
    length = int((out_paddings[0] == 0).sum())
    alone, _ = make(Conv1D, **options)
    np.testing.assert_allclose(
        y[0, :length], run(alone, params, x[:1, :4])[0, :length], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        y[1], run(alone, params, x[1:])[0] * (out_paddings[1] == 0)[:, None], rtol=1e-4, atol=1e-5
    )
    assert (y[0, length:] == 0).all()


def test_paddings_of_outputs():
    def out(**kwargs):
        layer, _ = make(Conv1DWithPadding, input_dim=1, output_dim=1, window=3, **kwargs)
        return layer.conv_paddings(PADDINGS)[0].tolist()

    assert out(padding="SAME") == [0, 0, 0, 0, 1, 1, 1]
    assert out(padding="VALID") == [0, 0, 0, 0, 1]
    assert out(padding="VALID", anchor=2) == [0, 0, 1, 1, 1]
    assert out(padding="SAME", strides=2) == [0, 0, 1, 1]
    assert out(padding="CAUSAL", dilation=2) == [0, 0, 0, 0, 1, 1, 1]


def test_of_two_axes_the_first_is_time():
    layer, params = make(
        Conv2DWith1DPadding,
        input_dim=2,
        output_dim=3,
        window=(3, 5),
        strides=(2, 1),
        padding=((1, 1), (0, 0)),
    )
    x = array(2, 7, 6, 2)
    y, out_paddings = run(layer, params, x, paddings=PADDINGS)
    assert y.shape == (2, 4, 2, 3)
    assert tuple(layer.output_shape(input_shape=x.shape)) == y.shape
    assert out_paddings.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    noisy, _ = run(layer, params, x.at[0, 4:].set(jnp.nan), paddings=PADDINGS)
    np.testing.assert_array_equal(y, noisy)
    assert (y[0, 2:] == 0).all()


@pytest.mark.parametrize(
    "padding, expected, paddings",
    [
        ("VALID", [[0, 1], [2, 3], [4, 5]], [0, 0, 0]),
        ("SAME", [[0, 1], [2, 3], [4, 5], [6, 0]], [0, 0, 0, 0]),
        ("CAUSAL", [[0, 1], [2, 3], [4, 5], [6, 0]], [0, 0, 0, 0]),
        ((1, 0), [[0, 0], [1, 2], [3, 4], [5, 6]], [0, 0, 0, 0]),
    ],
)
def test_stacking_joins_vectors(padding, expected, paddings):
    layer, params = make(StackOverTime, stride=2, padding=padding)
    x = jnp.broadcast_to(jnp.arange(7.0)[None, :, None], (2, 7, 1))
    y, out_paddings = run(layer, params, x, paddings=jnp.zeros((2, 7), int))
    assert y[0].tolist() == expected
    assert out_paddings[0].tolist() == paddings
    assert tuple(layer.output_shape(input_shape=(2, 7, 1))) == y.shape


def test_stacking_keeps_padding_at_zero():
    layer, params = make(StackOverTime, stride=2)
    x = jnp.ones((2, 7, 3)).at[0, 4:].set(jnp.nan)
    y, out_paddings = run(layer, params, x, paddings=PADDINGS)
    assert out_paddings.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert (y[0, 2] == 0).all() and (y[0, :2] == 1).all()
    assert layer.output_shape(input_shape=(None, None, 3)) == [None, None, 6]
