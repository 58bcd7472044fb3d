import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiled import (
    moments,
    segment_mean,
    update_running_average,
)
from weft.functional.statistics import statistics_dtype

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
def test_variance_is_accurate_with_large_mean(offset):
    x = (RNG.integers(-8, 8, size=(4, 64)) + offset).astype(np.float32)
    mean, variance = moments(jnp.array(x))
    reference = x.astype(np.float64)
    np.testing.assert_allclose(mean[:, 0], reference.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(variance[:, 0], reference.var(-1), rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_moments_combine_over_mapped_axes(masked):
    x = array(4, 6, 3) + 100 * np.arange(4, dtype=np.float32)[:, None, None]
    where = RNG.random((4, 6, 1)) < 0.5 if masked else np.ones((4, 6, 1), bool)
    where[1] = not masked  # with a mask, one part has nothing that counts
    part = functools.partial(moments, axis=0, axis_name="parts")
    mean, variance = jax.vmap(lambda x, w: part(x, where=w if masked else None), axis_name="parts")(
        jnp.array(x), jnp.array(where)
    )
    counted = x[np.broadcast_to(where, x.shape)].reshape(-1, 3)
    for part_mean, part_variance in zip(mean, variance, strict=True):
        np.testing.assert_allclose(part_mean[0], counted.mean(0), rtol=1e-5)
        np.testing.assert_allclose(part_variance[0], counted.var(0), rtol=1e-4)


def test_segment_mean_is_the_mean_of_each_segment():
    x, ids = array(2, 5, 3, 4), np.array([[1, 1, 2, 2, 0], [3, 3, 3, 5, 5]])
    out = segment_mean(jnp.array(x), segment_ids=jnp.array(ids), axis=(1, 3))
    assert out.shape == (2, 5, 3, 1)
    for b in range(2):
        for t in range(5):
            same = x[b][ids[b] == ids[b, t]]
            np.testing.assert_allclose(out[b, t, :, 0], same.mean((0, 2)), rtol=1e-4, atol=1e-6)


def test_running_average_keeps_its_dtype():
    new = update_running_average(jnp.ones(2, jnp.float32), jnp.zeros(2, jnp.bfloat16), decay=0.9)
    assert new.dtype == jnp.float32
    np.testing.assert_allclose(new, [0.9, 0.9], rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, forced, as_it_is",
    [("bfloat16", "float32", "bfloat16"), ("int32", "float32", "float32"),
     ("complex64", "complex64", "complex64")],
)  # fmt: skip
def test_dtype_of_statistics(dtype, forced, as_it_is):
    x = jnp.ones(1, dtype)
    assert jnp.dtype(statistics_dtype(x)) == forced
    assert jnp.dtype(statistics_dtype(x, force_float32=False)) == as_it_is


def test_segment_mean_of_half_precision_sums_in_float32():
    x = jnp.linspace(1.0, 2.0, 4096, dtype=jnp.bfloat16)[None]
    mean = segment_mean(x, segment_ids=jnp.ones(x.shape, int), axis=1)
    assert mean.dtype == jnp.bfloat16
    assert mean[0, 0] == x.astype(jnp.float32).mean().astype(jnp.bfloat16)


def test_segment_mean_with_where():
    x, ids = jnp.array([[1.0, 3.0, 5.0]]), jnp.array([[1, 1, 2]])
    where = jnp.array([[True, False, False]])
    assert segment_mean(x, segment_ids=ids, axis=1, where=where).tolist() == [[1.0, 1.0, 0.0]]
