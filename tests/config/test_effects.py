"""Callables that the text of a config can call have no effects: see `tests/config/effects.py`."""

import json
import os
import subprocess
import sys

import pytest

# Callable before names were listed function by function.
PLANTED = (
    "weft.jax_utils.partial_eval_by_shape,jax.nn.relu,optax.inject_hyperparams,numpy.save,"
    "numpy.memmap,weft.config.get_named_trainer_config,weft.trainer.checkpointer.dirs.remove_dir"
)
PLANTED_NAMES = "numpy.load,numpy.savetxt,jax.nn.relu"


def search(*arguments):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.config.effects", *arguments],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_TRACEBACK_FILTERING": "off",  # a quarter of the time: thousands of errors
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def quick():
    return search("--quick", "--planted", PLANTED, "--planted-names", PLANTED_NAMES)


def test_search_finds_planted_effects(quick):
    found = quick["planted"]
    evaluates = "weft.jax_utils.partial_eval_by_shape with"
    assert found[f"{evaluates} numpy.load"][0].startswith("pickle.find_class(")
    assert found[f"{evaluates} numpy.savetxt"][0].startswith("open(")
    assert not any("relu" in label for label in found), found


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("numpy.save", "open("),
        ("numpy.memmap", "open("),
        ("weft.config.get_named_trainer_config", "import planted_module"),
        ("weft.trainer.checkpointer.dirs.remove_dir", "os.rename("),
    ],
)
def test_search_finds_single_functions(name, effect, quick):
    of_name = {label: seen for label, seen in quick["planted"].items() if label.startswith(name)}
    assert any(one.startswith(effect) for seen in of_name.values() for one in seen), of_name


def check(result, calls):
    assert result["found"] == {}
    assert result["calls"] > calls
    # These call their arguments, so each was tried with names.
    assert "optax.scale_by_schedule" in result["called"]


def test_callables_of_texts_have_no_effects(quick):
    check(quick, 50_000)


@pytest.mark.soak
@pytest.mark.skipif("WEFT_SOAK_KILLS" not in os.environ, reason="runs by `make soak`")
def test_pairs_of_allowed_names_have_no_effects():
    check(search(), 500_000)
