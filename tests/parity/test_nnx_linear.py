"""Linear maps of NNX: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from tests.parity.objects import (
    COMMON,
    X,
    applied,
    named,
    normal,
    same_compiled,
    same_error,
    same_signature,
    tolerance,
    twice,
)


def of_both(name, **metadata):
    """Returns a keyword that is made with the library at hand."""

    def program(nnx):
        rngs = nnx.Rngs(0)
        init = nnx.with_metadata(normal, tag="made", out=1, **metadata)
        layer = getattr(nnx, name)(
            5,
            (3, 2) if name == "LinearGeneral" else 3,
            kernel_init=init,
            bias_init=init,
            kernel_metadata={"tag": "given", "more": 2},
            bias_metadata={"more": 3},
            rngs=rngs,
        )
        return layer(X), [layer]

    return program


COUNTED = [*COMMON, {"dot_general": twice(jax.lax.dot_general)}]


@named([*COUNTED, {"use_bias": False}])
def test_linear(kwargs):
    same_compiled(applied("Linear", 5, 3, **kwargs), tolerance(kwargs))


@named([*COUNTED, {"use_bias": False}, {"dot_general_cls": lambda: twice(jax.lax.dot_general)}])
def test_linear_general(kwargs):
    layer = applied("LinearGeneral", (3, 5), (3, 2), axis=(1, -1), batch_axis={0: 2}, **kwargs)
    same_compiled(layer, tolerance(kwargs))


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_initializer_metadata_overrides_layer_metadata(name):
    same_compiled(of_both(name))


@pytest.mark.parametrize(
    "x",
    [X[0, 0, 0], X.astype(jnp.bfloat16), jnp.arange(10).reshape(2, 5), X[:0], [1.0] * 5],
    ids=["vector", "half", "integers", "empty", "list"],
)
def test_linear_inputs(x):
    same_compiled(applied("Linear", 5, 3, x=x), 2e-2)
    same_compiled(applied("Linear", 5, 3, dtype=jnp.bfloat16, use_bias=False, x=x), 2e-2)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((5, (3, 2)), {}),
        (([5], [3]), {"axis": [-1]}),
        (((4, 5), 3), {"axis": (-2, -1)}),
        (((4, 5), 3), {"axis": (-1, -2)}),
        (((2, 5), (3, 2)), {"axis": (0, 3)}),
        (((2, 3, 4, 5), 2), {"axis": (0, 1, 2, 3)}),
        ((5, 3), {"batch_axis": {0: 2, 1: 3}}),
        ((5, 3), {"batch_axis": {0: 2}, "use_bias": False}),
        ((4, 3), {"axis": -2, "batch_axis": {0: 2}}),
    ],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_linear_general_axes(args, kwargs):
    same_compiled(applied("LinearGeneral", *args, bias_init=normal, **kwargs))


def test_replaced_variables():
    def program(nnx):
        layer = nnx.Linear(5, 3, rngs=nnx.Rngs(quick_key(0)))
        layer.kernel, layer.bias = jnp.ones((5, 3)), jnp.ones(3)
        wider = nnx.Linear(4, 3, rngs=nnx.Rngs(quick_key(0)))
        wider.kernel = nnx.Param(jnp.ones((5, 3)))
        return (layer(X), wider(X)), []

    same_compiled(program)


FAILURES = {
    "one size for two axes": ("LinearGeneral", {"axis": (1, 2)}),
    "batch axes that are not first": ("LinearGeneral", {"batch_axis": {1: 3}}),
}


@pytest.mark.parametrize(("name", "kwargs"), FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(name, kwargs):
    same_error(lambda nnx: getattr(nnx, name)(5, 3, rngs=nnx.Rngs(0), **kwargs))


@pytest.mark.parametrize("method", ["__init__", "__call__"])
@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_signatures(name, method):
    same_signature(name, method)
