import numpy as np

from weft.functional import rotary_frequencies, yarn_frequencies, yarn_magnitude


def test_no_scaling_changes_nothing():
    scaled = yarn_frequencies(16, 1e4, original_max_seq_length=128)
    np.testing.assert_allclose(scaled, rotary_frequencies(16, 1e4), rtol=1e-6)
    assert yarn_magnitude(1.0) == 1.0


def test_fast_pairs_stay_and_slow_ones_are_interpolated():
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


def test_extrapolation_factor_0_interpolates_all():
    scaled = yarn_frequencies(
        16, original_max_seq_length=128, scaling_factor=4.0, extrapolation_factor=0.0
    )
    np.testing.assert_allclose(scaled, rotary_frequencies(16) / 4, rtol=1e-6)


def test_one_ramp_step_when_all_pairs_are_fast_or_slow():
    scaled = yarn_frequencies(
        8, original_max_seq_length=64, scaling_factor=2.0, beta_fast=4.0, beta_slow=4.0
    )
    assert np.all(np.isfinite(scaled))


def test_magnitude():
    np.testing.assert_allclose(yarn_magnitude(16.0, 0.5), 0.5 * (0.1 * np.log(16.0) + 1))
