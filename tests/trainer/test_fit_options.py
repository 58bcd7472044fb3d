"""Arguments of `weft.fit` with which a training is stopped, split, weighted and augmented."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from weft import hierarchy, linen, nnx
from weft.errors import FitError, InputDatasetError, LossError
from weft.metrics import F1Score
from weft.trainer import EarlyStopping, EvalMetric, Hook

pytestmark = pytest.mark.usefixtures("one_device")

ROWS, CLASSES = 24, 3
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
LABELS = np.arange(ROWS) % CLASSES
OPPOSITE = (X, (LABELS + 1) % CLASSES)
"""Held-out labels with which a model gets worse at each step."""


def linear(out=CLASSES):
    return nnx.Linear(4, out, rngs=nnx.Rngs(0))


def fit(data=(X, LABELS), loss="cross_entropy", model=None, **kwargs):
    options = {"steps": 12, "batch_size": 8, "learning_rate": 0.1, "progress": False} | kwargs
    return weft.fit(linear() if model is None else model, data, loss, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": 0.1}, FitError, "no argument 'lr'. Write learning_rate=…"),
        ({"patience": 3}, FitError, "Write early_stopping=3, the number of evaluations"),
        ({"verbose": 0}, FitError, "Write progress=False"),
        ({"validation_data": 0}, FitError, "Write validation=…"),
        ({"batchsize": 3}, FitError, "no argument 'batchsize'. Did you mean 'batch_size'"),
        ({"early_stopping": 1}, FitError, "no validation data; pass validation=… or"),
        ({"best": "accuracy"}, FitError, "best='accuracy', a number of the evaluations, and no"),
        ({"best": "acc", "validation": OPPOSITE}, FitError, "neither 'loss' nor one of metrics"),
        (
            {"best": "mine", "validation": OPPOSITE, "metrics": {"mine": lambda out, batch: out}},
            FitError,
            r"best=\('mine', 'max'\) or best=\('mine', 'min'\)",
        ),
        ({"best": ("loss", "up"), "validation": OPPOSITE}, FitError, "expected 'min' or 'max'"),
        ({"early_stopping": True, "validation": OPPOSITE}, FitError, "early_stopping=True; exp"),
        ({"validation_split": 0.1, "validation": OPPOSITE}, FitError, "expected one of the two"),
        ({"validation_split": 2}, InputDatasetError, "held_out=2 cannot be a fraction"),
        (
            {"validation_split": 0.1, "data": iter([(X, LABELS)]), "batch_size": None},
            InputDatasetError,
            "has no random access",
        ),
        ({"class_weight": {0: 1.0}}, FitError, r"no weight for the classes \[1, 2\]"),
        ({"class_weight": [1, 2, -1]}, FitError, "class_weight=-1 for the class 2"),
        ({"class_weight": [1, 1, 1], "loss": None}, FitError, "it needs a loss, and a target"),
        (
            {"class_weight": [1], "loss": "mse", "data": (X, X[:, :3])},
            FitError,
            r"'y' is float32\[24, 3\]; expected one integer label per row",
        ),
        (
            {"loss": lambda outputs, batch: (outputs.sum(axis=-1), {"kl": outputs.mean()})},
            LossError,
            "one number per row, and 'kl', which it returns with it, is a scalar",
        ),
        ({"save_every": 0}, FitError, "save_every=0; expected 1 or more"),
        ({"transform": lambda batch, key: batch["x"]}, InputDatasetError, "expected the fields"),
        (
            {"transform": lambda batch, key: batch | {"x": batch["x"][:, :2]}},
            InputDatasetError,
            r"returned \['x'\] as float32\[8,2\]; expected float32\[8,4\]",
        ),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        fit(**options)


def test_a_part_is_held_out():
    x, y = np.arange(40, dtype=np.float32)[:, None], np.zeros((40, 1), np.float32)

    class Net(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return x * self.scale

    options = {"epochs": 1, "batch_size": 6, "optimizer": optax.sgd(0.0), "progress": False}
    first = weft.fit(Net(), (x, y), "mae", validation_split=0.25, **options)
    # Without updates, the losses are means of the rows themselves: 30 of them, and 10 others.
    total = first.history.train["loss"].sum() * 6 + first.history.validation["loss"][-1] * 10
    assert len(first.history.train["loss"]) == 5 and float(total) == pytest.approx(x.sum())
    again = weft.fit(Net(), (x, y), "mae", validation_split=0.25, **options)
    assert again.history.validation["loss"] == first.history.validation["loss"]
    other = weft.fit(Net(), (x, y), "mae", validation_split=0.25, seed=1, **options)
    assert other.history.validation["loss"] != first.history.validation["loss"]


def test_a_run_stops_early_and_its_best_state_is_kept(tmp_path):
    result = fit(validation=OPPOSITE, early_stopping=2, evaluate_every=1, dir=str(tmp_path))
    assert result.last.step == 5 and result.best.step == 2
    # The same after the config was edited.
    cfg = result.config.clone(dir=str(tmp_path / "edited"), max_step=10)
    cfg.early_stopping.patience = 4
    trainer = cfg.instantiate(parent=None)
    trainer.run(progress=False)
    assert trainer.step < 10
    stopped = weft.load(cfg.dir, linear(), step="best")
    assert stopped.step == 2 and weft.load(cfg.dir, linear()).step == trainer.step
    # A config of one's own.
    stopping = EarlyStopping.default_config().set(metric=EvalMetric("validation", "loss"))
    assert fit(validation=OPPOSITE, early_stopping=stopping, evaluate_every=2).last.step == 4


def test_an_edited_length_moves_the_last_evaluation_and_the_best_step(tmp_path):
    """The last step is evaluated and saved, also if it is not one of the interval."""
    options = {"validation": (X, LABELS), "evaluate_every": 5}
    cfg = fit(dir=str(tmp_path / "run"), **options).config
    cfg = cfg.clone(dir=str(tmp_path / "edited"), max_step=13)
    cfg.instantiate(parent=None).run(progress=False)
    for step in ("best", "last"):
        assert weft.load(cfg.dir, linear(), step=step).step == 13
    # Continued to another length.
    cfg.clone(max_step=17).instantiate(parent=None).run(progress=False)
    last = weft.load(cfg.dir, linear())
    whole = fit(steps=17, dir=str(tmp_path / "whole"), **options)
    np.testing.assert_array_equal(last.predict(X), whole.last.predict(X))
    assert whole.history.validation["step"].tolist() == [5, 10, 15, 17]


def test_the_best_state_by_a_metric():
    result = fit(
        validation=OPPOSITE,
        metrics={"accuracy": "accuracy", "macro": F1Score("macro")},
        best="macro",
        evaluate_every=1,
    )
    scores = result.history.validation["macro"]
    assert scores[result.history.validation["step"] == result.best.step] == scores.max()
    assert (result.best.metric, result.best.value) == ("macro", scores.max())
    shown = f"TrainedModel(step={result.best.step}, macro={scores.max():.4g})"
    assert repr(result.best) == shown and shown in repr(result)
    assert repr(fit().best) == "TrainedModel(step=12)"
    lowest = fit(
        validation=OPPOSITE, metrics="accuracy", best=("accuracy", "min"), evaluate_every=1
    )
    accuracies = lowest.history.validation["accuracy"]
    index = lowest.history.validation["step"] == lowest.best.step
    assert accuracies[index] == accuracies.min() < accuracies.max()


class LinenNoise(linen.Module):
    @linen.compact
    def __call__(self, x):
        return noisy(linen.Dense(CLASSES)(x), [self.make_rng("first"), self.make_rng("second")])


class ObjectNoise(nnx.Module):
    def __init__(self):
        self.linear = linear()
        self.rngs = nnx.Rngs(params=0, first=1, second=2)

    def __call__(self, x):
        return noisy(self.linear(x), [self.rngs.first(), self.rngs.second(), self.rngs.params()])


class LayerNoise(hierarchy.BaseLayer):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        layer = hierarchy.Linear.default_config()
        self._add_child("linear", layer.set(input_dim=4, output_dim=CLASSES))

    def forward(self, x):
        return noisy(self.linear(x), list(jax.random.split(self.prng_key)))


drawn = []


def noisy(x, keys):
    numbers = jnp.stack([jax.random.normal(key) for key in keys])
    jax.debug.callback(lambda values: drawn.append(tuple(values.tolist())), numbers)
    return x + numbers.sum()


@pytest.mark.parametrize("kind", [LinenNoise, ObjectNoise, LayerNoise])
def test_streams_that_a_model_may_draw_from(kind):
    def run():
        drawn.clear()
        model = kind.default_config() if kind is LayerNoise else kind()
        options = {"validation": (X, LABELS), "evaluate_every": 2}
        result = fit(model=model, steps=4, **options)
        jax.effects_barrier()
        return result, drawn[:]

    result, of_run = run()
    assert len(of_run) > 4, "in training and in evaluations"
    numbers = [number for values in set(of_run) for number in values]
    assert len(set(numbers)) == len(numbers), "of each stream, and at each step"
    assert len(set(of_run)) >= 5
    assert run()[1] == of_run
    np.testing.assert_array_equal(result.last.predict(X), result.last.predict(X))


class Saves(Hook):
    def __init__(self):
        self.steps = []

    def on_checkpoint(self, step):
        self.steps.append(step)


def test_intervals(tmp_path):
    saves = Saves()
    options = {"save_every": 5, "evaluate_every": 7, "dir": str(tmp_path), "callbacks": [saves]}
    result = fit(validation=OPPOSITE, **options)
    assert result.history.validation["step"].tolist() == [7, 12]
    assert saves.steps == [5, 10, 12]


@pytest.mark.parametrize("as_batches", [False, True])
def test_classes_have_weights(as_batches):
    """The first step of gradient descent, against the weighted mean worked out by hand."""
    weights = np.array([1.0, 2.0, 5.0], np.float32)
    data, batch_size = (X, LABELS), ROWS
    if as_batches:
        data, batch_size = [(X, LABELS)], None
    model = linear()
    kernel = jnp.asarray(model.kernel[...])
    options = {"steps": 1, "batch_size": batch_size, "progress": False}
    weft.fit(
        model, data, "cross_entropy", class_weight=weights, optimizer=optax.sgd(1.0), **options
    )

    def loss(kernel):
        log_probabilities = jax.nn.log_softmax(X @ kernel)
        losses = -log_probabilities[np.arange(ROWS), LABELS]
        return (losses * weights[LABELS]).sum() / weights[LABELS].sum()

    expected = kernel - jax.grad(loss)(kernel)
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-5, atol=1e-6)


def test_batches_are_transformed_in_training_alone(tmp_path):
    seen = []

    def noisy(batch, key):
        jax.debug.callback(lambda x: seen.append(float(x)), jax.random.uniform(key))
        return batch | {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)}

    options = {"transform": noisy, "validation": (X, LABELS), "evaluate_every": 4}
    noisy_result = fit(dir=str(tmp_path / "whole"), **options)
    assert len(set(seen)) == 12, "another key at each step, and none in evaluations"
    # A run that is resumed sees the same noise.
    fit(steps=6, dir=str(tmp_path / "part"), **options)
    resumed = fit(dir=str(tmp_path / "part"), **options)
    np.testing.assert_array_equal(resumed.history.train["loss"], noisy_result.history.train["loss"])
    plain = fit(validation=(X, LABELS), evaluate_every=4)
    assert plain.history.train["loss"][0] != noisy_result.history.train["loss"][0]


def test_a_fresh_run_moves_the_old_one_aside(tmp_path):
    directory = tmp_path / "run"
    first = fit(dir=str(directory))
    again = fit(dir=str(directory), learning_rate=0.2, fresh=True)
    assert (tmp_path / "run.1/checkpoints").exists()
    assert first.history.train["loss"][0] == again.history.train["loss"][0]
    assert first.history.train["loss"][-1] != again.history.train["loss"][-1]


def test_weights_of_classes_need_a_loss_per_row():
    with pytest.raises(LossError, match="returned a scalar, which includes the rows"):
        fit(loss=lambda outputs, batch: outputs.mean(), class_weight=[1, 1, 1])


def parts_of_loss(outputs, batch):
    """A loss per row, and two further numbers."""
    error = (outputs - batch["y"]) ** 2
    return error.sum(axis=-1), {"first": error[:, 0], "share": jnp.full(len(error), 0.25)}


class OwnLoss(nnx.Module):
    def __init__(self):
        self.linear = linear(2)

    def __call__(self, batch):
        error = (self.linear(batch["x"]) - batch["y"]) ** 2
        parts = {"first": error[:, 0].mean(), "share": jnp.float32(0.25), "outputs": error}
        return error.sum(axis=-1).mean(), parts


@pytest.mark.parametrize("own", [False, True])
def test_parts_of_a_loss_are_in_the_history(own):
    options = {"steps": 2, "batch_size": 8, "progress": False, "evaluate_every": 2}
    data = (X, X[:, :2])
    if own:
        result = weft.fit(OwnLoss(), data, validation=data, **options)
    else:
        result = weft.fit(linear(2), data, parts_of_loss, validation=(X[:8], X[:8, :2]), **options)
    for values in (result.history.train, result.history.validation):
        assert values["share"].tolist() == [0.25] * len(values["step"])
        assert (values["first"] > 0).all() and (values["first"] < values["loss"]).all()
    assert "outputs" not in result.history.train


def test_result_draws_its_history_and_confusion_matrix():
    result = fit(validation=(X, LABELS), metrics=["accuracy", "confusion_matrix"])
    titles = [axes.get_title() for axes in result.plot().axes]
    assert titles == ["loss", "accuracy", "learning_rate"]
    evaluated, computed = result.confusion_matrix(), result.confusion_matrix((X, LABELS))
    (axes,) = evaluated.axes
    counts = [int(text.get_text()) for text in axes.texts]
    assert counts == [int(text.get_text()) for text in computed.axes[0].texts]
    hits = counts[0] + counts[4] + counts[8]
    row = result.history.validation["step"].tolist().index(result.best.step)
    assert sum(counts) == ROWS and hits == round(ROWS * result.history.validation["accuracy"][row])


def test_confusion_matrix_says_what_it_needs():
    result = fit(steps=2)
    with pytest.raises(FitError, match=r"pass inputs and labels, or call fit with metrics=\["):
        result.confusion_matrix()
    regression = weft.fit(linear(1), (X, X[:, :1]), "mse", steps=2, batch_size=8, progress=False)
    with pytest.raises(FitError, match=r"scores of classes, .*; these have the shape \(24, 1\)"):
        regression.confusion_matrix((X, LABELS))
