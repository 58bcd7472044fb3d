import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import window_pooling
from weft.linen.conv import Conv, ConvLocal, ConvTranspose
from weft.linen.layers import Sequential

KEY = quick_key(0)
X = draw(0, 2, 6, 3)


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


def test_errors_of_conv_transpose_name_the_module():
    outermost = r"ConvTranspose \(the outermost module\)"
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has kernel_size=\(3, 3, 3\)"):
        ConvTranspose(3, (3, 3, 3)).init(KEY, X)
    with pytest.raises(ArgumentShapeError, match=rf"{outermost} has a mask of shape \(2,\)"):
        ConvTranspose(3, 3, mask=jnp.ones(2)).init(KEY, X)
    with pytest.raises(ArgumentValueError, match="'CAUSAL' is neither one of VALID, SAME"):
        ConvTranspose(3, 3, padding="CAUSAL").init(KEY, X)


IMAGE = jnp.arange(1.0, 7.0).reshape(1, 6, 1)


def test_too_many_window_axes():
    with pytest.raises(ArgumentShapeError, match=r"window_shape=\(2, 2, 2\) is for 3 spatial axes"):
        window_pooling.pool(IMAGE, 0.0, jax.lax.add, (2, 2, 2), None, "VALID")


def test_unknown_padding():
    with pytest.raises(ArgumentValueError, match="padding='HALF' is neither one of SAME, VALID"):
        window_pooling.min_pool(IMAGE, (2,), padding="HALF")
