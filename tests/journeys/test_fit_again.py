"""Someone whose own work goes through `fit`: stops early, loads the best model, changes things.

The scripts import their modules again each time, as processes of their own do.
"""

import runpy
import sys
import textwrap

import pytest

from weft.errors import WeftError

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

NET = """
    import jax
    from weft import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.hidden = nnx.Linear(64, 32, rngs=rngs)
            self.out = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.hidden(x)))

    def loss(logits, batch):
        labels = jax.nn.one_hot(batch["y"], 10)
        return -(jax.nn.log_softmax(logits) * labels).sum(axis=-1)
    """
DATA = """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    train, held_out = (x[:300] / 16, y[:300]), (x[1400:] / 16, y[1400:])
    """
TRAIN = """
    import sys
    import optax
    import weft
    from weft import nnx
    from digits_data import train, held_out
    from net import Net, loss

    options = {"epochs": 4, "optimizer": optax.adam(0.003)} | eval(sys.argv[1])
    result = weft.fit(
        Net(nnx.Rngs(0)), train, loss, validation=held_out, metrics="accuracy",
        best="accuracy", dir="runs/digits", **options,
    )
    print("trained to", result.last.step, "best", result.best.step)
    """
USE = """
    import numpy as np
    import weft
    from weft import nnx
    from digits_data import held_out
    from net import Net

    model = Net(nnx.Rngs(5))
    trained = weft.load("runs/digits", model, step="best")
    right = trained.predict(held_out[0]).argmax(-1) == held_out[1]
    print("best", trained.step, "accuracy", round(float(right.mean()), 2))
    assert (model(held_out[0]).argmax(-1) == held_out[1]).sum() == right.sum()
    assert right.mean() > 0.6
    """


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Writes a script and runs it; returns what it prints, or the error that ends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def script(name, text, *arguments):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        forget_modules()
        try:
            runpy.run_path(str(path), run_name="__main__")
        except WeftError as error:
            return f"error: {error}"
        output = capsys.readouterr()
        return output.out + output.err

    def forget_modules():
        for name in ("digits_data", "net", "cnn"):
            sys.modules.pop(name, None)

    yield script
    forget_modules()


def test_own_model_stopped_early_loaded_and_changed(run, tmp_path):
    (tmp_path / "digits_data.py").write_text(textwrap.dedent(DATA), encoding="utf-8")
    (tmp_path / "net.py").write_text(textwrap.dedent(NET), encoding="utf-8")

    # Stops early, and keeps the best.
    stopped = run("train.py", TRAIN, "{'epochs': 300, 'early_stopping': 0}")
    words = next(line for line in stopped.splitlines() if line.startswith("trained to")).split()
    last, best = int(words[2]), words[4]
    assert last < 3000
    # Another program loads it, without the training data.
    assert f"best {best} accuracy" in run("use.py", USE)

    # The same again trains nothing, and says so.
    again = run("train.py", TRAIN, "{'epochs': 300, 'early_stopping': 0}")
    assert f"trained to {last}" in again

    # The loss is edited: nothing is trained silently with the old one's checkpoint.
    edited = NET.replace(".sum(axis=-1)", ".sum(axis=-1) * 2")
    (tmp_path / "net.py").write_text(textwrap.dedent(edited), encoding="utf-8")
    refused = run("train.py", TRAIN, "{'epochs': 300}")
    assert refused.startswith("error: ")
    assert "the code of net.loss has changed" in refused
    assert "fresh=True" in refused and "resume=True" in refused
    other = run("train.py", TRAIN, "{'epochs': 300, 'optimizer': optax.adam(0.01)}")
    assert "step_size: -0.003 → -0.01" in other

    assert "trained to 10 " in run("train.py", TRAIN, "{'epochs': 1, 'fresh': True}")
    assert (tmp_path / "runs" / "digits.1" / "checkpoints").is_dir()
    (tmp_path / "net.py").write_text(textwrap.dedent(NET), encoding="utf-8")
    assert "trained to 19 " in run("train.py", TRAIN, "{'epochs': 2, 'resume': True}")
    finished = run("train.py", TRAIN, "{'epochs': 2}")
    assert "finished at step 19 already, nothing to train" in finished


CNN = """
    from weft import linen as nn

    class CNN(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.BatchNorm(not train)(nn.Dense(self.width)(x))
            return nn.Dense(10)(nn.relu(x))
    """


def test_a_model_of_linen_needs_no_second_argument(run, tmp_path):
    (tmp_path / "digits_data.py").write_text(textwrap.dedent(DATA), encoding="utf-8")
    (tmp_path / "cnn.py").write_text(textwrap.dedent(CNN), encoding="utf-8")
    fit = """
        import weft
        from cnn import CNN
        from digits_data import train, held_out

        weft.fit(CNN(16), train, "cross_entropy", epochs=2, validation=held_out, dir="runs/cnn")
        """
    run("fit.py", fit)
    load = """
        import numpy as np
        import weft

        trained = weft.load("runs/cnn", step="best")
        print(trained.model.width, trained.predict(np.ones((2, 64))).shape)
        """
    assert "16 (2, 10)" in run("load.py", load)
