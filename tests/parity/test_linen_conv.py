"""Convolutions of Linen: the same programs on Flax and on Weft."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same, same_compiled, same_error

X = draw(1, 2, 6, 7, 4)
normal = jax.nn.initializers.normal(1.0)


def initialized(name, features, kernel_size, x=X, **kwargs):
    return lambda nn: getattr(nn, name)(features, kernel_size, **kwargs).init_with_output(KEY, x)


def in_half(*args, **kwargs):
    assert kwargs == {"dtype": None}
    return [None if x is None else jnp.asarray(x, jnp.bfloat16) for x in args]


def tolerance(kwargs):
    return 3e-2 if len(kwargs.keys() & {"dtype", "param_dtype", "promote_dtype"}) else 1e-4


COMMON = [
    {},
    {"strides": None, "padding": 1, "use_bias": False},
    {"strides": 2, "padding": (1, 2), "bias_init": normal},
    {"strides": (2, 1), "padding": ((1, 0), 2), "kernel_init": normal},
    {"padding": "VALID", "kernel_dilation": 2, "precision": "highest"},
    {"padding": "SAME_LOWER"},
    {"padding": "CIRCULAR"},
    {"padding": "CIRCULAR", "strides": (3, 1), "kernel_dilation": (2, 1)},
    {"kernel_dilation": (1, 2), "strides": (2, 2)},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16},
    {"promote_dtype": in_half},
]
CONV = [
    *COMMON,
    {"padding": "SAME_LOWER", "strides": (2, 3)},
    {"padding": "REFLECT", "strides": 2, "kernel_dilation": (1, 2)},
    {"input_dilation": None, "kernel_dilation": None, "padding": [(1, 0), (0, 1)]},
    {"input_dilation": (1, 3), "padding": (0, (2, 1)), "strides": 2},
]


@named(
    [
        *CONV,
        {"feature_group_count": 2},
        {"feature_group_count": 4},
        {"mask": jnp.arange(3 * 2 * 4 * 4).reshape(3, 2, 4, 4) % 2},
    ]
)
def test_conv(kwargs):
    same_compiled(initialized("Conv", 4, (3, 2), **kwargs), tolerance(kwargs))


@named([CONV[0], CONV[2], CONV[7], CONV[9], CONV[-2], CONV[-1]])
def test_conv_local(kwargs):
    same_compiled(initialized("ConvLocal", 3, (3, 2), **kwargs), tolerance(kwargs))


def test_conv_local_with_a_mask():
    mask = jnp.arange(4 * 6 * 24 * 3).reshape(4, 6, 24, 3) % 2
    same_compiled(initialized("ConvLocal", 3, (3, 2), padding="VALID", mask=mask))


@named(
    [
        *COMMON,
        {"transpose_kernel": True},
        {"transpose_kernel": True, "strides": (2, 1), "padding": "CIRCULAR"},
        {"padding": "CIRCULAR", "strides": (2, 3)},
        {"padding": "VALID", "strides": (4, 2)},
        {"mask": jnp.arange(3 * 2 * 4 * 5).reshape(3, 2, 4, 5) % 2},
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
    ]
)
def test_conv_transpose(kwargs):
    same_compiled(initialized("ConvTranspose", 5, (3, 2), **kwargs), tolerance(kwargs))


LAYERS = ["Conv", "ConvLocal", "ConvTranspose"]


@pytest.mark.parametrize(
    ("name", "kernel_size"),
    [("Conv", 3), ("ConvTranspose", (3,)), ("ConvLocal", [2]), ("Conv", (1, 2, 2)),
     ("ConvTranspose", (2, 1, 2))],
)  # fmt: skip
def test_spatial_ranks(name, kernel_size):
    same_compiled(initialized(name, 3, kernel_size, x=X[:, :3]), 1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_arrays_as_sizes(name):
    same_compiled(initialized(name, 3, np.array([2, 3]), strides=np.array([1, 2])), 1e-4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_batch_axes(name, padding):
    same_compiled(initialized(name, 3, (3,), x=X[0, 0], padding=padding), 1e-4)
    same_compiled(initialized(name, 3, (3,), x=X[None], padding=padding), 1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_input_dtypes(name):
    same_compiled(initialized(name, 3, (3,), x=(3 * X).astype(int)), 1e-4)
    same_compiled(initialized(name, 3, (3,), x=X.astype(jnp.bfloat16)), 1e-4)
    same_compiled(initialized(name, 3, (3,), x=X[:0]))


@named([{}, {"strides": 2, "kernel_dilation": 3}])
@pytest.mark.parametrize("name", ["Conv", "ConvLocal"])
def test_causal(name, kwargs):
    same_compiled(initialized(name, 3, (4,), padding="CAUSAL", **kwargs), 1e-4)


@pytest.mark.parametrize(
    ("name", "padding"),
    [("Conv", "CIRCULAR"), ("Conv", "REFLECT"), ("ConvTranspose", "CIRCULAR")],
)
def test_windows_longer_than_the_input(name, padding):
    same_compiled(initialized(name, 2, (17,), padding=padding), 1e-3)


def test_convolution_without_window():
    same_compiled(initialized("Conv", 3, ()))


@named([{"conv_general_dilated": True}, {"conv_general_dilated_cls": True}])
def test_custom_convolutions(kwargs):
    def program(nn):
        calls = []

        def convolve(*args, **kwargs):
            calls.append((args[2], sorted(kwargs.items())))
            return 2 * jax.lax.conv_general_dilated(*args, **kwargs)

        hook = convolve if "conv_general_dilated" in kwargs else lambda: convolve
        layer = nn.Conv(4, (3, 2), (2, 1), feature_group_count=2, **dict.fromkeys(kwargs, hook))
        y, variables = layer.init_with_output(KEY, X)
        return (y, str(calls)), variables

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_axis_metadata(name):
    def program(nn):
        names = (None, None, "in", "out")
        inits = {
            "kernel_init": nn.with_partitioning(normal, names),
            "bias_init": nn.with_partitioning(normal, names if name == "ConvLocal" else ("out",)),
        }
        return getattr(nn, name)(3, (2, 2), **inits).init_with_output(KEY, X)

    same_compiled(program, 1e-4)


@named([{"padding": (1,)}, {"padding": ((1, 2),)}, {"padding": 1.5}, {"mask": jnp.ones((3, 3))}])
@pytest.mark.parametrize("name", LAYERS)
def test_invalid_options(name, kwargs):
    same_error(initialized(name, 3, (3, 3), **kwargs))


@named(
    [
        {"padding": "CAUSAL"},
        {"input_dilation": 2},
        {"strides": (2,)},
        {"feature_group_count": 2},
    ]
)
def test_invalid_conv_options(kwargs):
    same_error(initialized("Conv", 3, (3, 3), **kwargs))


def test_wrong_parameter_shapes():
    params = {"params": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
    for name in LAYERS:
        same_error(lambda nn, name=name: getattr(nn, name)(3, (3, 3)).apply(params, X))


@pytest.mark.parametrize("padding", ["SAME", 1, (1, 2), [(0, 1), (1, 0)], [(0, 1), 1]])
def test_canonical_paddings(padding):
    ours, theirs = (
        importlib.import_module(f"{name}.linen.linear").canonicalize_padding(padding, 2)
        for name in ("weft", "flax")
    )
    assert ours == theirs
