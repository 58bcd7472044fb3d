"""Someone shifts images at random, has a loss of two parts, and looks at both parts."""

import re
import textwrap

import numpy as np
import pytest

import weft
from weft import nnx
from weft.errors import WeftError

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

PROGRAM = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from sklearn.datasets import load_digits

    import weft
    from weft import nnx

    class Autoencoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.encoder = nnx.Linear(64, 16, rngs=rngs)
            self.decoder = nnx.Linear(16, 64, rngs=rngs)
            self.head = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, image):
            code = nnx.relu(self.encoder(image.reshape(len(image), -1)))
            return self.decoder(code), self.head(code)

    def shifted(batch, key):
        shift = jax.random.randint(key, (2,), -1, 2)
        return batch | {"image": jnp.roll(batch["image"], shift, axis=(1, 2))}

    def loss(outputs, batch):
        images, logits = outputs
        rebuilt = ((images - batch["image"].reshape(images.shape)) ** 2).mean(axis=-1)
        labels = jax.nn.one_hot(batch["label"], 10)
        classified = -(jax.nn.log_softmax(logits) * labels).sum(axis=-1)
        return rebuilt + classified, {"rebuilt": rebuilt, "classified": classified}

    x, y = load_digits(return_X_y=True)
    data = {"image": np.float32(x[:400].reshape(-1, 8, 8) / 16), "label": y[:400]}
    arguments = dict(target="label", epochs=EPOCHS, batch_size=64, learning_rate=0.01)
    result = weft.fit(
        Autoencoder(nnx.Rngs(0)), data, loss, validation_split=0.2, transform=shifted,
        class_weight=[2.0] + 9 * [1.0], dir=DIR, **arguments,
    )
    """


def run(directory, epochs):
    names = {"EPOCHS": epochs, "DIR": str(directory)}
    exec(textwrap.dedent(PROGRAM), names)
    return names["result"]


def test_parts_of_the_loss_are_shown_and_shifts_are_those_of_the_step(tmp_path, capsys):
    run(tmp_path / "run", 1)
    resumed = run(tmp_path / "run", 2)
    told = capsys.readouterr().err
    whole = run(tmp_path / "whole", 2)

    for history in (resumed.history.train, resumed.history.validation):
        np.testing.assert_allclose(
            history["loss"], history["rebuilt"] + history["classified"], rtol=1e-3
        )
    np.testing.assert_array_equal(resumed.history.train["loss"], whole.history.train["loss"])
    assert resumed.history.validation["classified"][-1] < 2.3
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for part in ("rebuilt", "classified"):
        assert re.search(rf"step \d+/10 .*  {part} \d\.\d+", told)
        assert part in page


@pytest.mark.parametrize(
    ("habit", "name"), [("lr", "learning_rate"), ("patience", "early_stopping")]
)
def test_names_of_other_libraries(habit, name):
    rows = np.ones((4, 3), np.float32)
    with pytest.raises((TypeError, WeftError), match=name):
        weft.fit(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), (rows, rows), "mse", **{habit: 1})
