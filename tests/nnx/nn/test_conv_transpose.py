"""Transposed convolutions of NNX: what they hold, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.conv import Conv
from weft.nnx.nn.conv_transpose import ConvTranspose

X = draw(0, 2, 6, 4)


def test_it_makes_more_positions():
    layer = ConvTranspose(4, 5, 3, strides=2, rngs=nnx.Rngs(0))
    assert layer(X).shape == (2, 12, 5)
    assert layer(X[0]).shape == (12, 5)
    assert (layer.kernel_size, layer.kernel_shape) == ((3,), (3, 4, 5))


def test_with_a_transposed_kernel_it_is_the_gradient_of_a_convolution():
    conv = Conv(5, 4, 3, strides=2, use_bias=False, padding="VALID", rngs=nnx.Rngs(0))
    options = {"use_bias": False, "padding": "VALID", "transpose_kernel": True}
    layer = ConvTranspose(4, 5, 3, strides=2, rngs=nnx.Rngs(1), **options)
    layer.kernel[...] = conv.kernel[...]
    _, pull = jax.vjp(conv, jnp.zeros((2, 13, 5)))
    np.testing.assert_allclose(layer(X), pull(X)[0], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_shown_with_the_layer():
    layer = ConvTranspose(4, 5, 3, transpose_kernel=True, rngs=nnx.Rngs(0))
    message = r"ConvTranspose with in_features=4 and kernel_size=\(3,\).*\(2, 6, 5\); expected \("
    with pytest.raises(ArgumentShapeError, match=message + r"\.\.\., \*spatial, 4\)"):
        layer(jnp.ones((2, 6, 5)))
    with pytest.raises(
        ArgumentShapeError, match=r"mask of shape \(3,\).*kernel's shape, \(3, 5, 4\)"
    ):
        ConvTranspose(4, 5, 3, transpose_kernel=True, mask=jnp.ones(3), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentValueError, match="padding='CAUSAL' is neither one of"):
        ConvTranspose(4, 5, 3, padding="CAUSAL", rngs=nnx.Rngs(0))(X)
