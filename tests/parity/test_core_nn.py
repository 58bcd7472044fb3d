"""Layers as functions of a scope: the same programs on Flax and on Weft."""

import flax.core
import flax.core.nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.core
import weft.core.nn

KEY = jax.random.PRNGKey(0)
LIBRARIES = (flax.core, flax.core.nn), (weft.core, weft.core.nn)


def draw(i, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, i), shape)


X, IMAGE, TEXT = draw(1, 2, 3, 4), draw(2, 2, 6, 6, 3), draw(3, 2, 5, 8)
Q, K, V = draw(4, 2, 5, 4, 8), draw(5, 2, 5, 4, 8), draw(6, 2, 5, 4, 8)
GRID = draw(7, 2, 3, 4, 2, 5)
SEGMENTS = jnp.array([[1, 1, 2, 2, 3], [1] * 5])


def same(program, tolerance=1e-5):
    """Runs a program on both; it returns results, and variables that must be the same bits."""
    (of_flax, variables), (of_weft, ours) = (program(*libs) for libs in LIBRARIES)
    assert jax.tree.structure(variables) == jax.tree.structure(ours)
    for a, b in zip(jax.tree.leaves(variables), jax.tree.leaves(ours), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(of_flax) == jax.tree.structure(of_weft)
    for a, b in zip(jax.tree.leaves(of_flax), jax.tree.leaves(of_weft), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, float), np.asarray(b, float), rtol=tolerance, atol=tolerance
        )


def initialized(name, *args, **kwargs):
    def program(core, nn):
        return core.init(getattr(nn, name))({"params": KEY, "dropout": KEY}, *args, **kwargs)

    return program


def named(cases):
    return pytest.mark.parametrize("kwargs", cases, ids=lambda k: ",".join(k) or "default")


@named([{}, {"bias": False}, {"kernel_init": jax.nn.initializers.ones}])
def test_dense(kwargs):
    same(initialized("dense", X, 5, **kwargs))


def test_half_precision():
    same(initialized("dense", X, 5, dtype=jnp.bfloat16), 2e-2)
    for x in (X, X.astype(jnp.bfloat16)):
        same(initialized("layer_norm", x, dtype=jnp.bfloat16), 2e-2)
        same(initialized("batch_norm", x, dtype=jnp.bfloat16), 2e-2)
        same(initialized("group_norm", x, num_groups=2, dtype=jnp.bfloat16), 3e-2)
    same(initialized("dot_product_attention", Q, K, V, dtype=jnp.bfloat16), 2e-2)
    same(initialized("multi_head_dot_product_attention", TEXT, None, 2, dtype=jnp.bfloat16), 3e-2)


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
    same(lambda core, nn: (nn.max_pool(IMAGE, (3, 3), **kwargs), {}))
    same(lambda core, nn: (nn.avg_pool(IMAGE, (3, 3), **kwargs), {}))
    same(lambda core, nn: (nn.avg_pool(IMAGE, (3, 3), count_include_pad=False, **kwargs), {}))


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


@named(
    [
        {},
        {"dropout_rate": 0.5},
        {"dropout_rate": 0.5, "broadcast_dropout": False},
        {"bias": draw(8, 2, 4, 5, 5)},
    ]
)
def test_dot_product_attention(kwargs):
    same(initialized("dot_product_attention", Q, K, V, **kwargs))


@pytest.mark.parametrize("axis", [None, 1, (2,), (1, 2)])
@named([{}, {"dropout_rate": 0.5}, {"dropout_rate": 0.5, "broadcast_dropout": False}])
def test_attention_over_several_axes(axis, kwargs):
    same(initialized("dot_product_attention", GRID, GRID, GRID, axis=axis, **kwargs))


@named(
    [
        {},
        {"qkv_features": 16, "out_features": 3},
        {"causal_mask": True},
        {"bias": False},
        {"dropout_rate": 0.5},
        {"dropout_rate": 0.5, "deterministic": True},
        {"segmentation": SEGMENTS},
        {"segmentation": SEGMENTS[..., None], "causal_mask": True},
    ]
)
def test_multi_head_attention(kwargs):
    same(initialized("multi_head_dot_product_attention", TEXT, TEXT, 4, **kwargs))


def test_multi_head_attention_of_something_else():
    same(initialized("multi_head_dot_product_attention", TEXT, draw(9, 2, 7, 8), 4))
    same(initialized("multi_head_dot_product_attention", TEXT, None, 2))
    grid = draw(10, 2, 3, 4, 8)
    kwargs = {"attention_axis": (1,), "causal_mask": True}
    same(initialized("multi_head_dot_product_attention", grid, grid, 4, **kwargs))


@pytest.mark.parametrize("last_axis", [True, False])
def test_padding(last_axis):
    valid = jnp.array([[1, 1, 1, 0, 0], [1] * 5], bool)

    def program(core, nn):
        mask = valid[..., None] if last_axis else valid
        attend = core.init(nn.multi_head_dot_product_attention)
        y, variables = attend(KEY, TEXT, TEXT, 4, padding_mask=mask)
        # What differs: here a query that is padding gets the mean of all values, there the sum.
        return y[valid], variables

    same(program)
