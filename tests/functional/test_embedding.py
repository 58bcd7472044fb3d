import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.compiled import (
    alibi_bias,
    apply_rotary,
    attend,
    llama3_frequencies,
    lookup,
    rotary_frequencies,
    rotary_sincos,
    sinusoidal_positions,
    yarn_frequencies,
)
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import alibi_slopes, relative_position_buckets, yarn_magnitude

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_out_of_range_id_is_nan():
    y = lookup(jnp.ones((5, 3)), jnp.array([4, 5]))
    assert np.isnan(y).all(-1).tolist() == [False, True]


def test_sinusoidal_positions():
    positions = np.array([[0, 1, 7]])
    y = sinusoidal_positions(jnp.array(positions), dim=6, min_timescale=2, max_timescale=200)
    scaled = positions[..., None] / np.array([2, 20, 200])
    expected = np.concatenate([np.sin(scaled), np.cos(scaled)], -1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


def test_rotary_rotates_pairs():
    x, positions = array(2, 3, 4, 8), np.array([[0, 1, 2], [5, 9, 100]])
    angles = positions[..., None] * 100.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, :, None]
    sin, cos = rotary_sincos(jnp.array(positions), dim=8, theta=100.0)
    y = apply_rotary(jnp.array(x), sin[:, :, None], cos[:, :, None])
    np.testing.assert_allclose(y[..., ::2], turned.real, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(y[..., 1::2], turned.imag, rtol=1e-3, atol=1e-4)


def test_layouts_differ_by_a_permutation():
    x = jnp.array(array(3, 8))
    sin, cos = rotary_sincos(jnp.arange(3), dim=8)
    order = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    np.testing.assert_allclose(
        apply_rotary(x[:, order], sin, cos, layout="half"),
        apply_rotary(x, sin, cos)[:, order],
        rtol=1e-6,
    )


def test_rotary_products_depend_on_distance_only():
    q, k = jnp.array(array(8)), jnp.array(array(8))
    sin, cos = rotary_sincos(jnp.arange(20), dim=8)

    def product(i, j):
        return apply_rotary(q, sin[i], cos[i]) @ apply_rotary(k, sin[j], cos[j])

    np.testing.assert_allclose(product(3, 1), product(17, 15), rtol=1e-4)


def test_rotary_keeps_the_dtype_and_computes_in_float32():
    x = jnp.array(array(1, 8), jnp.bfloat16)
    sin, cos = rotary_sincos(jnp.array([1000]), dim=8)
    y = apply_rotary(x, sin, cos)
    assert y.dtype == jnp.bfloat16
    expected = apply_rotary(x.astype(jnp.float32), sin, cos).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected)


def test_alibi_bias_falls_with_distance():
    positions = np.array([[0, 1, 2, 3], [7, 8, 9, 10]])
    bias = alibi_bias(alibi_slopes(2), jnp.array(positions), jnp.array(positions))
    distance = abs(positions[:, :, None] - positions[:, None, :])
    expected = -np.array([2.0**-4, 2.0**-8])[None, :, None, None] * distance[:, None]
    np.testing.assert_allclose(bias, expected, rtol=1e-6)


def test_mismatch_is_named():
    with pytest.raises(ArgumentValueError, match="dim=5 must be even"):
        sinusoidal_positions(jnp.arange(3), dim=5)
    with pytest.raises(ArgumentValueError, match="dim=7 must be even"):
        rotary_sincos(jnp.arange(3), dim=7)
    with pytest.raises(ArgumentShapeError, match=r"8 dimensions .* 4 angles, .*\(3, 2\)"):
        apply_rotary(jnp.ones((3, 8)), jnp.ones((3, 2)), jnp.ones((3, 2)))
    with pytest.raises(ArgumentValueError, match="layout='gptj' must be"):
        apply_rotary(jnp.ones((3, 4)), jnp.ones((3, 2)), jnp.ones((3, 2)), layout="gptj")


