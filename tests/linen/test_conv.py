import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import window_pooling
from weft.linen.conv import Conv, ConvLocal, ConvTranspose
from weft.linen.layers import Sequential

KEY = quick_key(0)
X = draw(0, 2, 6, 3)


def test_fields_may_be_positional():
    layer = Conv(5, (3, 3), 2, "VALID", 1, 2, 4, False)
    assert (layer.strides, layer.kernel_dilation, layer.feature_group_count) == (2, 2, 4)
    assert ConvLocal(5, 3, 2).strides == 2


def test_scalar_means_one_axis():
    y, variables = Conv(5, 3).init_with_output(KEY, X)
    assert y.shape == (2, 6, 5)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (3, 3, 5), "bias": (5,)}


def test_circular_convolution_is_equivariant():
    layer = Conv(5, 4, padding="CIRCULAR")
    y, variables = layer.init_with_output(KEY, X)
    moved = layer.apply(variables, jnp.roll(X, 2, axis=1))
    np.testing.assert_allclose(moved, jnp.roll(y, 2, axis=1), rtol=1e-5, atol=1e-5)


def test_masked_weights_are_zero():
    mask = jnp.ones((3, 3, 5)).at[0].set(0)  # the position before
    layer = Conv(5, 3, mask=mask)
    y, variables = layer.init_with_output(KEY, X)
    changed = layer.apply(variables, X.at[:, 0].set(9.0))
    np.testing.assert_array_equal(y[:, 1:], changed[:, 1:])
    assert variables["params"]["kernel"][0].any()


def test_local_convolution_has_weights_for_each_position():
    layer = ConvLocal(5, 3, strides=2, padding="VALID")
    y, variables = layer.init_with_output(KEY, X)
    kernel = variables["params"]["kernel"]
    assert (y.shape, kernel.shape) == ((2, 2, 5), (2, 9, 5))
    window = X[:, 2:5].swapaxes(1, 2).reshape(2, 9)
    np.testing.assert_allclose(y[:, 1], window @ kernel[1], rtol=1e-5, atol=1e-5)


def test_no_unneeded_operations():
    layer = Conv(5, 3, use_bias=False)
    jaxpr = jax.make_jaxpr(layer.apply)(layer.init(KEY, X), X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["conv_general_dilated"]


@pytest.mark.parametrize("cls", [Conv, ConvLocal])
def test_errors_name_the_module(cls):
    model = Sequential([jnp.tanh, cls(3, (3, 3, 3))])
    with pytest.raises(
        ArgumentShapeError, match=r"layers_1 has kernel_size=\(3, 3, 3\), for 3 spa"
    ):
        model.init(KEY, X)
    model = Sequential([jnp.tanh, cls(3, 3, mask=jnp.ones(2))])
    with pytest.raises(ArgumentShapeError, match=r"layers_1 has a mask of shape \(2,\); expected"):
        model.init(KEY, X)


@pytest.mark.parametrize(("features", "groups"), [(4, 2), (4, 3)])
def test_indivisible_groups(features, groups):
    layer = Conv(features, 3, feature_group_count=groups)
    with pytest.raises(ArgumentShapeError, match=rf"feature_group_count={groups}; .* 3 channels"):
        layer.init(KEY, X)


@pytest.mark.parametrize(
    "kwargs",
    [{"feature_group_count": 3}, {"conv_general_dilated": print},
     {"conv_general_dilated_cls": print}],
)  # fmt: skip
def test_unsupported_local_conv_options(kwargs):
    (name,) = kwargs
    with pytest.raises(ArgumentValueError, match=rf"has {name}=.*; expected .*: only Conv can"):
        ConvLocal(3, 3, **kwargs).init(KEY, X)


def test_dilated_input_needs_explicit_pads():
    with pytest.raises(ArgumentValueError, match=r"input_dilation=\(2,\): give the padding as num"):
        Conv(3, 3, input_dilation=2).init(KEY, X)


def test_conv_transpose_fields_may_be_positional():
    layer = ConvTranspose(5, (3, 3), (2, 2), "VALID", (1, 2), False)
    assert (layer.strides, layer.kernel_dilation, layer.use_bias) == ((2, 2), (1, 2), False)


def test_output_length_is_multiplied_by_stride():
    for padding in ("SAME", "CIRCULAR"):
        y, _ = ConvTranspose(5, 4, strides=3, padding=padding).init_with_output(KEY, X)
        assert y.shape == (2, 18, 5)


def test_transpose_kernel_gives_the_gradient_of_conv():
    down = Conv(4, 3, strides=2, padding="VALID", use_bias=False)
    x = jax.random.normal(KEY, (2, 7, 5))
    y, variables = down.init_with_output(KEY, x)
    (gradient,) = jax.vjp(lambda x: down.apply(variables, x), x)[1](y)
    up = ConvTranspose(5, 3, strides=2, padding="VALID", use_bias=False, transpose_kernel=True)
    np.testing.assert_allclose(up.apply(variables, y), gradient, rtol=1e-4, atol=1e-5)


def test_dtype_of_the_sum():
    layer = ConvTranspose(5, 3, dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    y, _ = layer.init_with_output(KEY, X)
    assert y.dtype == jnp.float32


def test_errors_of_conv_transpose_name_the_module():
    outermost = r"ConvTranspose \(the outermost module\)"
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has kernel_size=\(3, 3, 3\)"):
        ConvTranspose(3, (3, 3, 3)).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has a mask of shape \(2,\)"):
        ConvTranspose(3, 3, mask=jnp.ones(2)).init(KEY, X)
    with pytest.raises(ArgumentValueError, match="'CAUSAL' is neither one of VALID, SAME"):
        ConvTranspose(3, 3, padding="CAUSAL").init(KEY, X)


IMAGE = jnp.arange(1.0, 7.0).reshape(1, 6, 1)


def flat(y):
    return y.ravel().tolist()


def test_pooling_values():
    assert flat(window_pooling.max_pool(IMAGE, (2,), (2,))) == [2, 4, 6]
    assert flat(window_pooling.min_pool(IMAGE, (2,), (2,))) == [1, 3, 5]
    assert flat(window_pooling.avg_pool(IMAGE, (3,), (3,))) == [2, 5]
    assert flat(window_pooling.pool(IMAGE, 1.0, jax.lax.mul, (3,), (3,), "VALID")) == [6, 120]


def test_padding_is_ignored():
    assert flat(window_pooling.max_pool(-IMAGE, (3,), (3,), ((1, 2),))) == [-1, -3, -6]
    assert flat(window_pooling.min_pool(IMAGE, (3,), (3,), ((1, 2),))) == [1, 3, 6]


def test_too_many_window_axes():
    with pytest.raises(ArgumentShapeError, match=r"window_shape=\(2, 2, 2\) is for 3 spatial axes"):
        window_pooling.pool(IMAGE, 0.0, jax.lax.add, (2, 2, 2), None, "VALID")


def test_unknown_padding():
    with pytest.raises(ArgumentValueError, match="padding='HALF' is neither one of SAME, VALID"):
        window_pooling.min_pool(IMAGE, (2,), padding="HALF")
