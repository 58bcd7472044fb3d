import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.conv import Conv
from weft.linen.conv_transpose import ConvTranspose

KEY = jax.random.key(0)
X = draw(0, 2, 6, 3)


def test_fields_may_be_given_by_position():
    layer = ConvTranspose(5, (3, 3), (2, 2), "VALID", (1, 2), False)
    assert (layer.strides, layer.kernel_dilation, layer.use_bias) == ((2, 2), (1, 2), False)


def test_each_position_becomes_as_many_as_the_stride():
    for padding in ("SAME", "CIRCULAR"):
        y, _ = ConvTranspose(5, 4, strides=3, padding=padding).init_with_output(KEY, X)
        assert y.shape == (2, 18, 5)


def test_with_a_transposed_kernel_it_is_the_gradient_of_a_convolution():
    down = Conv(4, 3, strides=2, padding="VALID", use_bias=False)
    x = jax.random.normal(KEY, (2, 7, 5))
    y, variables = down.init_with_output(KEY, x)
    (gradient,) = jax.vjp(lambda x: down.apply(variables, x), x)[1](y)
    up = ConvTranspose(5, 3, strides=2, padding="VALID", use_bias=False, transpose_kernel=True)
    np.testing.assert_allclose(up.apply(variables, y), gradient, rtol=1e-4, atol=1e-5)


def test_the_dtype_of_the_sum():
    layer = ConvTranspose(5, 3, dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    y, _ = layer.init_with_output(KEY, X)
    assert y.dtype == jnp.float32


def test_errors_name_the_module():
    outermost = r"ConvTranspose \(the outermost module\)"
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has kernel_size=\(3, 3, 3\)"):
        ConvTranspose(3, (3, 3, 3)).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has a mask of shape \(2,\)"):
        ConvTranspose(3, 3, mask=jnp.ones(2)).init(KEY, X)
    with pytest.raises(ArgumentValueError, match="'CAUSAL' is neither one of VALID, SAME"):
        ConvTranspose(3, 3, padding="CAUSAL").init(KEY, X)
