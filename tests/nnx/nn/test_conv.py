"""Convolutions of NNX: what they hold, and what they refuse.

Transposed convolutions of NNX: what they hold, and what they refuse.

Pooling of NNX: the functions of `weft.functional.window_pooling`, which are tested there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.conv import Conv, ConvTranspose

X = draw(0, 2, 6, 4)


def test_mask_is_state_and_zeroes_weights():
    mask = jnp.zeros((3, 4, 5)).at[1].set(1)
    layer = Conv(4, 5, 3, mask=mask, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(X), X @ layer.kernel[1], rtol=1e-5, atol=1e-6)
    assert nnx.to_flat_state(nnx.state(layer)).paths == (("bias",), ("kernel",), ("mask",))


def test_equal_layers_have_equal_graphdefs():
    options = {"strides": [2], "padding": [(1, 0)], "input_dilation": [1]}
    layers = [Conv(4, 5, [3], **options, rngs=nnx.Rngs(seed)) for seed in range(2)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    assert layers[0].padding == ((1, 0),)
    assert layers[0](X).shape == (2, 3, 5)


def test_result_has_out_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 6, 4)), P("data"))
        y = Conv(4, 6, 3, rngs=nnx.Rngs(0))(x, out_sharding=P("data", None, "model"))
    assert y.sharding.spec == P("data", None, "model")


@pytest.mark.parametrize("shape", [(2, 6, 3), (4,), (6, 0)])
def test_mismatched_input_is_shown(shape):
    layer = Conv(4, 5, (3,), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError) as caught:
        layer(jnp.ones(shape))
    assert str(caught.value) == (
        f"Conv with in_features=4 and kernel_size=(3,) was given an input of shape {shape}; "
        "expected (..., *spatial, 4) with 1 spatial axes."
    )


def test_wrong_mask_shape_is_shown():
    message = r"kernel_size=\(3,\) has a mask of shape \(3,\); expected the kernel's shape, \(3, 4,"
    with pytest.raises(ArgumentShapeError, match=message):
        Conv(4, 5, 3, mask=jnp.ones(3), rngs=nnx.Rngs(0))
    layer = Conv(4, 5, 3, rngs=nnx.Rngs(0))
    layer.mask = jnp.ones(3)
    with pytest.raises(ArgumentShapeError, match=message):
        layer(X)


def test_invalid_groups_and_paddings_are_rejected():
    with pytest.raises(ArgumentShapeError, match=r"feature_group_count=3.*in_features=4 and out_f"):
        Conv(4, 6, 3, feature_group_count=3, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentValueError, match="padding='FULL' is neither one of"):
        Conv(4, 6, 3, padding="FULL", rngs=nnx.Rngs(0))(X)


def test_shape_errors_name_the_layer():
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
