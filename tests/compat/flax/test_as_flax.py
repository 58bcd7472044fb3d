"""`import flax` finds Weft, in a process and its children, however they were started."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import weft
from tests.python import run_python
from weft.errors import AsFlaxError

STARTUP = Path(weft.__file__).parent / "compat/flax/startup"

SAME = """
import importlib.metadata, pickle, sys
import flax.linen as nn
import flax
import weft.core.meta, weft.linen
from flax import struct, version
from flax.core import FrozenDict
from flax.core.frozen_dict import FrozenDict as also
assert flax.linen is nn is weft.linen is sys.modules["flax.linen"]
assert FrozenDict is also is weft.core.FrozenDict and struct is weft.struct
assert flax.core.meta is weft.core.meta
for module, name in ((nn, "weft.linen"), (flax.core.meta, "weft.core.meta")):
    assert module.__name__ == module.__spec__.name == name, module.__spec__
    assert type(module.__loader__).__module__ == "_frozen_importlib_external"
assert flax.__name__ == "flax" and flax.__version__ == version.__version__ == "0.12.8"
assert flax.version is version and weft.__version__ != "0.12.8"
assert importlib.metadata.version("flax") == "0.12.8"
assert "FrozenDict" in dir(flax.core) and "linen" in dir(flax)
assert importlib.util.find_spec("flax.nothing") is None
try:
    import flax.linen.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'flax.linen.nothing'"
else:
    raise AssertionError
"""

CHILDREN = """
import multiprocessing, subprocess, sys
def linen():
    import flax.linen
    return flax.linen.__name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(linen))
    code = "import flax.core; print(flax.core.__name__)"
    python = [sys.executable, "-c", code]
    print(subprocess.run(python, capture_output=True, encoding="utf-8", check=True))
"""


def test_modules_are_those_of_weft():
    done = run_python("-c", "import weft.as_flax" + SAME, as_flax=False)
    said = f"flax is Weft {weft.__version__} in this process and its children\n"
    assert done.stderr == said, "once"


def test_children_follow(tmp_path):
    script = tmp_path / "script.py"
    for first, as_flax in (("", True), ("import weft.as_flax", False)):
        script.write_text(first + CHILDREN, encoding="utf-8")
        done = run_python(script, as_flax=as_flax)
        assert done.stdout.startswith("weft.linen\n") and "weft.core\\n" in done.stdout


def test_children_start_without_jax_and_others_without_weft():
    code = "import sys; print([m for m in sys.modules if m.partition('.')[0] in ('weft', 'jax')])"
    assert run_python("-c", code, as_flax=False).stdout == "[]\n"
    assert "'weft.as_flax'" in (active := run_python("-c", code).stdout)
    assert "jax" not in active


def test_other_sitecustomize_runs_too(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.of_site = 1", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys, sitecustomize as s; print(sys.of_site, s.__file__, 'weft' in sys.modules)"
    printed = run_python("-c", code).stdout
    assert printed == f"1 {tmp_path / 'sitecustomize.py'} True\n"


def test_python_without_weft_starts_as_ever():
    # Without the folder of what is installed, and what PYTHONPATH has.
    code = (
        f"import sys; sys.path.append({str(STARTUP)!r}); import sitecustomize; "
        "print('weft' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, encoding="utf-8"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_script_and_module_run_as_in_python(tmp_path):
    code = (
        "import sys, flax.core\n"
        "print(__name__, sys.argv, sys.path[0], flax.core.__name__, __spec__ and __spec__.name)\n"
        "sys.exit(7)\n"
    )
    script = tmp_path / "program.py"
    script.write_text(code, encoding="utf-8")
    argv = ["--rate", "0.1", "-m", "x", "--help"]
    for program, of_spec in (([script], None), (["-m", "program"], "program")):
        args = ["-m", "weft", "run-as-flax", *program, *argv]
        done = run_python(*args, as_flax=False, check=False, cwd=tmp_path)
        shown = ["__main__", [str(script), *argv], str(tmp_path), "weft.core", of_spec]
        assert done.stdout == " ".join(map(str, shown)) + "\n", done.stderr
        assert done.returncode == 7


def test_program_must_be_named():
    done = run_python("-m", "weft", "run-as-flax", as_flax=False, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "weft: no program is named; write `weft run-as-flax script.py` or `-m module`\n"
    )


def test_weft_need_not_be_installed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, flax; print(os.environ['PYTHONPATH'])", encoding="utf-8")
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "run-as-flax", program],
        cwd=Path(weft.__file__).parents[1],  # from where it is imported
        capture_output=True,
        encoding="utf-8",
        env=environment,
    )
    folders = [STARTUP, Path(weft.__file__).parents[1]]
    assert done.stdout.strip() == os.pathsep.join(map(str, folders)), done.stderr


def test_loaded_flax_is_refused(monkeypatch):
    flax = types.ModuleType("flax")
    flax.__file__ = "site-packages/flax/__init__.py"
    monkeypatch.setitem(sys.modules, "flax", flax)
    before = list(sys.meta_path)
    with pytest.raises(AsFlaxError, match=r"flax is already imported, from site-packages/flax/"):
        importlib.import_module("weft.as_flax")
    assert sys.meta_path == before and "weft.as_flax" not in sys.modules
