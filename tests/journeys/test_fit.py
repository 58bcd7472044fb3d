"""Someone with scikit-learn's digits trains a network of images in at most twelve lines."""

import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

IMPORTS = """\
import numpy as np
from sklearn.datasets import load_digits

import weft
from weft import linen as nn
"""

# The README has one of NNX and one of the hierarchy, on rows of numbers.
PROGRAM = """\
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
"""


def test_digits(tmp_path):
    assert len(PROGRAM.splitlines()) <= 12

    def run(epochs):
        names = {"EPOCHS": epochs, "DIR": str(tmp_path)}
        exec(IMPORTS + PROGRAM, names)
        return names["result"], names["accuracy"]

    run(epochs=2)
    result, accuracy = run(epochs=4)  # continues
    validation = result.history.validation
    assert len(validation["step"]) == 4
    assert accuracy > 0.87
    np.testing.assert_allclose(accuracy, validation["accuracy"][-1], atol=1e-6)
    assert result.best.step == validation["step"][np.argmin(validation["loss"])]
