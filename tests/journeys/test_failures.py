"""Runs that fail: what a person reads, and the exit code."""

import os
import resource
import subprocess
import sys

import pytest

from tests.pages import ROOT
from tests.weft_process import WEFT, finish, weft_processes
from weft.cli import main

pytestmark = pytest.mark.usefixtures("one_device")

OWN_MODEL = """
import jax.numpy as jnp
import numpy as np
import optax
from weft import nnx
from weft.config import config_for_class, config_for_function
from weft.input import ArrayInput, Arrays
from weft.trainer import Learner, SpmdTrainer


class Net(nnx.Module):
    def __init__(self, cause: str, *, rngs: nnx.Rngs):
        self.cause = cause
        scale = jnp.inf if cause == "initializer" else 1.0
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, bias_init=nnx.initializers.constant(scale), rngs=rngs)

    def __call__(self, input_batch):
        y = self.out(self.embed(input_batch["ids"])) - input_batch["y"]
        if self.cause == "logarithm":
            y = jnp.log(y - 1e3)
        return jnp.mean(y**2), {}


def recipe(cause: str, rate: float = 0.1):
    y = np.full((8, 1), np.nan if cause == "batch" else 1.0, np.float32)
    ids = np.full(8, 10 if cause == "ids" else 9, np.int32)
    arrays = Arrays({"ids": ids, "y": y})
    sgd = config_for_function(optax.sgd).set(learning_rate=rate)
    return SpmdTrainer.default_config().set(
        name="trainer",
        dir="run",
        max_step=10,
        model=config_for_class(Net).set(cause=cause),
        input=ArrayInput.default_config().set(arrays=arrays, global_batch_size=8),
        learner=Learner.default_config().set(optimizer=sgd),
        mesh_shape=(-1,),
        mesh_axis_names=("data",),
    )
"""
UNDEFINED = {
    "cause=batch": "The batch has undefined numbers in y: look at the input first.",
    "cause=initializer": "Initial parameters are undefined: params/out/bias. Look first at their",
    "cause=logarithm": "with an undefined output is trainer.model, a Net (__call__). Look there",
    "cause=rate rate=1e30": "The first loss of the run was finite, so look first at the learning",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own", None)


@pytest.mark.long
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "message"), UNDEFINED.items())
def test_undefined_loss(capsys, words, message):
    assert main(["train", "own.py:recipe", *words.split()]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("weft: the loss after step") == 1


def test_id_without_a_row(folder, capsys):
    assert main(["train", "own.py:recipe", "cause=ids"]) == 2
    assert (
        "weft: the batch has ids in ids from 10 to 10, and the model looks them up in the "
        "parameter params/embed/embedding, which has 10 rows, shape (10, 4). Give the table more"
    ) in capsys.readouterr().err
    assert not (folder / "run" / "checkpoints").exists()


@pytest.mark.long
def test_full_disk(folder, python_server):
    words = ["lm-tiny", "dir=run", "max_step=2", "evalers={}", "model.decoder.dim=64"]
    words += ["model.decoder.transformer.num_layers=1"]
    with weft_processes(python_server, folder) as start:
        training = start("train", *words)
        resource.prlimit(training.pid, resource.RLIMIT_FSIZE, (48_000, 48_000))
        out = finish(training, 1)
    message = (
        "the checkpoint of step 2 could not be saved in 'run/checkpoints': the disk, or a quota"
    )
    assert out.count(f"NOT SAVED: {message}") == out.count(f"\nweft: {message}") == 1
    for text in ("Traceback", "Event loop", "never retrieved", "ERROR"):
        assert text not in out
    assert not list((folder / "run" / "checkpoints").iterdir())


HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorboardX" else find(name, *args)
"""


@pytest.mark.long
def test_missing_extra(folder):
    (folder / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [*WEFT, "train", "lm-tiny"], cwd=folder, env=env, capture_output=True, encoding="utf-8"
    )
    out = done.stdout + done.stderr
    assert done.returncode == 2, out
    assert "needs the package tensorboardX" in out and "pip install 'weft-jax[train]'" in out
    assert "Traceback" not in out and not (folder / "runs").exists()


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_model_that_hugging_face_lacks(capsys):
    layer = "model.decoder.transformer.layer"
    words = [
        f"{layer}.feed_forward.activation=nn.gelu",
        f"{layer}.self_attention.structure=postnorm",
    ]
    assert main(["train", "lm-tiny", "dir=run", "max_step=1", "evalers={}", *words]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--to", "hf"]) == 2
    err = capsys.readouterr().err
    assert "no model of the types gpt2, llama" in err and "Export it as safetensors" in err
    for field in ("feed_forward.activation: 'nn.gelu' → ", "self_attention.structure: 'postnorm'"):
        assert f"  {layer.removeprefix('model.')}.{field}" in err, err
