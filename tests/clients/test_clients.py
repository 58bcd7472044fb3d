"""Programs with packages built on Flax compute on Weft what they compute on Flax."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests.python import run_python

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))


def run(program, **kwargs):
    # Not the program itself, since its folder would hide the package of the same name.
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    return json.loads(run_python("-c", code, program, **kwargs).stdout)


def assert_close(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
    if isinstance(one, list | dict):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_close(one[key], other[key])
    elif isinstance(one, float):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    else:
        assert one == other


@pytest.mark.long
@pytest.mark.rank_promotion("allow")  # the packages add axes
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
def test_programs_of_packages_compute_the_same(program, tmp_path):
    if importlib.util.find_spec(program.stem) is None:
        pytest.skip(f"{program.stem} is not installed; the extra `clients` has it")
    on_weft, on_flax = (run(program, as_flax=as_flax, cwd=tmp_path) for as_flax in (True, False))
    assert_close(on_weft, on_flax)
