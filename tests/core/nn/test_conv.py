import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.core import init
from weft.core.nn import conv, conv_transpose
from weft.errors import ArgumentShapeError, ArgumentValueError

KEY = jax.random.key(0)
X = draw(0, 2, 7, 3)


def test_same_padding_keeps_the_size_that_the_strides_leave():
    y, variables = init(conv)(KEY, X, 4, 3, strides=(2,))
    expected = jax.lax.conv_general_dilated(
        X, variables["params"]["kernel"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_the_input_may_be_dilated():
    y, variables = init(conv)(KEY, X, 4, (3,), input_dilation=(2,), padding=((1, 1),))
    expected = jax.lax.conv_general_dilated(
        X,
        variables["params"]["kernel"],
        (1,),
        ((1, 1),),
        lhs_dilation=(2,),
        dimension_numbers=("NHC", "HIO", "NHC"),
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_transposed_convolution_is_that_of_jax():
    y, variables = init(conv_transpose)(KEY, X, 4, 3, strides=(2,))
    kernel = variables["params"]["kernel"]
    expected = jax.lax.conv_transpose(
        X, kernel, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_one_number_speaks_for_all_axes():
    x = jnp.ones((1, 8, 8, 2))
    for layer in (conv, conv_transpose):
        by_number, _ = init(layer)(KEY, x, 4, (3, 3), strides=2, kernel_dilation=2)
        by_axis, _ = init(layer)(KEY, x, 4, (3, 3), strides=(2, 2), kernel_dilation=(2, 2))
        np.testing.assert_array_equal(by_number, by_axis)


def test_bad_arguments():
    with pytest.raises(ArgumentShapeError, match=r"for 2 spatial axes, so the input must have 4"):
        init(conv)(KEY, jnp.ones((2, 7, 3)), 4, (3, 3))
    with pytest.raises(ArgumentShapeError, match=r"Its shape is \(7, 3\)"):
        init(conv_transpose)(KEY, jnp.ones((7, 3)), 4, (3,))
    with pytest.raises(ArgumentValueError, match="give the padding as numbers"):
        init(conv)(KEY, X, 4, (3,), input_dilation=(2,))
    with pytest.raises(ArgumentShapeError, match=r"3 channels .* feature_group_count=2 groups"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=2)
    with pytest.raises(ArgumentShapeError, match="4 output channels, which cannot be shared out"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=3)
    with pytest.raises(ArgumentValueError, match="'FULL' is neither one of VALID, SAME"):
        init(conv)(KEY, X, 4, (3,), padding="FULL")
    with pytest.raises(ArgumentValueError, match=r"padding=\(1,\) is not one \(left, right\) pair"):
        init(conv_transpose)(KEY, X, 4, (3,), padding=(1,))
