import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import (
    compute_conv_paddings,
    compute_conv_transpose_paddings,
    conv_dilate_window,
    conv_explicit_padding,
    conv_output_shape,
    conv_transpose,
    conv_transpose_explicit_padding,
    conv_transpose_output_shape,
    lax_conv_padding,
    pad_conv,
    pad_conv_transpose,
)

sizes = st.integers(1, 5)
names = st.sampled_from(["SAME", "VALID", "CAUSAL"])
explicit = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: (pair,))


def lax_length(length, window, strides, pads, input_dilation=1, dilation=1):
    """Returns the length that jax itself gives."""
    return lax.conv_general_shape_tuple(
        (1, 1, (length - 1) * input_dilation + 1),
        (1, 1, (window - 1) * dilation + 1),
        (strides,),
        list(pads),
        ("NCH", "OIH", "NCH"),
    )[-1]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 20), sizes, sizes, sizes, st.one_of(names, explicit))
def test_output_shape_matches_jax(length, window, stride, dilation, padding):
    arguments = {
        "window": (window,),
        "strides": (stride,),
        "padding": padding,
        "dilation": (dilation,),
    }
    pads = conv_explicit_padding(**arguments)
    (ours,) = conv_output_shape((length,), **arguments)
    assert ours == max(lax_length(length, window, stride, pads, dilation=dilation), 0)
    if padding in ("SAME", "CAUSAL"):
        assert ours == -(-length // stride)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 20), sizes, sizes, sizes, st.one_of(names, explicit))
def test_transposed_output_shape_matches_jax(length, window, stride, dilation, padding):
    arguments = {
        "window": (window,),
        "strides": (stride,),
        "padding": padding,
        "dilation": (dilation,),
    }
    pads = conv_transpose_explicit_padding(**arguments)
    (ours,) = conv_transpose_output_shape((length,), **arguments)
    assert ours == max(lax_length(length, window, 1, pads, stride, dilation), 0)
    if padding in ("SAME", "CAUSAL"):
        assert ours == length * stride


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), sizes, sizes, st.sampled_from(["SAME", "VALID"]))
def test_transposed_padding_agrees_with_lax_conv_transpose(length, window, stride, padding):
    y = lax.conv_transpose(jnp.zeros((1, length, 1)), jnp.zeros((window, 1, 1)), (stride,), padding)
    arguments = {"window": (window,), "strides": (stride,), "padding": padding}
    assert conv_transpose_output_shape((length,), **arguments) == y.shape[1:2]


def test_padding_by_name():
    def pad(padding, window=(5,), strides=(2,), dilation=None):
        return conv_explicit_padding(
            window=window, strides=strides, padding=padding, dilation=dilation
        )

    assert pad("VALID") == ((0, 0),)
    assert pad("SAME") == ((2, 2),)
    assert pad("SAME", window=(4,)) == ((1, 2),)
    assert pad("CAUSAL") == ((3, 1),)
    assert pad("CAUSAL", strides=(1,), dilation=(2,)) == ((8, 0),)
    assert pad("CAUSAL", window=(1,), strides=(3,)) == ((0, 0),)
    assert pad("CAUSAL", window=(3, 3), strides=(1, 1)) == ((2, 0), (1, 1))
    assert pad([[1, 2]]) == ((1, 2),)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), sizes, sizes, sizes, st.sampled_from(["SAME", "VALID", "SAME_LOWER"]))
def test_length_dependent_padding_matches_lax(length, window, stride, dilation, padding):
    span = (window - 1) * dilation + 1
    (expected,) = lax.padtype_to_pads((length,), (span,), (stride,), padding)
    arguments = {"window": (window,), "strides": (stride,), "dilation": (dilation,)}
    for name in (padding, padding.lower()):
        assert lax_conv_padding((length,), padding=name, **arguments) == (expected,)


def test_length_dependent_padding_is_rejected_by_name():
    with pytest.raises(ArgumentValueError, match="'CAUSAL' is neither one of SAME, VALID, SAME_LO"):
        lax_conv_padding((4,), window=(3,), strides=(1,), padding="CAUSAL")
    with pytest.raises(ArgumentValueError, match=r"padding=1 is neither .* axes, \(left, right\)"):
        lax_conv_padding((4,), window=(3,), strides=(1,), padding=1)
    with pytest.raises(ArgumentShapeError, match=r"in_shape=\(4, 4\), window=\(3,\)"):
        lax_conv_padding((4, 4), window=(3,), strides=(1,), padding="SAME")


def test_dilated_window():
    assert conv_dilate_window(window=(3, 1), dilation=(4, 4)) == (9, 1)
    assert conv_dilate_window(window=(3, 1), dilation=None) == (3, 1)


def test_unknown_sizes_stay_unknown():
    arguments = {"window": (3, 3), "strides": (2, 2), "padding": "SAME"}
    assert conv_output_shape((None, 5), **arguments) == (None, 3)
    assert conv_transpose_output_shape((None, 5), **arguments) == (None, 10)


