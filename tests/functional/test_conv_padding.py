import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import conv, conv_transpose, pad_conv, pad_conv_transpose

RNG = np.random.default_rng(0)
ONE = {"window": (4,), "strides": (1,), "dilation": (1,)}
TWO = {"window": (3, 3), "strides": (1, 2), "dilation": (1, 1)}


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("padding", "zeros"),
    [
        (1, ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        ([(1, 0), 2], ((1, 0), (2, 2))),
        (((0, 1), [2, 3]), ((0, 1), (2, 3))),
        ("VALID", ((0, 0), (0, 0))),
        ("same", ((1, 1), (0, 1))),
        ("SAME_LOWER", ((1, 1), (1, 0))),
    ],
)
def test_zeros_are_left_to_the_convolution(padding, zeros):
    x = array(2, 5, 6, 3)
    padded, pads = pad_conv(x, padding=padding, **TWO)
    assert padded is x
    assert pads == zeros
    if not isinstance(padding, str):
        assert pad_conv_transpose(x, padding=padding, **TWO)[1] == zeros


def test_an_input_goes_on_with_its_other_end_or_backwards():
    x = jnp.arange(5.0).reshape(1, 5, 1)
    around, zeros = pad_conv(x, padding="CIRCULAR", **ONE)
    assert (around.ravel().tolist(), zeros) == ([4, 0, 1, 2, 3, 4, 0, 1], ((0, 0),))
    backwards, _ = pad_conv(x, padding="REFLECT", **ONE)
    assert backwards.ravel().tolist() == [1, 0, 1, 2, 3, 4, 3, 2]


def test_any_batch_axes():
    for shape in ((5, 6, 3), (2, 1, 5, 6, 3)):
        padded, _ = pad_conv(array(*shape), padding="CIRCULAR", **TWO)
        assert padded.shape == (*shape[:-3], 7, 8, 3)


def test_a_causal_output_sees_no_later_position():
    x = array(1, 8, 1)
    padded, zeros = pad_conv(x, padding="CAUSAL", window=(3,), strides=(1,), dilation=(2,))
    weight = array(3, 1, 1)
    y = conv(padded, weight, padding=zeros, dilation=2)
    changed = conv(x.at[:, 5:].set(0.0), weight, padding=zeros, dilation=2)
    assert y.shape == x.shape
    np.testing.assert_array_equal(y[:, :5], changed[:, :5])


@pytest.mark.parametrize("span", range(1, 8))
@pytest.mark.parametrize("stride", range(1, 4))
def test_a_circular_convolution_moves_with_its_input(span, stride):
    x, weight = array(1, 4, 1), array(span, 1, 1)
    sizes = {"window": (span,), "strides": (stride,), "dilation": (1,)}

    def transposed(x):
        x, zeros = pad_conv_transpose(x, padding="CIRCULAR", **sizes)
        return conv_transpose(x, weight, strides=stride, padding=zeros)

    y = transposed(x)
    assert y.shape == (1, 4 * stride, 1)
    moved = jnp.roll(y, stride, axis=1)
    np.testing.assert_allclose(transposed(jnp.roll(x, 1, axis=1)), moved, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y.sum(), x.sum() * weight.sum(), rtol=1e-4, atol=1e-4)


def test_paddings_of_transposed_convolutions_by_name():
    x = array(2, 5, 6, 3)
    assert pad_conv_transpose(x, padding="valid", **TWO)[1] == ((2, 2), (2, 2))
    assert pad_conv_transpose(x, padding="SAME", **TWO)[1] == ((1, 1), (2, 1))
    assert pad_conv_transpose(array(1, 5, 1), padding="SAME_LOWER", **ONE)[1] == ((2, 1),)


@pytest.mark.parametrize("pad", [pad_conv, pad_conv_transpose])
@pytest.mark.parametrize("padding", ["HALF", (1,), ((1, 2),), ((1, 2, 3), 1), None, 1.5])
def test_an_unknown_padding(pad, padding):
    with pytest.raises(ArgumentValueError, match=r"is neither one of VALID.* each of 2 spatial"):
        pad(array(1, 5, 6, 1), padding=padding, **TWO)


def test_paddings_that_a_transposed_convolution_has_not():
    for padding in ("CAUSAL", "REFLECT", "SAME_LOWER"):
        with pytest.raises(ArgumentValueError, match=f"'{padding}' is neither one of VALID"):
            pad_conv_transpose(array(1, 5, 6, 1), padding=padding, **TWO)


def test_causal_is_for_one_axis():
    with pytest.raises(ArgumentValueError, match=r"for one spatial axis, but the window is \(3, 3"):
        pad_conv(array(1, 5, 6, 1), padding="CAUSAL", **TWO)


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", "CAUSAL"])
def test_a_dilated_input_is_padded_in_numbers(padding):
    x = array(1, 5, 1)
    with pytest.raises(ArgumentValueError, match=r"input_dilation=\(2,\): give the padding as num"):
        pad_conv(x, padding=padding, input_dilation=(2,), **ONE)
    assert pad_conv(x, padding=1, input_dilation=(2,), **ONE)[1] == ((1, 1),)


def test_sizes_for_other_numbers_of_axes():
    with pytest.raises(ArgumentShapeError, match=r"window=\(4,\), strides=\(1, 1\)"):
        pad_conv(array(1, 5, 1), padding="SAME", **{**ONE, "strides": (1, 1)})
    with pytest.raises(ArgumentShapeError, match=r"its shape is \(5, 1\)"):
        pad_conv_transpose(array(5, 1), padding="SAME", **TWO)
