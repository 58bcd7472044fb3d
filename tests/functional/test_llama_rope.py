import numpy as np

from weft.functional import llama3_frequencies, rotary_frequencies


def test_fast_pairs_stay_slow_ones_are_slowed_and_those_between_lie_between():
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