@pytest.mark.parametrize("pads_of", [conv_explicit_padding, conv_transpose_explicit_padding])
def test_bad_padding_is_named(pads_of):
    with pytest.raises(ArgumentValueError, match=r"'FULL' is neither one of SAME, VALID, CAUSAL"):
        pads_of(window=(3,), strides=(1,), padding="FULL")
    with pytest.raises(ArgumentValueError, match=r"\(\(0, 1\),\) is neither .* of 2 spatial axes"):
        pads_of(window=(3, 3), strides=(1, 1), padding=((0, 1),))
    with pytest.raises(ArgumentValueError, match=r"\(1, 1\) is neither .* axes, \(left, right\)"):
        pads_of(window=(3, 3), strides=(1, 1), padding=(1, 1))


def test_mismatched_ranks_are_named():
    with pytest.raises(ArgumentShapeError, match=r"window=\(3, 3\), strides=\(1,\)"):
        conv_explicit_padding(window=(3, 3), strides=(1,), padding="SAME")
    with pytest.raises(ArgumentShapeError, match=r"in_shape=\(8,\), window=\(3, 3\)"):
        conv_output_shape((8,), window=(3, 3), strides=(1, 1), padding="SAME")


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 1), min_size=5, max_size=12), sizes, st.integers(1, 3), names, st.data()
)
def test_output_padding_follows_anchor(row, window, stride, padding, data):
    ((left, right),) = conv_explicit_padding(window=(window,), strides=(stride,), padding=padding)
    anchor = data.draw(st.none() | st.integers(left, window - 1))
    out = compute_conv_paddings(
        jnp.array([row]), window=window, stride=stride, conv_padding=padding, anchor=anchor
    )
    padded = [1] * left + row + [1] * right
    position = left if anchor is None else anchor
    starts = range(0, len(padded) - window + 1, stride)
    # An anchor at the default may stand beyond a window that is shorter than the padding.
    expected = [(padded + [1] * window)[start + position] for start in starts]
    assert out.tolist() == [expected]


def test_transposed_paddings_repeat_each_input():
    row = jnp.array([[0, 0, 1]])

    def out(**kwargs):
        return compute_conv_transpose_paddings(row, window=3, **kwargs).tolist()[0]

    assert out(stride=1, conv_padding="SAME") == [0, 0, 1]
    assert out(stride=2, conv_padding="SAME") == [0, 0, 0, 0, 1, 1]
    assert out(stride=2, conv_padding="CAUSAL") == [0, 0, 0, 0, 1, 1]
    assert out(stride=2, conv_padding="VALID") == [0, 0, 0, 0, 1, 1, 1]
    assert out(stride=1, conv_padding=((0, 0),), anchor=2) == [1]


@pytest.mark.parametrize("compute", [compute_conv_paddings, compute_conv_transpose_paddings])
def test_anchor_outside_the_window_is_rejected(compute):
    with pytest.raises(ArgumentValueError, match=r"anchor=3 must be in the range \[1, 3\)"):
        compute(jnp.zeros((1, 5)), window=3, stride=1, conv_padding="SAME", anchor=3)


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
def test_zero_padding_is_delegated(padding, zeros):
    x = array(2, 5, 6, 3)
    padded, pads = pad_conv(x, padding=padding, **TWO)
    assert padded is x
    assert pads == zeros
    if not isinstance(padding, str):
        assert pad_conv_transpose(x, padding=padding, **TWO)[1] == zeros


@pytest.mark.parametrize("span", range(1, 8))
@pytest.mark.parametrize("stride", range(1, 4))
def test_circular_convolution_is_equivariant(span, stride):
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
def test_unknown_padding(pad, padding):
    with pytest.raises(ArgumentValueError, match=r"is neither one of VALID.* each of 2 spatial"):
        pad(array(1, 5, 6, 1), padding=padding, **TWO)


def test_unsupported_transposed_paddings():
    for padding in ("CAUSAL", "REFLECT", "SAME_LOWER"):
        with pytest.raises(ArgumentValueError, match=f"'{padding}' is neither one of VALID"):
            pad_conv_transpose(array(1, 5, 6, 1), padding=padding, **TWO)


def test_causal_is_for_one_axis():
    with pytest.raises(ArgumentValueError, match=r"for one spatial axis, but the window is \(3, 3"):
        pad_conv(array(1, 5, 6, 1), padding="CAUSAL", **TWO)


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", "CAUSAL"])
def test_dilated_input_needs_explicit_pads(padding):
    x = array(1, 5, 1)
    with pytest.raises(ArgumentValueError, match=r"input_dilation=\(2,\): give the padding as num"):
        pad_conv(x, padding=padding, input_dilation=(2,), **ONE)
    assert pad_conv(x, padding=1, input_dilation=(2,), **ONE)[1] == ((1, 1),)


def test_mismatched_rank():
    with pytest.raises(ArgumentShapeError, match=r"window=\(4,\), strides=\(1, 1\)"):
        pad_conv(array(1, 5, 1), padding="SAME", **{**ONE, "strides": (1, 1)})
    with pytest.raises(ArgumentShapeError, match="they have not as many"):
        pad_conv(None, padding="SAME", **{**ONE, "strides": (1, 1)})
    with pytest.raises(ArgumentShapeError, match=r"its shape is \(5, 1\)"):
        pad_conv_transpose(array(5, 1), padding="SAME", **TWO)
