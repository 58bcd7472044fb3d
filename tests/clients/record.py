"""What the programs print on Flax: `python -m tests.clients.record` writes it into flax.json.

It holds for the versions that the file names; under any others, the tests run Flax again.
"""

import hashlib
import json
import os
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import pytest

from tests.pages import ROOT
from tests.python import run_python

RECORD = Path(__file__).with_name("flax.json")
# bijx 1.3.2 imports what JAX 0.12 no longer has.
TOO_OLD = {"bijx"} if jax.__version_info__ >= (0, 12) else set()
# The extra `clients` has their packages.
PROGRAMS = sorted(
    path for path in Path(__file__).with_name("programs").glob("*.py") if path.stem not in TOO_OLD
)

# All in one process, which imports JAX once. It runs them by their paths, since their folder would
# hide the packages of the same names. No other test compiles what they do, so nothing is kept.
RUN = """
import gc
gc.disable()  # hardly anything of what is imported and traced is garbage
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


def run_programs(as_flax, cwd=None):
    """Returns what each program prints, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
        printed = run_python("-c", RUN, *PROGRAMS, as_flax=as_flax, cwd=cwd).stdout
    names = [path.stem for path in PROGRAMS]
    return dict(zip(names, json.loads(printed), strict=True))


def versions():
    """Returns the versions on which the values may depend."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = extras["optional-dependencies"]["clients"]
    names = {"jax", "jaxlib", "numpy", "optax", *(text.split("==")[0] for text in wanted)}
    found = {}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def printed_on_flax(cwd):
    """Returns what the programs print on Flax, which is run if nothing is recorded for it."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if recorded["versions"] == versions() and recorded["programs"] == digests():
        return recorded["printed"]
    return run_programs(as_flax=False, cwd=cwd)


def digests():
    """Returns hashes of the programs: Flax is run again for changed ones."""
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in PROGRAMS}


def is_for_these_programs():
    """Returns whether nothing has changed since the record, where it holds for these versions."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    return recorded["versions"] != versions() or recorded["programs"] == digests()


if __name__ == "__main__":
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "allow"  # the packages add axes
    import conftest  # noqa: F401 - sets the flags of the tests, on which some values depend

    with tempfile.TemporaryDirectory() as directory:
        record = {
            "versions": versions(),
            "programs": digests(),
            "printed": run_programs(as_flax=False, cwd=directory),
        }
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
