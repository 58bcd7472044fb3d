"""Layers as functions of a scope: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.layers import KEY, initialized, named, same

X, IMAGE = draw(1, 2, 3, 4), draw(2, 2, 6, 6, 3)


@named([{}, {"bias": False}, {"kernel_init": jax.nn.initializers.ones}])
def test_dense(kwargs):
    same(initialized("dense", X, 5, **kwargs))


def test_one_operation_at_a_time():
    same(initialized("dense", X, 5), jit=lambda f: f)


# The norms of Flax add axes silently.
@pytest.mark.rank_promotion("allow")
def test_half_precision():
    same(initialized("dense", X, 5, dtype=jnp.bfloat16), 2e-2)
    for x in (X, X.astype(jnp.bfloat16)):
        same(initialized("layer_norm", x, dtype=jnp.bfloat16), 2e-2)
        same(initialized("batch_norm", x, dtype=jnp.bfloat16), 2e-2)
        same(initialized("group_norm", x, num_groups=2, dtype=jnp.bfloat16), 3e-2)


@pytest.mark.parametrize(
    ("features", "axis", "batch_dims"),
    [
        ((5, 6), (-1, 1), ()),
        (5, -1, ()),
        ((5,), (1, 2), ()),
        ((5, 6), -1, (0,)),
        (5, -1, (0, 1)),
        (5, -1, (1, 0)),
        (5, (1, -1), 0),
    ],
)
def test_dense_general(features, axis, batch_dims):
    same(initialized("dense_general", X, features, axis=axis, batch_dims=batch_dims))


@named(
    [
        {},
        {"strides": (2, 2)},
        {"padding": "VALID"},
        {"padding": ((1, 2), (0, 1))},
        {"kernel_dilation": (2, 2)},
        {"strides": (2, 2), "kernel_dilation": (2, 1)},
        {"input_dilation": (2, 1), "padding": ((1, 1), (1, 1))},
        {"feature_group_count": 3, "bias": False},
        {"padding": "SAME_LOWER", "strides": (1, 2)},
    ]
)
def test_conv(kwargs):
    same(initialized("conv", IMAGE, 6, (3, 3), **kwargs))


@pytest.mark.parametrize("kernel_size", [(3, 3), (2, 4)])
@named(
    [
        {},
        {"strides": (3, 2)},
        {"padding": "VALID", "strides": (2, 3)},
        {"kernel_dilation": (2, 2)},
        {"padding": ((1, 1), (1, 2)), "strides": (2, 2)},
        {"strides": (4, 4)},
    ]
)
def test_conv_transpose(kernel_size, kwargs):
    same(initialized("conv_transpose", IMAGE, 4, kernel_size, **kwargs))


@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
def test_convolutions_over_one_and_three_axes(name):
    same(initialized(name, X, 5, (2,), strides=(2,)))
    same(initialized(name, draw(11, 2, 3, 4, 3, 2), 3, (2, 1, 3)))


def test_embedding():
    def program(core, nn):
        table, variables = core.init(nn.embedding)(KEY, 7, 4)
        return (table.table, table.lookup(jnp.array([1, 2])), table.attend(X)), variables

    same(program)


@named(
    [
        {},
        {"axis": (0, 1)},
        {"axis": 1, "epsilon": 1e-2, "bias": False},
        {"momentum": 0.5, "scale": False},
        {"kind": "stats"},
        {"axis": (-1, 0)},
    ]
)
def test_batch_norm(kwargs):
    col = kwargs.get("kind", "batch_stats")

    def program(core, nn):
        y, variables = core.init(nn.batch_norm)(KEY, X, **kwargs)
        trained, changed = core.apply(nn.batch_norm, mutable=[col])(variables, 3 * X + 1, **kwargs)
        variables = {**variables, **changed}
        evaluated = core.apply(nn.batch_norm)(variables, X, use_running_average=True, **kwargs)
        return (y, trained, evaluated, changed), {}

    same(program)


def test_batch_norm_over_a_mapped_axis():
    def program(core, nn):
        _, variables = core.init(nn.batch_norm)(KEY, X[0])

        def f(x):
            return core.apply(nn.batch_norm, mutable=["batch_stats"])(variables, x, axis_name="i")

        return jax.vmap(f, axis_name="i")(X), {}

    same(program)


# The norms of Flax add axes silently.
@pytest.mark.rank_promotion("allow")
@named([{}, {"epsilon": 0.1, "bias": False}, {"scale": False}])
def test_layer_norm(kwargs):
    same(initialized("layer_norm", X, **kwargs))


@named([{"num_groups": 2}, {"num_groups": None, "group_size": 2}, {"num_groups": 4, "bias": False}])
def test_group_norm(kwargs):
    same(initialized("group_norm", X, **kwargs))


@named(
    [
        {},
        {"strides": (2, 2)},
        {"padding": "SAME"},
        {"padding": "SAME", "strides": (2, 2)},
        {"padding": ((1, 0), (0, 1))},
        {"padding": "SAME_LOWER", "strides": (2, 2)},
    ]
)
def test_pooling(kwargs):
    def program(core, nn):
        of_values = {"count_include_pad": False, **kwargs}
        pools = (nn.max_pool, kwargs), (nn.avg_pool, kwargs), (nn.avg_pool, of_values)
        return [pool(IMAGE, (3, 3), **options) for pool, options in pools], {}

    same(program)


@pytest.mark.parametrize("name", ["max_pool", "avg_pool"])
def test_pooling_of_any_number_of_batch_axes(name):
    for x in (IMAGE[0], IMAGE[None]):
        same(lambda core, nn, x=x: (getattr(nn, name)(x, (3, 3)), {}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_dtypes_of_pooling(dtype):
    x = (4 * X).astype(dtype)
    same(lambda core, nn: (nn.max_pool(x, (2,), padding="SAME"), {}))
    for count in (True, False):
        averaged = {"padding": "SAME", "count_include_pad": count}
        same(lambda core, nn, kwargs=averaged: (nn.avg_pool(x, (2,), **kwargs), {}), 2e-2)


@named([{"rate": 0.3}, {"rate": 1.0}, {"rate": 0.0}, {"rate": 0.5, "deterministic": True},
        {"rate": 0.5, "rng": KEY}])  # fmt: skip
def test_dropout(kwargs):
    same(initialized("dropout", X, **kwargs))
