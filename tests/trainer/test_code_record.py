"""A run that is started again with other code, values or data is refused, with what differs."""

import importlib
import logging
import sys
import textwrap

import numpy as np
import optax
import pytest

import weft
from weft import linen as nn
from weft import nnx
from weft.cli import main
from weft.errors import CheckpointStructureError, FitError, RunDirError

pytestmark = pytest.mark.usefixtures("one_device")

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = X[:, :2] * 3

MODELS = """
    import jax.numpy as jnp
    from weft import linen as nn
    from weft import nnx

    SCALE = 2.0

    def scaled(x):
        return x * SCALE

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scaled(Block()(x))  # a comment

    class NNXNet(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
            self.activation = lambda x: x + 1

        def __call__(self, x):
            return self.activation(self.linear(x))

    def loss(outputs, batch):
        return ((outputs - batch["y"]) ** 2).mean(-1)

    def make_loss(power):
        return lambda outputs, batch: (abs(outputs - batch["y"]) ** power).mean(-1)

    class Layer:
        pass
    """


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Imports the models above, with replacements in their text, as another process would."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(*replacements, name="edited_models"):
        text = textwrap.dedent(MODELS)
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        # A file that is written twice within a second may have compiled code of the first.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module(name)

    yield load
    sys.modules.pop("edited_models", None)


@pytest.fixture
def fit(tmp_path):
    def run(model, loss="mse", data=(X, Y), **kwargs):
        options = {"steps": 2, "batch_size": 8, "progress": False, "dir": str(tmp_path / "run")}
        if isinstance(data, list):
            del options["batch_size"]
        return weft.fit(model, data, loss, **(options | kwargs))  # pyright: ignore[reportArgumentType]

    return run


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (("nn.Dense(2)(x)", "nn.Dense(2)(x) + 1"), "the code of edited_models.Block has changed"),
        (("return x * SCALE", "return x + SCALE"), "the code of edited_models.scaled has changed"),
        (("SCALE = 2.0", "SCALE = 0.5"), "edited_models.SCALE: 2.0 → 0.5"),
        (('["y"]) ** 2).mean(-1)', '["y"]) ** 2).sum(-1)'), "code of edited_models.loss has"),
    ],
)
def test_other_code_is_refused(replacement, message, models, fit):
    first = models()
    fit(first.Net(), first.loss)
    again = models(replacement)
    with pytest.raises(RunDirError, match="belongs to a run with other code") as error:
        fit(again.Net(), again.loss, steps=3)
    text = str(error.value)
    assert message in text and "fresh=True" in text and "--fresh" in text
    assert "with resume=True or --resume" in text


def test_code_that_computes_the_same(models, fit):
    first = models()
    fit(first.Net(), first.loss)
    again = models(
        ("# a comment", "# another"),
        ("class Layer:\n    pass", "class Layer:\n    other = 1"),
        ("def scaled(x):", 'def scaled(x):\n    "With a docstring."\n'),
    )
    assert fit(again.Net(), again.loss, steps=3).last.step == 3


def test_run_continues_with_other_code(models, fit, caplog):
    first = models()
    fit(first.Net(), first.loss)
    again = models(("return x * SCALE", "return x + SCALE"))
    message = "the code of edited_models.scaled has changed"
    resumed = fit(again.Net(), again.loss, steps=3, resume=True)
    assert resumed.last.step == 3 and len(resumed.history.train["step"]) == 3
    assert "The run continues, as resume=True says." in caplog.text and message in caplog.text
    # From now on, this is the run's code.
    fit(again.Net(), again.loss, steps=4)
    assert fit(first.Net(), first.loss, steps=3, fresh=True).last.step == 3


def test_functions_without_a_name(models, fit):
    first = models()
    fit(first.NNXNet(), first.make_loss(2))
    fit(first.NNXNet(), first.make_loss(2), steps=3)
    with pytest.raises(RunDirError, match=r"model.loss.power: 2 → 4"):
        fit(first.NNXNet(), first.make_loss(4), steps=4)
    again = models(("lambda x: x + 1", "lambda x: x + 2"))
    with pytest.raises(RunDirError, match=r"the code of model\.layer\.activation, edited_models"):
        fit(again.NNXNet(), again.make_loss(2), steps=4)
    # The rest of a lambda's line does not count.
    again = models(("lambda x: x + 1", "lambda x:  x+1; unused = 1"))
    with pytest.raises(RunDirError, match=r"the code of edited_models.NNXNet has changed") as error:
        fit(again.NNXNet(), again.make_loss(2), steps=4)
    assert "activation" not in str(error.value)


OTHER_OPTIMIZERS = [
    (optax.chain(optax.clip(1.0), optax.sgd(0.2)), r"step_size: -0.1 → -0.2"),
    (optax.chain(optax.clip(2.0), optax.sgd(0.1)), r"max_delta: 1.0 → 2.0"),
    (optax.chain(optax.clip(1.0), optax.adam(0.1)), r"learner\.optimizer\.transformation"),
    (optax.chain(optax.sgd(0.1)), r"learner\.optimizer\.transformation"),
    ("sgd", "belongs to a run with another config"),
]