def test_rows_and_logits_have_out_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        table = jax.device_put(jnp.arange(24.0).reshape(6, 4), P(None, "model"))
        ids = jax.device_put(jnp.array([1, -1]), P("data"))
        rows = lookup(table, ids, out_sharding=P("data", "model"))
        assert rows.sharding.spec == P("data", "model")
        np.testing.assert_array_equal(rows, np.asarray(table)[[1, -1]])
        x = jax.device_put(jnp.ones((2, 4)), P("data"))
        logits = attend(table, x, out_sharding=P("data", None))
        assert logits.sharding.spec == P("data", None)
    assert jnp.isnan(lookup(jnp.ones((3, 2)), jnp.array(7))).all()


def test_llama3_scaling_by_frequency():
    length, scaling = 8192, 8.0
    plain = np.asarray(rotary_frequencies(128, 5e5))
    scaled = np.asarray(llama3_frequencies(128, original_max_seq_length=length))
    turns = plain * length / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / scaling, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert np.all(scaled[between] < plain[between])
    assert np.all(scaled[between] > plain[between] / scaling)
    assert np.all(np.diff(scaled) < 0)


def test_only_slow_pairs_are_interpolated():
    length, scaling = 2048, 8.0
    plain = np.asarray(rotary_frequencies(64))
    scaled = np.asarray(
        yarn_frequencies(64, original_max_seq_length=length, scaling_factor=scaling)
    )
    turns = plain * length / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 64], plain[turns > 64], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.5], plain[turns < 0.5] / scaling, rtol=1e-6)
    between = (turns > 1) & (turns < 32)
    assert np.all(scaled[between] <= plain[between])
    assert np.all(scaled[between] >= plain[between] / scaling)
    assert np.all(np.diff(scaled) < 0)


def test_ramp_between_fast_and_slow_pairs_is_not_rounded():
    # With theta = 10**4 and 16 dimensions, pair i turns 10**(-i/2) radians per position: within
    # 2000 pi positions 1000 * 10**(-i/2) times. Of 32 turns is pair 2.99, of 1 turn pair 6.
    length = 6283
    fast = 2 * math.log10(length / (2 * math.pi * 32))
    slow = 2 * math.log10(length / (2 * math.pi))
    assert 2 < fast < 3 and 5.9 < slow < 6
    shares = np.clip((np.arange(8) - fast) / (slow - fast), 0, 1)
    plain = 10.0 ** (-np.arange(8) / 2)
    scaled = yarn_frequencies(16, original_max_seq_length=length, scaling_factor=4.0)
    np.testing.assert_allclose(scaled, plain * (1 - shares) + plain / 4 * shares, rtol=1e-5)
    rounded = yarn_frequencies(
        16, original_max_seq_length=length, scaling_factor=4.0, truncate=True
    )
    shares = np.clip((np.arange(8) - 2) / 4, 0, 1)
    np.testing.assert_allclose(rounded, plain * (1 - shares) + plain / 4 * shares, rtol=1e-5)


def test_one_ramp_step_when_all_pairs_are_fast_or_slow():
    scaled = yarn_frequencies(
        8, original_max_seq_length=64, scaling_factor=2.0, beta_fast=4.0, beta_slow=4.0
    )
    assert np.all(np.isfinite(scaled))


def test_magnitude():
    np.testing.assert_allclose(yarn_magnitude(16.0, 0.5), 0.5 * (0.1 * np.log(16.0) + 1))


def test_relative_position_buckets_widen_with_distance():
    distances = jnp.arange(-150, 151)
    buckets = np.asarray(relative_position_buckets(distances))
    # Before, half of the 16 buckets for single distances; those after have 16 more.
    np.testing.assert_array_equal(buckets[150 - 8 : 151], np.arange(8, -1, -1))
    np.testing.assert_array_equal(buckets[151:], buckets[:150][::-1] + 16)
    assert buckets[0] == buckets[150 - 128] == 15
    widths = np.unique(buckets[:151], return_counts=True)[1]
    assert np.all(np.diff(widths[8:15]) >= 0)
    causal = np.asarray(relative_position_buckets(distances, is_causal=True))
    assert np.all(causal[150:] == 0) and causal[0] == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_buckets": 2}, "there must be 4 buckets or more"),
        ({"num_buckets": 1, "is_causal": True}, "there must be 2 buckets or more"),
        ({"max_distance": 8}, "max_distance must be above 8"),
    ],
)
def test_too_few_buckets(settings, message):
    with pytest.raises(ArgumentValueError, match=message):
        relative_position_buckets(jnp.arange(3), **settings)
