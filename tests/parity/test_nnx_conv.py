"""Convolutions of NNX: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity import objects
from tests.parity.objects import (
    COMMON,
    applied,
    named,
    normal,
    same,
    same_error,
    same_signature,
    tolerance,
    twice,
)

X = objects.X[0, :2]
MASK = jnp.arange(2 * 5 * 4).reshape(2, 5, 4) % 3
# A convolution's sum has no narrower dtype than its input.
COMMON = [k for k in COMMON if "preferred_element_type" not in k]
COMMON += [{"dtype": "bfloat16", "preferred_element_type": "float32", "use_bias": False}]


@named(
    [
        *COMMON,
        {"use_bias": False},
        {"mask": MASK},
        {"conv_general_dilated": twice(jax.lax.conv_general_dilated)},
    ]
)
def test_conv(kwargs):
    same(applied("Conv", 5, 4, 2, x=X, **kwargs), tolerance(kwargs))


@named([*COMMON, {"use_bias": False}, {"mask": MASK}, {"transpose_kernel": True}])
def test_conv_transpose(kwargs):
    same(applied("ConvTranspose", 5, 4, 2, x=X, **kwargs), tolerance(kwargs))


@pytest.mark.parametrize(
    ("size", "kwargs"),
    [
        (3, {"strides": 2}),
        ([3], {"strides": [2], "padding": "VALID"}),
        ((3,), {"strides": None, "input_dilation": None, "kernel_dilation": None}),
        (3, {"padding": "CAUSAL", "kernel_dilation": 2}),
        (3, {"padding": "CIRCULAR", "strides": 2}),
        (2, {"padding": "REFLECT"}),
        ((2, 2), {"padding": "SAME_LOWER", "strides": (2, 1)}),
        ((2, 3), {"padding": 1}),
        ((2, 3), {"padding": ((1, 0), (0, 2))}),
        ((2, 3), {"padding": [1, (0, 2)], "kernel_dilation": (1, 2)}),
        (2, {"padding": 0, "input_dilation": 2}),
        ((1, 2), {"feature_group_count": 5}),
    ],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_windows_of_conv(size, kwargs):
    same(applied("Conv", 5, 10, size, x=X, **kwargs))


@pytest.mark.parametrize(
    ("size", "kwargs"),
    [
        (3, {"strides": 2}),
        ([3], {"strides": [2], "padding": "VALID", "transpose_kernel": True}),
        (3, {"padding": "CIRCULAR", "strides": 2}),
        (4, {"padding": "CIRCULAR", "strides": 2, "transpose_kernel": True}),
        ((2, 3), {"padding": 1, "kernel_dilation": (1, 2)}),
        ((2, 3), {"padding": [1, (0, 2)], "strides": (2, 1)}),
    ],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_windows_of_conv_transpose(size, kwargs):
    same(applied("ConvTranspose", 5, 3, size, x=X, **kwargs))


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    "x",
    [X[0], X[None], X.astype(jnp.bfloat16), jnp.arange(15).reshape(1, 3, 5), np.asarray(X)],
    ids=["no batch axis", "two", "half", "integers", "numpy"],
)
def test_other_inputs(name, x):
    same(applied(name, 5, 3, 2, x=x), 2e-2)


def test_layer_keeps_initializer_metadata_and_mask():
    def program(nnx):
        init = nnx.with_metadata(normal, tag="made")
        options = {"kernel_init": init, "kernel_metadata": {"tag": "given", "more": 1}}
        layer = nnx.Conv(5, 4, 2, mask=MASK, rngs=nnx.Rngs(0), **options)
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(layer))]
        return layer(X), [layer, nnx.ConvTranspose(5, 4, 2, rngs=nnx.Rngs(0), **options), paths]

    same(program)


FAILURES = {
    "channels": lambda nnx: nnx.Conv(3, 2, 2, rngs=nnx.Rngs(0))(X),
    "axes": lambda nnx: nnx.Conv(5, 2, 2, rngs=nnx.Rngs(0))(X[0, 0]),
    "groups": lambda nnx: nnx.Conv(4, 3, 2, feature_group_count=2, rngs=nnx.Rngs(0))(X[..., :4]),
    "a mask": lambda nnx: nnx.Conv(5, 2, 2, mask=MASK, rngs=nnx.Rngs(0))(X),
    "causal in two axes": lambda nnx: nnx.Conv(5, 2, (2, 2), padding="CAUSAL", rngs=nnx.Rngs(0))(X),
    "strides": lambda nnx: nnx.Conv(5, 2, (2, 2), strides=(1,), rngs=nnx.Rngs(0))(X),
    "channels to transpose": lambda nnx: nnx.ConvTranspose(3, 2, 2, rngs=nnx.Rngs(0))(X),
    "a mask to transpose": lambda nnx: nnx.ConvTranspose(5, 2, 2, mask=MASK, rngs=nnx.Rngs(0))(X),
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    same_error(program)


@pytest.mark.parametrize("method", ["__init__", "__call__"])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_signatures(name, method):
    same_signature(name, method)
