"""Products and lookups with weights in int8 are those of the weights that the codes stand for."""

import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import arrays, int8_lookup, int8_product, int8_weight, lookup

RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RANDOM.normal(size=shape), dtype)


def rounded(weight):
    """Returns the weight that codes and scales stand for, with the axes of inputs first."""
    return weight.codes * arrays.to_ndim(weight.scales.astype(jnp.float32), weight.codes.ndim)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_are_the_nearest(dtype):
    weight = normal(6, 3, 8, dtype=dtype).at[:, 1].set(0)
    int8 = int8_weight(weight, (2, 0))
    codes, scales = int8
    assert codes.shape == (8, 6, 3)
    assert codes.dtype == jnp.int8
    assert scales.dtype == dtype
    assert jnp.max(jnp.abs(codes)) == 127
    in_order = jnp.moveaxis(weight, 2, 0).astype(jnp.float32)
    errors = jnp.abs(rounded(int8) - in_order)
    # Half a step, and what the rounded scale of 16 bits cuts off of the largest weight.
    half_step = scales.astype(jnp.float32) * (0.501 if dtype == jnp.float32 else 0.76)
    assert jnp.all(errors <= arrays.to_ndim(half_step, 3))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("batch_shape", "shape", "input_axes"),
    [
        ((1,), (40, 5), (0,)),
        ((1, 1), (40, 4, 3), (0,)),
        ((2, 3), (7, 5), (0,)),
        ((2, 3), (6, 32, 4), (1, 2)),
    ],
)
def test_product_is_that_of_the_rounded_weight(batch_shape, shape, input_axes, on_cpu, monkeypatch):
    monkeypatch.setattr(arrays, "on_one_cpu", lambda: on_cpu)
    weight = int8_weight(normal(*shape), input_axes)
    n = len(input_axes)
    x = normal(*batch_shape, *weight.codes.shape[:n])
    expected = jnp.tensordot(x, rounded(weight), n)
    np.testing.assert_allclose(int8_product(x, weight), expected, rtol=1e-5, atol=1e-5)


def test_product_of_16_bits_is_summed_in_32():
    weight = int8_weight(jnp.ones((4096, 8), jnp.bfloat16), (0,))
    y = int8_product(jnp.ones((1, 4096), jnp.bfloat16), weight)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), 4096, rtol=2e-2)


def test_lookup_is_that_of_the_rounded_table():
    table = int8_weight(normal(9, 4), (1,))
    ids = jnp.array([[0, 8], [3, 9]])
    vectors = int8_lookup(table, ids)
    assert vectors.shape == (2, 2, 4)
    expected = lookup(rounded(table).T, ids)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    assert jnp.isnan(vectors[1, 1]).all()
