"""Programs with packages built on Flax compute on Weft what they compute on Flax."""

import numpy as np
import pytest

from tests.clients.record import is_for_these_programs, printed_on_flax, run_programs


def assert_close(one, other, name):
    assert type(one) is type(other), name
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
    if isinstance(one, list | dict):
        assert len(one) == len(other), name
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_close(one[key], other[key], name)
    elif isinstance(one, float):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=name)
    else:
        assert one == other, name


@pytest.mark.long
@pytest.mark.rank_promotion("allow")  # the packages add axes
def test_programs_of_packages_compute_the_same(tmp_path):
    on_weft, on_flax = run_programs(as_flax=True, cwd=tmp_path), printed_on_flax(tmp_path)
    assert on_weft.keys() == on_flax.keys()
    for name, printed in on_weft.items():
        assert_close(printed, on_flax[name], name)


def test_record_is_current():
    assert is_for_these_programs(), "python -m tests.clients.record"
