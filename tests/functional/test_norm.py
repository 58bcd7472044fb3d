"""

How large the programs of layers are: equations when traced, operations of StableHLO.

They do not depend on the machine. The bounds are a tenth above what was counted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.frame.counting import equations, operations
from tests.compiled import (
    batch_norm,
    group_norm,
    layer_norm,
    moments,
    rms_norm,
)
from weft import functional
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import number_of_groups
from weft.functional.norm import (
    group_norm_axes,
    instance_norm_axes,
    spectral_norm,
    weight_norm,
)

RNG = np.random.default_rng(0)
EPS = 1e-6


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def close(ours, expected, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(ours, expected, rtol=rtol, atol=atol)


def standardized(x, axis):
    x = x.astype(np.float64)
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + EPS)


@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize("axis", [None, -2, (2, -1)])
def test_group_norm(subtract_mean, axis):
    x, scale, bias = array(2, 3, 4, 6) + 1, array(6), array(6)
    y = group_norm(
        jnp.array(x),
        jnp.array(scale),
        jnp.array(bias),
        num_groups=2,
        axis=axis,
        subtract_mean=subtract_mean,
    )
    grouped = x.reshape(2, 3, 4, 2, 3)
    axes = (1, 2, 4) if axis is None else (2, 4)
    if subtract_mean:
        expected = standardized(grouped, axes)
    else:
        expected = grouped / np.sqrt((grouped**2).mean(axes, keepdims=True) + EPS)
    close(y, expected.reshape(x.shape) * scale + bias)


@pytest.mark.parametrize("subtract_mean", [True, False])
def test_group_norm_by_segment_is_independent(subtract_mean):
    x, ids = array(2, 6, 4), jnp.array([[1, 1, 2, 2, 2, 0]] * 2)
    y = group_norm(jnp.array(x), num_groups=2, segment_ids=ids, subtract_mean=subtract_mean)
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = group_norm(jnp.array(x[:, part]), num_groups=2, subtract_mean=subtract_mean)
        close(y[:, part], alone)


def test_indivisible_groups_are_named():
    with pytest.raises(ArgumentShapeError, match=r"5 channels .*\(2, 5\).* into 2 equal groups"):
        group_norm(jnp.ones((2, 5)), num_groups=2)


NORMS = {
    "layer": layer_norm,
    "rms": rms_norm,
    "group": lambda x, **kwargs: group_norm(x, num_groups=2, **kwargs),
    "batch": lambda x, **kwargs: batch_norm(x, *moments(x, axis=0), **kwargs),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_result_has_the_dtype_of_the_input(norm):
    x = jnp.array(array(4, 8) + 5, jnp.bfloat16)
    y = jax.jit(norm)(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jax.jit(norm)(x.astype(jnp.float32)).astype(jnp.bfloat16))
    assert jax.eval_shape(lambda x: norm(x, dtype=None), x).dtype == jnp.bfloat16


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_gradients_are_finite_without_variance(norm, value):
    x, g = jnp.full((4, 8), value), jnp.array(array(4, 8))
    y, grad = jax.jit(jax.value_and_grad(lambda x: jnp.sum(g * norm(x, eps=1e-12))))(x)
    assert np.isfinite(y)
    assert np.isfinite(grad).all()


def test_two_pass_variance_is_accurate_with_outlier_first():
    x = np.array([1e6, *RNG.normal(size=255)], np.float32)
    y = layer_norm(jnp.array(x), fast_variance=False)
    exact = (x.astype(np.float64) - x.astype(np.float64).mean()) / x.astype(np.float64).std()
    close(y, exact)


def test_two_pass_variance_over_a_mapped_axis_with_outlier_first():
    x = (1e4 + RNG.normal(size=(2, 128))).astype(np.float32)
    where = np.ones(x.shape, bool)
    where[:, 0] = False  # counts as 0, far from the mean
    norm = functools.partial(layer_norm, axis_name="parts", eps=0.0, fast_variance=False)
    of_part = jax.vmap(lambda x, where: norm(x, where=where), axis_name="parts")
    y = jax.jit(of_part)(jnp.array(x), where)
    exact = x.astype(np.float64)
    exact = (exact - exact[where].mean()) / exact[where].std()
    np.testing.assert_allclose(y[where], exact[where], rtol=1e-2, atol=1e-2)


def test_complex_values_are_divided_by_a_real_deviation():
    x = RNG.normal(size=(3, 8)) + 1j * RNG.normal(size=(3, 8))
    x = jnp.array(x.astype(np.complex64))
    for fast in (True, False):
        y = layer_norm(x, eps=0.0, dtype=None, fast_variance=fast)
        close(y.mean(-1), np.zeros(3))
        close((np.abs(y) ** 2).mean(-1), np.ones(3))
    close((np.abs(rms_norm(x, eps=0.0, dtype=None)) ** 2).mean(-1), np.ones(3))


def test_groups_have_a_number_or_a_size():
    assert number_of_groups(12, 3, None) == 3
    assert number_of_groups(12, None, 3) == 4
    with pytest.raises(ArgumentShapeError, match=r"12 channels, .* into 5 equal groups"):
        number_of_groups(12, 5, None)
    with pytest.raises(ArgumentShapeError, match=r"12 channels, .* into groups of group_size=5"):
        number_of_groups(12, None, 5)
    with pytest.raises(ArgumentValueError, match="num_groups=2 and group_size=3: give one"):
        number_of_groups(12, 2, 3)
    with pytest.raises(ArgumentValueError, match="num_groups=None and group_size=0: expected a"):
        number_of_groups(12, None, 0)


def test_axes_of_groups():
    assert group_norm_axes(None, (2, 3, 4, 5)) == (1, 2, 3)
    assert group_norm_axes(-1, (2, 3, 4)) == (2,)
    with pytest.raises(ArgumentValueError, match=r"reduction_axes=\(1,\) .*\(2, 3, 4\).* add -1"):
        group_norm_axes((1,), (2, 3, 4))


def test_axes_of_instances():
    assert instance_norm_axes((-1, 1), (2, 3, 4, 5)) == ((1, 3), (2,))
    with pytest.raises(
        ArgumentValueError, match=r"feature_axes=\(1, -3\) .*include the first axis"
    ):
        instance_norm_axes((1, -3), (2, 3, 4))


WEIGHT = jnp.array(RNG.normal(size=(3, 4, 5)).astype(np.float32))


def test_invalid_arguments_are_named():
    with pytest.raises(ArgumentValueError, match=r"feature_axes=3 .* shape \(3, 4, 5\)"):
        weight_norm(WEIGHT, feature_axes=3)
    with pytest.raises(ArgumentValueError, match="n_steps=0: expected at least one"):
        spectral_norm(WEIGHT, jnp.ones((1, 5)), n_steps=0)


X = jnp.ones((2, 4, 8))


def size(fn):
    """Equations and operations of the function, and of it with its derivative."""
    found = []
    for made in (fn, jax.value_and_grad(lambda x: (fn(x) ** 2).sum())):
        traced = jax.jit(made).trace(X)
        found += [equations(traced.jaxpr), sum(operations(traced.lower().as_text()).values())]
    return found


@pytest.mark.parametrize(
    ("fn", "at_most"),
    [
        (lambda x: functional.layer_norm(x, eps=1e-6), [19, 33, 64, 104]),
        (lambda x: functional.rms_norm(x, eps=1e-6), [8, 15, 28, 52]),
    ],
    ids=["layer_norm", "rms_norm"],
)
def test_norms(fn, at_most):
    sizes = size(fn)
    assert all(x <= bound for x, bound in zip(sizes, at_most, strict=True)), sizes
    # Means and squares are reduced at once.
    assert operations(jax.jit(fn).lower(X).as_text())["reduce"] == 1
