"""Someone with scikit-learn's digits trains a model of each kind in at most twelve lines."""

import textwrap

import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

IMPORTS = """\
import numpy as np
from sklearn.datasets import load_digits

import weft
from weft import hierarchy, nnx
from weft import linen as nn
"""

PROGRAMS = {
    "nnx": """\
        x, y = load_digits(return_X_y=True)
        train, held_out = (x[:1400] / 16, y[:1400]), (x[1400:] / 16, y[1400:])
        up, down = (nnx.Linear(64, n, rngs=nnx.Rngs(n)) for n in (64, 10))
        model = nnx.Sequential(up, nnx.relu, down)
        result = weft.fit(
            model, train, "cross_entropy", epochs=EPOCHS, validation=held_out,
            metrics="accuracy", learning_rate=0.003, dir=DIR,
        )
        accuracy = np.mean(model(held_out[0]).argmax(-1) == held_out[1])
        """,
    "linen": """\
        x, y = load_digits(return_X_y=True)
        split = {"image": np.split(x.reshape(-1, 8, 8, 1), [1400]), "label": np.split(y, [1400])}
        train, held_out = ({k: v[i] for k, v in split.items()} for i in range(2))
        class CNN(nn.Module):
            @nn.compact
            def __call__(self, x, train: bool):
                x = nn.relu(nn.BatchNorm(not train)(nn.Conv(16, (3, 3))(x)))
                return nn.Dense(10)(nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1))
        result = weft.fit(CNN(), train, "cross_entropy", epochs=EPOCHS, validation=held_out,
                          metrics="accuracy", dir=DIR)
        logits = CNN().apply(result.last.variables, held_out["image"], train=False)
        accuracy = np.mean(logits.argmax(-1) == held_out["label"])
        """,
    "hierarchy": """\
        x, y = load_digits(return_X_y=True)
        train, held_out = (x[:1400] / 16, y[:1400]), (x[1400:] / 16, y[1400:])
        model = hierarchy.Linear.default_config().set(input_dim=64, output_dim=10)
        result = weft.fit(
            model, train, "cross_entropy", epochs=EPOCHS, validation=held_out, metrics="accuracy",
            optimizer="adamw", learning_rate=0.01, dir=DIR,
        )
        accuracy = np.mean(result.last.predict(held_out[0]).argmax(-1) == held_out[1])
        """,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_digits(kind, tmp_path):
    program = textwrap.dedent(PROGRAMS[kind])
    assert len(program.splitlines()) <= 12

    def run(epochs):
        names = {"EPOCHS": epochs, "DIR": str(tmp_path)}
        exec(IMPORTS + program, names)
        return names["result"], names["accuracy"]

    run(epochs=2)
    result, accuracy = run(epochs=6)  # continues
    validation = result.history.validation
    assert len(validation["step"]) == 6
    assert accuracy > 0.87
    np.testing.assert_allclose(accuracy, validation["accuracy"][-1], atol=1e-6)
    assert result.best.step == validation["step"][np.argmin(validation["loss"])]
