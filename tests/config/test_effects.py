"""What the text of a config can have called has no effects: see `tests/config/effects.py`."""

import json
import os
import subprocess
import sys

import pytest

# What could be called, and named, before names were listed function by function.
BAD_CALLABLES = "weft.jax_utils.partial_eval_by_shape,jax.nn.relu,optax.inject_hyperparams"
BAD_NAMES = "numpy.load,numpy.savetxt,jax.nn.relu"


def search(*arguments):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.config.effects", "--quick", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_search_finds_what_it_is_for():
    found = search("--callables", BAD_CALLABLES, "--names", BAD_NAMES)["found"]
    evaluates = "weft.jax_utils.partial_eval_by_shape with"
    assert found.pop(f"{evaluates} numpy.load")[0].startswith("pickle.find_class(")
    assert found.pop(f"{evaluates} numpy.savetxt")[0].startswith("open(")
    assert not any("relu" in label for label in found), found


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("numpy.save", "open("),
        ("numpy.memmap", "open("),
        ("weft.config.get_named_trainer_config", "import planted_module"),
        ("weft.trainer.checkpoint_dirs.remove_dir", "shutil.rmtree("),
    ],
)
def test_the_search_finds_single_functions(name, effect):
    found = search("--callables", name, "--names", "jax.nn.relu")["found"]
    assert any(label.startswith(name) for label in found)
    assert any(seen.startswith(effect) for effects in found.values() for seen in effects), found


def test_nothing_that_a_text_can_have_called_has_effects():
    result = search()
    assert result["found"] == {}
    assert result["calls"] > 50_000
    # These call what they are given, so each was tried with every name.
    assert "optax.scale_by_schedule" in result["called"]
