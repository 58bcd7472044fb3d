import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft.errors import ArgumentShapeError
from weft.functional import (
    conv,
    conv_explicit_padding,
    conv_local,
    conv_output_shape,
    conv_transpose,
)

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def reference(x, w, strides, pads, dilation, groups=1):
    """Returns a convolution as sums over positions of the window."""
    n = x.ndim - 2
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    window, cin, cout = w.shape[:n], w.shape[-2], w.shape[-1]
    out = conv_output_shape(
        x.shape[1:-1], window=window, strides=strides, padding="VALID", dilation=dilation
    )
    y = np.zeros((x.shape[0], *out, cout), np.float64)
    for offset in itertools.product(*map(range, window)):
        view = x[
            (
                slice(None),
                *[
                    slice(o * d, o * d + (size - 1) * s + 1, s)
                    for o, d, s, size in zip(offset, dilation, strides, out, strict=True)
                ],
            )
        ]
        for g in range(groups):
            outputs = slice(g * cout // groups, (g + 1) * cout // groups)
            y[..., outputs] += view[..., g * cin : (g + 1) * cin] @ w[offset][:, outputs]
    return y


@pytest.mark.parametrize("padding", ["SAME", "VALID", "CAUSAL", "explicit"])
@pytest.mark.parametrize(
    "spatial, window, strides, dilation, groups",
    [
        ((9,), (3,), (2,), (1,), 1),
        ((9,), (3,), (1,), (2,), 2),
        ((6, 7), (2, 3), (1, 2), (2, 1), 1),
        ((4, 5, 3), (2, 2, 2), (1, 1, 2), (1, 2, 1), 2),
    ],
)
def test_conv_sums_over_its_window(spatial, window, strides, dilation, groups, padding):
    x, w, b = array(2, *spatial, 4), array(*window, 4 // groups, 6), array(6)
    padding = [(1, 2)] * len(window) if padding == "explicit" else padding
    y = conv(
        jnp.array(x),
        jnp.array(w),
        jnp.array(b),
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )
    pads = conv_explicit_padding(window=window, strides=strides, padding=padding, dilation=dilation)
    expected = reference(x, w, strides, pads, dilation, groups) + b
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_conv_transpose_agrees_with_lax(padding, transpose_kernel):
    x = jnp.array(array(2, 5, 4, 3))
    w = jnp.array(array(3, 2, 4, 3) if transpose_kernel else array(3, 2, 3, 4))
    b = jnp.array(array(4))
    options = {"strides": (2, 3), "padding": padding, "transpose_kernel": transpose_kernel}
    expected = lax.conv_transpose(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
    expected += b[None, None, None]
    np.testing.assert_allclose(conv_transpose(x, w, b, **options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_transpose_kernel_gives_the_gradient_of_conv(groups):
    w, g = jnp.array(array(3, 4 // groups, 6)), jnp.array(array(1, 4, 6))
    x = jnp.zeros((1, 9, 4))
    _, vjp = jax.vjp(lambda x: conv(x, w, strides=2, groups=groups), x)
    ours = conv_transpose(g, w, strides=2, padding="VALID", groups=groups, transpose_kernel=True)
    np.testing.assert_allclose(ours, vjp(g)[0], rtol=1e-4, atol=1e-5)


def test_causal_conv_transpose_is_causal():
    x, w = jnp.array(array(1, 4, 1)), jnp.array(array(3, 1, 1))

    def up(x):
        return conv_transpose(x, w, strides=2, padding="CAUSAL")[0, :, 0]

    touched = np.array(jax.jacobian(up)(x)[:, 0, :, 0] != 0)
    assert touched.shape == (8, 4)
    for out, inp in zip(*np.nonzero(touched), strict=True):
        assert inp <= out // 2


def test_shape_mismatch_is_named():
    with pytest.raises(ArgumentShapeError, match=r"3 input channels for each of 2 group.* 4 chann"):
        conv(jnp.ones((1, 5, 4)), jnp.ones((3, 3, 2)), groups=2)
    with pytest.raises(ArgumentShapeError, match=r"takes 3 input channels for .* x has 4"):
        conv_transpose(jnp.ones((1, 5, 4)), jnp.ones((3, 3, 2)))
    with pytest.raises(ArgumentShapeError, match=r"5 output channels, which cannot be shared out"):
        conv(jnp.ones((1, 5, 4)), jnp.ones((3, 2, 5)), groups=2)
    with pytest.raises(ArgumentShapeError, match=r"shapes are \(5, 4\) and \(3, 4, 2\)"):
        conv(jnp.ones((5, 4)), jnp.ones((3, 4, 2)))


def test_custom_conv_general_dilated():
    calls = []

    def mine(*args, **kwargs):
        calls.append((args[2:], sorted(kwargs)))
        return 2 * jax.lax.conv_general_dilated(*args, **kwargs)

    x, w = array(1, 6, 3), array(2, 3, 4)
    y = conv(x, w, strides=2, conv_general_dilated=mine)
    np.testing.assert_allclose(y, 2 * conv(x, w, strides=2), rtol=1e-5, atol=1e-6)
    names = ["dimension_numbers", "feature_group_count", "lhs_dilation", "precision"]
    assert calls == [(((2,), ((0, 0),)), [*names, "rhs_dilation"])]


def test_weight_for_each_position():
    x, w, b = array(2, 6, 3), array(4, 9, 5), array(4, 5)
    y = conv_local(x, w, b, window=(3,), padding=((0, 0),))
    windows = np.stack([x[:, i : i + 3] for i in range(4)], axis=1)  # batch, out, window, input
    expected = np.einsum("bowi,oiwf->bof", windows, w.reshape(4, 3, 3, 5)) + b
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_local_weight_shape():
    with pytest.raises(ArgumentShapeError, match=r"must be \(\*out_spatial, 9, output\)"):
        conv_local(array(2, 6, 3), array(4, 8, 5), window=(3,), padding=((0, 0),))


def test_convolution_without_spatial_axes_is_a_product():
    x, w = array(2, 3), array(3, 4)
    np.testing.assert_allclose(conv(x, w, padding=()), x @ w, rtol=1e-5, atol=1e-6)


def test_result_has_out_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 5, 2)), P("data"))
        y = conv(x, jnp.ones((3, 2, 6)), jnp.ones(6), out_sharding=P("data", None, "model"))
    assert y.sharding.spec == P("data", None, "model")