def test_optimizers(fit):
    fit(nn.Dense(2), optimizer=optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    fit(nn.Dense(2), optimizer=optax.chain(optax.clip(1.0), optax.sgd(0.1)), steps=3)
    for optimizer, message in OTHER_OPTIMIZERS:
        with pytest.raises(RunDirError, match=message) as error:
            fit(nn.Dense(2), optimizer=optimizer, steps=4)
        assert "start afresh with fresh=True of weft.fit or --fresh" in str(error.value)


def test_schedules(fit):
    rate = optax.cosine_decay_schedule
    fit(nn.Dense(2), learning_rate=rate(0.1, 10))
    with pytest.raises(RunDirError, match=r"init_value: 0.1 → 0.2"):
        fit(nn.Dense(2), learning_rate=rate(0.2, 10))
    fit(nn.Dense(2), learning_rate=rate(0.1, 10), steps=3)


def test_data(fit):
    fit(nn.Dense(2))
    with pytest.raises(RunDirError, match=r"input: \+ .*digest") as error:
        fit(nn.Dense(2), data=(X, Y + 1), steps=3)
    assert "resume=True" in str(error.value)
    assert fit(nn.Dense(2), data=(X, Y + 1), steps=3, resume=True).last.step == 3
    batches = [(X, Y), (X, Y)]
    fit(nn.Dense(2), data=batches, fresh=True)
    fit(nn.Dense(2), data=batches, steps=3)
    with pytest.raises(RunDirError, match=r"input.batches: batches .* → batches"):
        fit(nn.Dense(2), data=[(X, Y), (X, Y + 1)], steps=4)


class Shuffled:
    """Batches in another order each time."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        order = self.rng.permutation(len(X))
        yield X[order], Y[order]

    def __len__(self):
        return 1


def test_data_in_another_order_each_time_is_no_other_data(fit):
    fit(nn.Dense(2), data=Shuffled(), batch_size=None)
    assert fit(nn.Dense(2), data=Shuffled(), batch_size=None, steps=3).last.step == 3


def test_another_model_cannot_be_resumed(fit):
    fit(nn.Dense(2))
    with pytest.raises(RunDirError, match="belongs to a run with another config"):
        fit(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), steps=3)
    with pytest.raises(CheckpointStructureError):
        fit(nn.Sequential([nn.Dense(3), nn.Dense(2)]), steps=3, resume=True)
    with pytest.raises(FitError, match="expected one of the two"):
        fit(nn.Dense(2), steps=3, resume=True, fresh=True)


def test_a_run_that_has_finished_says_so(fit, caplog, capsys, tmp_path):
    fit(nn.Dense(2))
    assert not caplog.records
    result = fit(nn.Dense(2))
    assert "Nothing was trained: the run in" in caplog.text and "fresh=True" in caplog.text
    assert result.last.step == 2
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        fit(nn.Dense(2), progress=True)
    assert "finished at step 2 already, nothing to train" in capsys.readouterr().err


def test_the_command_line(tmp_path, monkeypatch, capsys):
    recipe = """
        import numpy as np
        import optax
        from weft import nnx
        from weft.config import config_for_class, config_for_function
        from weft.input import ArrayInput, Arrays
        from weft.trainer import Learner, SpmdTrainer

        class Net(nnx.Module):
            def __init__(self, *, rngs: nnx.Rngs):
                self.out = nnx.Linear(4, 1, rngs=rngs)

            def __call__(self, batch):
                return (self.out(batch["x"]) ** 2).mean(), {}

        def data():
            return Arrays({"x": np.ones((16, 4), np.float32)})

        def recipe():
            optimizer = config_for_function(optax.sgd).set(learning_rate=0.1)
            return SpmdTrainer.default_config().set(
                name="trainer", dir="run", max_step=2, model=config_for_class(Net),
                input=ArrayInput.default_config().set(
                    arrays=config_for_function(data), global_batch_size=8),
                learner=Learner.default_config().set(optimizer=optimizer),
                mesh_shape=(-1,), mesh_axis_names=("data",))
        """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "recorded_net.py"

    recipe = textwrap.dedent(recipe)

    def train(*words, text=recipe):
        file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        try:
            return main(["train", *words, "recorded_net.py:recipe"])
        finally:
            sys.modules.pop("recorded_net", None)

    assert train() == 0
    edited = recipe.replace("** 2).mean()", "** 4).mean()")
    assert train(text=edited) == 2
    error = capsys.readouterr().err
    assert "the code of recorded_net.Net has changed" in error and "--resume" in error
    assert train("--fresh", "--resume", text=edited) == 2
    assert "write one of the two" in capsys.readouterr().err
    assert train("--resume", text=edited) == 0
    output = capsys.readouterr().out
    assert "finished at step 2 already, nothing to train" in output
    assert train("--fresh", text=edited.replace("np.ones", "2 * np.ones")) == 0
