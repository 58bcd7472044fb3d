"""Weft installed from its wheel, and a package that registers recipes with it.

The latter is what `docs/any-model.md` tells: it has nothing but its files.
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from tests.flags import xla_flags
from tests.pages import ROOT, programs
from weft.cli import main

pytestmark = pytest.mark.usefixtures("one_device")

FILES = {
    "my_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n",
    "my_package-1.0.dist-info/entry_points.txt": (
        "[weft.recipes]\ndigits-net = my_package.recipes:recipe\n"
        "broken-net = my_package.missing:recipe\n"
    ),
    "my_package/__init__.py": "",
    "my_package/recipes.py": next(p.block.text for p in programs(ROOT / "docs" / "any-model.md")),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages, as `pip install --target` leaves it."""
    for name, text in FILES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def said(capsys, *words, code=0):
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_registered_recipe(installed, capsys):
    assert "digits-net" in said(capsys, "recipes")
    assert "width=64" in said(capsys, "recipes", "digits-net")
    said(capsys, "train", "digits-net", "width=8", "steps=2", "batch_size=16", "dir=run")
    assert "my_package.recipes.Net" in said(capsys, "config", "show", "run")
    assert "hidden" in said(capsys, "tabulate", "run")
    err = said(capsys, "train", "digits-nte", code=2)
    assert "unknown recipe 'digits-nte'. Did you mean 'digits-net' or" in err
    err = said(capsys, "train", "broken-net", code=2)
    assert "there is no module 'my_package.missing'" in err


LOCK = ROOT / f"requirements-{sys.version_info.major}.{sys.version_info.minor}.lock"
CUDA = re.compile(r"^(cuda|nvidia|triton|jax-cuda)", re.MULTILINE)


def called(*command, code=0, **options):
    """Returns what a command prints."""
    done = subprocess.run(
        [str(word) for word in command],
        **{"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        | options,
    )
    if "Temporary failure in name resolution" in done.stdout:
        pytest.skip("needs the package index")
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The wheel and the sdist."""
    made = tmp_path_factory.mktemp("packages")
    called(sys.executable, "-m", "hatchling", "build", "-d", made)
    return next(made.glob("*.whl")), next(made.glob("*.tar.gz"))


@pytest.mark.long
def test_packages_hold_what_is_tracked(packages):
    wheel, sdist = packages
    called(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    tracked = set(called("git", "ls-files").split("\n"))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names <= {*tracked, "PKG-INFO"}
    assert {"LICENSE", "README.md", "pyproject.toml", LOCK.name, "tests/pages.py"} <= names
    of_weft = {name for name in tracked if name.startswith("weft/")}
    assert of_weft <= names
    installed = zipfile.ZipFile(wheel).namelist()
    of_wheel = {name for name in installed if ".dist-info/" not in name}
    assert of_wheel == of_weft, "nothing that Python runs when it starts"
    assert {"weft/py.typed", "weft/compat/moved_names.txt", "weft/__init__.pyi"} <= of_wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed)


# The packages that each extra has to name. PyTorch, of `parity` and `bench`, has its build for the
# CPU elsewhere.
NAMED = {
    "text": {"tokenizers", "sentencepiece"},
    "parquet": {"pyarrow"},
    "hf": {"datasets"},
    "tfds": {"tensorflow-datasets"},
    "viz": {"matplotlib", "treescope"},
    "kernels": {"tokamax"},
    "launch": {"submitit"},
    "gcs": {"gcsfs"},
    "stores": {"fsspec"},
    "wandb": {"wandb"},
    "mlflow": {"mlflow-skinny"},
    "optuna": {"optuna"},
    "eval": {"lm-eval"},
    "examples": {"scikit-learn"},
    "docs": {"mkdocs-material", "jupytext"},
}


# All that needs no extra, and then a command that needs one.
IMPORT_AND_TRAIN = """
import weft.linen, weft.nnx, weft.hierarchy, weft.config
from weft.cli import main
raise SystemExit(main(["train", "lm"]))
"""


@pytest.mark.long
def test_wheel_without_extras_and_with_what_training_needs(packages, tmp_path):
    """It is installed into an environment of its own, and run outside of the repository."""
    environment, outside = tmp_path / "venv", {"cwd": tmp_path}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    outside["env"] = env | {"XLA_FLAGS": xla_flags()}
    called(sys.executable, "-m", "venv", "--without-pip", environment)
    python, weft = environment / "bin/python", environment / "bin/weft"

    def install(*extras):
        wanted = f"weft-jax[{','.join(extras)}] @ {packages[0].as_uri()}"
        uv = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--constraint", LOCK]
        called(*uv, "--python", python, wanted)

    install()
    text = called(python, "-c", IMPORT_AND_TRAIN, code=2, **outside)
    assert "pip install 'weft-jax[train]'" in text
    assert "train" in called(weft, "--help", **outside)

    install("train")
    words = ["max_step=1", "evalers={}", "model.decoder.transformer.num_layers=1"]
    assert "step 1/1" in called(weft, "train", "lm-tiny", *words, **outside)


@pytest.mark.parametrize("extra", NAMED)
def test_extra_names_its_packages(extra):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.match(r"[\w-]+", text)[0] for text in wanted["optional-dependencies"][extra]}
    assert NAMED[extra] <= named


def test_packages_of_each_extra_are_known():
    known = {
        *NAMED,
        "train",
        "dev",
        "parity",
        "clients",
        "bench",
    }  # the last four are for the tests
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras["optional-dependencies"].keys() == known


@pytest.mark.long
def test_extras_of_the_wheel_need_no_cuda(packages):
    assert not CUDA.search(LOCK.read_text(encoding="utf-8"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # Both have PyTorch, whose build for the CPU is not on every index.
    chosen = extras["optional-dependencies"].keys() - {"parity", "bench"}
    wanted = f"weft-jax[{','.join(chosen)}] @ {packages[0].as_uri()}"
    uv = [sys.executable, "-m", "uv", "--quiet", "pip", "compile", "--constraint", LOCK]
    found = called(*uv, "--python", sys.executable, "-", input=wanted)
    assert not CUDA.search(found)
    locked = set(re.findall(r"^\S+==\S+", LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^\S+==\S+", found, re.MULTILINE)) <= locked
