"""Programs with packages built on Flax compute on Weft what they compute on Flax."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.python import run_python

# bijx 1.3.2 imports what JAX 0.12 no longer has.
TOO_OLD = {"bijx"} if jax.__version_info__ >= (0, 12) else set()
# The extra `clients` has their packages.
PROGRAMS = sorted(
    path for path in Path(__file__).with_name("programs").glob("*.py") if path.stem not in TOO_OLD
)

# All in one process, which imports JAX once. It runs them by their paths, since their folder would
# hide the packages of the same names.
RUN = """
import contextlib, io, json, runpy, sys
printed = []
for program in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        try:
            runpy.run_path(program, run_name="__main__")
        except Exception as error:
            error.add_note(program)
            raise
    printed.append(json.loads(stdout.getvalue()))
print(json.dumps(printed))
"""


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
    on_weft, on_flax = (
        json.loads(run_python("-c", RUN, *PROGRAMS, as_flax=as_flax, cwd=tmp_path).stdout)
        for as_flax in (True, False)
    )
    for program, one, other in zip(PROGRAMS, on_weft, on_flax, strict=True):
        assert_close(one, other, program.stem)
