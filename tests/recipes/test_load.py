"""`weft.load`: the model of a run with its weights."""

import functools
import json
import shutil
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from weft import hierarchy, nnx
from weft import linen as nn
from weft.cli import main
from weft.config import config_for_class
from weft.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    LayerMethodError,
    LayerVariablesError,
    ModelLoadError,
    RecipeError,
)
from weft.trainer import TrainedModel
from weft.trainer.saved_params import read_params

pytestmark = pytest.mark.usefixtures("one_device")

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
LABELS = np.arange(24) % 3
OPPOSITE = (X, (LABELS + 1) % 3)
"""Held-out labels with which a model gets worse at each step."""


@pytest.fixture(autouse=True, scope="module")
def settings_of_user(tmp_path_factory):
    """The key by which runs are signed is one of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


class Encoder(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(not train)(nn.Dense(self.width)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class LinenNet(nn.Module):
    encoder: nn.Module
    out: int = 3

    def setup(self):
        self.head = nn.Dense(self.out)

    def encode(self, x):
        return self.encoder(x, train=False)

    def __call__(self, x, train: bool):
        return self.head(self.encoder(x, train))


class NNXNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def encode(self, x):
        return self.layers[0](x)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.encode(x)))


def hierarchy_net():
    return hierarchy.Linear.default_config().set(input_dim=4, output_dim=3)


MODELS = {
    "linen": lambda: LinenNet(Encoder(8)),
    "nnx": lambda: NNXNet(nnx.Rngs(0)),
    "nnx class": lambda: config_for_class(NNXNet),
    "hierarchy": hierarchy_net,
}


def fit(model, directory, **kwargs):
    options = {"steps": 8, "batch_size": 8, "learning_rate": 0.1, "progress": False}
    options |= {"validation": OPPOSITE, "evaluate_every": 1} | kwargs
    return weft.fit(model, (X, LABELS), "cross_entropy", dir=str(directory), **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, one_device):
    """Returns a function that gives the directory and the result of a run, by the kind of model."""

    @functools.cache
    def run(kind):
        directory = tmp_path_factory.mktemp("run")
        return directory, fit(MODELS[kind](), directory)

    return run


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_fit(kind, runs):
    directory, result = runs(kind)
    untrained = [NNXNet(nnx.Rngs(7))] if kind == "nnx" else []
    last = weft.load(directory, *untrained)
    assert isinstance(last, TrainedModel) and last.step == 8
    outputs = result.last.predict(X)
    np.testing.assert_array_equal(last.predict(X), outputs)
    np.testing.assert_allclose(jax.jit(last.apply)(X), outputs, rtol=1e-5)
    best = weft.load(str(directory), *untrained, step="best")
    assert best.step == result.best.step < 8
    np.testing.assert_array_equal(best.predict(X), result.best.predict(X))
    np.testing.assert_array_equal(
        weft.load(directory, *untrained, step=best.step).predict(X), best.predict(X)
    )
    with pytest.raises(LayerMethodError, match="no method 'decode'"):
        last.apply(X, method="decode")


def test_the_model_is_one_of_its_library(runs):
    for kind in MODELS:
        directory, result = runs(kind)
        outputs = result.last.predict(X)
        if kind == "linen":
            trained = weft.load(directory)
            assert trained.model == LinenNet(Encoder(8))
            own = trained.model.apply(trained.variables, X, train=False)
            encoded = trained.model.apply(trained.variables, X, method="encode")
            np.testing.assert_allclose(trained.apply(X, method="encode"), encoded, rtol=1e-5)
        elif kind == "hierarchy":
            trained = weft.load(directory)
            own, _ = hierarchy.functional(
                trained.model, None, trained.variables, (X,), is_training=False
            )
        else:
            model = NNXNet(nnx.Rngs(7))
            trained = weft.load(directory, *([model] if kind == "nnx" else []))
            assert kind == "nnx class" or trained.model is model
            trained.model.eval()
            own = trained.model(X)
            encoded = trained.model.encode(X)
            np.testing.assert_allclose(trained.apply(X, method="encode"), encoded, rtol=1e-5)
        np.testing.assert_allclose(own, outputs, rtol=1e-5)


class OwnLoss(nn.Module):
    @nn.compact
    def __call__(self, batch):
        outputs = nn.Dense(1)(batch["x"])
        return jnp.mean((outputs[:, 0] - batch["y"]) ** 2), {"outputs": outputs}


class Predicts(OwnLoss):
    def predict(self, batch):
        _, aux = self(batch)
        return aux["outputs"]


def test_models_with_a_loss_of_their_own(tmp_path):
    options = {"steps": 2, "batch_size": 8, "progress": False}
    batch = {"x": X, "y": LABELS}
    weft.fit(OwnLoss(), batch, dir=str(tmp_path / "own"), **options)
    own = weft.load(tmp_path / "own")
    loss, aux = own.apply(batch)
    assert aux["outputs"].shape == (24, 1) and loss.shape == ()
    with pytest.raises(LayerMethodError, match="this one computes its own loss"):
        own.predict(batch)
    weft.fit(Predicts(), batch, dir=str(tmp_path / "predicts"), **options)
    predicts = weft.load(tmp_path / "predicts")
    np.testing.assert_allclose(predicts.predict(batch), predicts.apply(batch)[1]["outputs"])
    gradient = jax.grad(lambda x: predicts.apply({"x": x, "y": LABELS})[0])(X)
    assert np.abs(gradient).sum() > 0


def test_the_precision_of_the_run_holds(tmp_path):
    result = fit(nn.Dense(3), tmp_path, precision="bfloat16")
    trained = weft.load(tmp_path)
    assert trained.variables["params"]["kernel"].dtype == jnp.bfloat16
    assert trained.apply(X).dtype == jnp.bfloat16
    np.testing.assert_array_equal(trained.predict(X), result.last.predict(X))


FILE = """
    import numpy as np
    import optax
    from weft import nnx
    from weft.config import config_for_class, config_for_function
    from weft.input import ArrayInput, Arrays
    from weft.trainer import Learner, SpmdTrainer

    class Net(nnx.Module):
        def __init__(self, width: int, activation=nnx.relu, *, rngs: nnx.Rngs):
            self.hidden = nnx.Linear(4, width, rngs=rngs)
            self.out = nnx.Linear(width, 1, rngs=rngs)
            self.activation = activation

        def predict(self, batch):
            return self.out(self.activation(self.hidden(batch["x"])))

        def __call__(self, batch):
            return ((self.predict(batch)[:, 0] - batch["y"]) ** 2).mean(), {}

    def data():
        x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
        return Arrays({"x": x, "y": x.sum(-1)})

    def recipe(width: int = 4):
        optimizer = config_for_function(optax.adam).set(learning_rate=0.1)
        return SpmdTrainer.default_config().set(
            name="trainer", dir="run", max_step=3,
            model=config_for_class(Net).set(width=width, activation=ACTIVATION),
            input=ArrayInput.default_config().set(
                arrays=config_for_function(data), global_batch_size=8),
            learner=Learner.default_config().set(optimizer=optimizer),
            mesh_shape=(-1,), mesh_axis_names=("data",))
    """


@pytest.fixture
def train(tmp_path, monkeypatch, new_process):
    """Trains a recipe of a file; afterwards this process has forgotten it."""

    def run(activation="nnx.relu", name="load_net"):
        text = textwrap.dedent(FILE).replace("ACTIVATION", activation)
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        directory = tmp_path / f"run of {name}"
        words = ["train", f"{name}.py:recipe", "width=5", f"dir={directory}"]
        assert main(words) == 0
        new_process()
        return directory

    return run


@pytest.mark.parametrize("activation", ["nnx.relu", "lambda x: 2 * nnx.relu(x)"])
def test_a_recipe_of_a_file(activation, train, tmp_path, monkeypatch):
    directory = train(activation)
    monkeypatch.chdir("/")
    trained = weft.load(directory)
    model = trained.model
    assert type(model).__name__ == "Net" and model.hidden.kernel.shape == (4, 5)
    np.testing.assert_allclose(trained.predict({"x": X}), model.predict({"x": X}), rtol=1e-5)
    scale = 1 if activation == "nnx.relu" else 2
    hidden = X @ np.asarray(model.hidden.kernel[...]) + np.asarray(model.hidden.bias[...])
    hidden = scale * np.maximum(hidden, 0)
    expected = hidden @ np.asarray(model.out.kernel[...]) + np.asarray(model.out.bias[...])
    np.testing.assert_allclose(trained.predict({"x": X}), expected, rtol=1e-4, atol=1e-5)


def test_a_directory_from_elsewhere_runs_no_code(train, tmp_path):
    directory = train(name="stranger_net")
    config = directory / "config.txt"
    config.write_text(
        config.read_text(encoding="utf-8").replace("width=5", "width=6"), encoding="utf-8"
    )
    with pytest.raises(ModelLoadError, match="but not by you on this machine") as error:
        weft.load(directory)
    assert "pass the model: weft.load(" in str(error.value)
    assert "stranger_net" not in sys.modules
    (tmp_path / "stranger_net.py").rename(tmp_path / "moved.py")
    shutil.copytree(directory, tmp_path / "signed")


def test_a_recipe_that_has_moved(train, tmp_path):
    directory = train(name="moved_net")
    (tmp_path / "moved_net.py").unlink()
    with pytest.raises(RecipeError, match=r"there is no file .*moved_net.py"):
        weft.load(directory)


def test_models_that_only_a_program_can_make(tmp_path):
    fit(NNXNet(nnx.Rngs(0)), tmp_path)
    with pytest.raises(ModelLoadError, match=r"an object of type .*NNXNet") as error:
        weft.load(tmp_path)
    assert f"pass it: weft.load({str(tmp_path)!r}, model)" in str(error.value)
    with pytest.raises(LayerVariablesError, match="layers/0"):
        weft.load(tmp_path, nnx.Linear(4, 3, rngs=nnx.Rngs(0)))

    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    result = fit(Local(), tmp_path / "local")
    with pytest.raises(
        ModelLoadError, match=r"<locals>.Local, which only a program can make. Make it as"
    ):
        weft.load(tmp_path / "local")
    trained = weft.load(tmp_path / "local", Local())
    np.testing.assert_array_equal(trained.predict(X), result.last.predict(X))


def test_an_object_that_differs_is_reported(tmp_path, caplog):
    fit(NNXNet(nnx.Rngs(0)), tmp_path)
    other = NNXNet(nnx.Rngs(0))
    weft.load(tmp_path, other)
    assert not caplog.records
    other.dropout.rate = 0.1
    weft.load(tmp_path, other)
    assert "other attributes may differ" in caplog.text


def test_missing_runs_and_steps(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a directory"):
        weft.load(tmp_path / "missing")
    with pytest.raises(ModelLoadError, match=r"has no run in it: there is no config.txt"):
        weft.load(tmp_path)
    fit(nn.Dense(3), tmp_path, validation=None, evaluate_every=None)
    with pytest.raises(ModelLoadError, match=r"does not say which step is best"):
        weft.load(tmp_path, step="best")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 5"):
        weft.load(tmp_path, step=5)
    with pytest.raises(ModelLoadError, match="step='newest'; expected 'last', 'best' or"):
        weft.load(tmp_path, step="newest")  # pyright: ignore[reportArgumentType]
    fit(nn.Dense(3), tmp_path / "apart", save_every=8, evaluate_every=5)
    record = tmp_path / "run.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    content["batch"][0]["dtype"] = "float1"
    record.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"the batch in run.json .* is damaged"):
        weft.load(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    content["batch"] = None
    record.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointNotFoundError, match="has not saved a checkpoint yet"):
        weft.load(tmp_path)


def test_no_step_was_evaluated(tmp_path):
    fit(nn.Dense(3), tmp_path, steps=4, save_every=3, evaluate_every=2)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    if list((tmp_path / "checkpoints").iterdir()):
        with pytest.raises(ModelLoadError, match=r"no saved step of the run .* has a value of"):
            weft.load(tmp_path, step="best")


def test_parameters_alone(tmp_path, caplog):
    """Neither the model, the optimizer nor the data is needed."""
    result = fit(nn.Dense(3), tmp_path, steps=2, save_every=1)
    (tmp_path / "config.txt").unlink()
    saved = read_params(str(tmp_path))
    assert saved.step == 2
    jax.tree.map(np.testing.assert_array_equal, saved.params, {"model": result.last.variables})
    index = tmp_path / "checkpoints" / "step_00000002" / "index"
    index.write_text(
        index.read_text(encoding="utf-8").replace("4", "400000000000"), encoding="utf-8"
    )
    assert read_params(str(tmp_path)).step == 1
    assert "The parameters of an earlier step are used instead" in caplog.text
    with pytest.raises(DamagedCheckpointError):
        read_params(str(tmp_path), 2)


def test_averages_of_parameters(tmp_path):
    result = fit(nn.Dense(3), tmp_path / "plain")
    cfg = result.config.clone(dir=str(tmp_path / "average"))
    cfg.learner.ema.decay = 0.9
    trainer = cfg.instantiate(parent=None)
    trainer.run(progress=False)
    average = trainer.model_params_for_eval()["model"]
    trained = weft.load(tmp_path / "average", nn.Dense(3))
    jax.tree.map(np.testing.assert_array_equal, trained.variables, average)
    assert trained.step == 8 and weft.load(tmp_path / "average", nn.Dense(3), step="best").step == 1
