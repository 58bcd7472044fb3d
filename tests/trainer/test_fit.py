"""`weft.fit`: what it accepts, what it refuses, and what it returns."""

import os
import signal
import warnings

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import metrics as sklearn

import weft
from weft import linen as nn
from weft import nnx
from weft.config import config_for_class
from weft.errors import (
    FitError,
    HookError,
    InputDatasetError,
    InputReadError,
    InvalidConfigValueError,
    LayerMethodError,
    LossError,
    ModelCallError,
    RunDirError,
)
from weft.functional import default_dot_general, int8_dot_general
from weft.hierarchy import BaseModel, Linear, WeightedScalar
from weft.metrics import AllRows, F1Score
from weft.trainer import EndRun, Hook

pytestmark = pytest.mark.usefixtures("one_device")

ROWS, CLASSES = 24, 3
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
LABELS = np.arange(ROWS) % CLASSES
Y = X.sum(axis=1, keepdims=True)


def linear(out=CLASSES, seed=0):
    return nnx.Linear(4, out, rngs=nnx.Rngs(seed))


def fit(model=None, data=(X, LABELS), loss="cross_entropy", **kwargs):
    kwargs = {"steps": 3, "batch_size": 8} | kwargs
    return weft.fit(model or linear(), data, loss, **kwargs)


def linear_of(in_features):
    return nnx.Linear(in_features, CLASSES, rngs=nnx.Rngs(0))


class OwnLoss(nn.Module):
    @nn.compact
    def __call__(self, batch):
        out = nn.Dense(1)(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), {}


class NoLoss(nn.Module):
    @nn.compact
    def __call__(self, x, y):
        return nn.Dense(1)(x) + y


def per_row(out, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(out), batch["y"][:, None], -1)[:, 0]


def f1(out, batch):
    """Not a mean: the F1 score of class 1."""
    predicted, actual = out.argmax(-1) == 1, batch["y"] == 1
    return 2 * (predicted & actual).sum() / (predicted.sum() + actual.sum() + 1e-9)


def right(out, batch):
    return jnp.mean(out.argmax(-1) == batch["y"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": None}, FitError, "epochs=None and steps=None; expected one of the two"),
        ({"epochs": 2}, FitError, "epochs=2 and steps=3; expected one of the two"),
        ({"precision": "int4"}, InvalidConfigValueError, "'int4' is not a policy.*'int8'"),
        ({"steps": 0}, FitError, "steps=0; expected 1 or more"),
        ({"loss": "crossentropy"}, LossError, "no loss 'crossentropy'.*'cross_entropy'"),
        ({"metrics": "acuracy"}, LossError, "no metric 'acuracy'.*'accuracy'"),
        ({"optimizer": "adamm"}, FitError, "no optimizer 'adamm'. Did you mean 'adam'"),
        ({"optimizer": optax.sgd(0.1), "learning_rate": 1.0}, FitError, "has its own; set it"),
        ({"batch_size": 32}, InputDatasetError, "batch of 32 rows is larger than the data.* 24"),
        ({"data": (X, LABELS[1:])}, InputDatasetError, r"x \(24, 4\), y \(23,\)"),
        ({"data": (X[:0], LABELS[:0])}, InputDatasetError, "x, y have no rows"),
        ({"data": (X, LABELS, LABELS)}, InputDatasetError, "data is a tuple of 3; expected a pair"),
        (
            {"data": [X, LABELS], "batch_size": None},
            InputDatasetError,
            "ndarray.*a tuple, .x, y., not a list",
        ),
        ({"data": iter([]), "batch_size": None}, InputDatasetError, "no batch in the iterable"),
        ({"data": 3}, FitError, "data is a int; expected a pair of arrays"),
        ({"data": [(X, LABELS)]}, FitError, "batch_size=8, but data is a list, an iterable"),
        ({"data": (X, LABELS.astype(np.float32))}, LossError, "dtype float32; expected integers"),
        ({"data": (X, np.eye(3)[LABELS])}, LossError, r"\(8, 3\) and the targets \(8, 3\)"),
        ({"data": (X, LABELS + 1)}, InputDatasetError, "data: 'y' has values from 1 to 3.* 0 to 2"),
        ({"validation": (X, LABELS - 1)}, InputDatasetError, "validation: 'y' .*-1 to 1"),
        (
            {"data": (np.where(X > 2, np.nan, X), LABELS)},
            InputDatasetError,
            "data: 'x' has NaN or infinite numbers, the first in row",
        ),
        ({"loss": "mse", "data": (X, Y[:, 0])}, LossError, r"\(8, 3\) and the targets \(8,\)"),
        ({"data": {"image": X, "class": LABELS}}, LossError, "no field for them; name it"),
        ({"data": {"x": X, "y": LABELS}, "target": "z"}, LossError, "no field target='z'"),
        (
            {"data": {"x": X, "y": LABELS, "row_weight": Y}},
            InputDatasetError,
            r"'row_weight' has shape \(24, 1\) .*; expected the weight of each row",
        ),
        ({"model": NoLoss()}, TypeError, r"missing 1 required positional argument: 'y'"),
        ({"model": NoLoss(), "loss": None}, ModelCallError, "requires more arguments"),
        ({"metrics": 3}, FitError, "a metric of type int; expected a name, a function"),
        (
            {"metrics": ["f1", F1Score("macro")]},
            FitError,
            "two metrics of the name 'f1'; name them",
        ),
        ({"metrics": "f1"}, LossError, "F1Score got outputs of 3 classes.*average='macro'"),
        ({"metrics": f1, "validation": (X, LABELS)}, LossError, "'f1' is a scalar .*AllRows.f1."),
        (
            {"metrics": F1Score("micro"), "loss": per_row, "data": (X, LABELS + 1)},
            InputDatasetError,
            "data: 'y' has values from 1 to 3.* 0 to 2",
        ),
        ({"loss": None, "metrics": "accuracy"}, FitError, "metrics=.'accuracy'. without a loss"),
        ({"loss": lambda out, batch: out}, LossError, r"returned shape \(8, 3\) for a batch of 8"),
        (
            {"loss": lambda out, batch: out.mean(), "validation": (X[:21], LABELS[:21])},
            FitError,
            "last batch has 5, which do not divide over 8 devices",
        ),
        ({"validation": iter([(X, LABELS)]), "batch_size": None}, FitError, "comes once"),
    ],
)
@pytest.mark.usefixtures("all_devices")
def test_mistakes_are_refused_before_the_first_step(change, error, message, monkeypatch):
    monkeypatch.setattr("weft.trainer.trainer.SpmdTrainer.run", None)
    with pytest.raises(error, match=message):
        fit(**change)


def test_silent_broadcasts_are_refused():
    with pytest.raises(LossError, match=r"\(8, 1\) and the targets \(8,\).*`y\[:, None\]`"):
        fit(linear(1), (X, Y[:, 0]), "mse")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"model": linear_of(5)}, "The model was called with float32[8, 4]"),
        ({"loss": optax.softmax_cross_entropy_with_integer_labels}, "the batch, a dict of x, y."),
        ({"loss": None}, "was called with a batch, a dict of x, y."),
    ],
    ids=["model", "loss", "no loss"],
)
def test_errors_say_what_was_called_with_what(change, note):
    with pytest.raises(ValueError, match=r"in_features=5|entry") as caught:
        fit(**change)
    assert any(note in line for line in caught.value.__notes__)


def batches(n, labels=LABELS):
    for _ in range(n):
        yield X[:8], labels[:8]


def test_an_iterator_that_ends_too_early():
    with pytest.raises(InputDatasetError, match=r"ended after 2 of 3 steps.*such as a list"):
        fit(data=batches(2), batch_size=None)


def test_each_batch_is_checked():
    data = [*batches(1), *batches(1, LABELS + 1)]
    with pytest.raises(InputReadError, match="a batch of data: 'y' has values from 1 to 3"):
        fit(data=data, batch_size=None)


def examples():
    return [{"x": x, "label": label} for x, label in zip(X, LABELS, strict=True)]


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ({"data": {"image": X.astype(float), "label": LABELS}, "batch_size": 8}, 6),
        ({"data": grain.MapDataset.source(examples()), "batch_size": 8}, 6),
        ({"data": grain.MapDataset.source(examples()).batch(8)}, 6),
        ({"data": list(batches(2))}, 4),
    ],
    ids=["dict", "grain examples", "grain batches", "list"],
)
def test_forms_of_data(data, steps):
    held_out = {"validation": data["data"]}
    result = fit(
        **(data | held_out),
        steps=None,
        epochs=2,
        **({} if "batch_size" in data else {"batch_size": None}),
    )
    assert result.history.train["step"].tolist() == list(range(1, steps + 1))
    assert result.history.validation["step"].tolist() == [steps // 2, steps]
    first, *_, last = result.history.validation["loss"]
    assert last < first


def scalar(out, batch):
    return per_row(out, batch).mean()


@pytest.mark.parametrize(("loss", "rows", "batch_size"), [(per_row, 21, 8), (scalar, 24, 16)])
@pytest.mark.usefixtures("all_devices")
def test_validation_is_over_all_rows(loss, rows, batch_size):
    """The last batch is padded, or smaller for a loss that is a scalar."""
    held_out = (X[:rows], LABELS[:rows])
    result = fit(validation=held_out, loss=loss, batch_size=batch_size)
    wanted = scalar(result.last.predict(held_out[0]), {"y": held_out[1]})
    np.testing.assert_allclose(result.history.validation["loss"][-1], wanted, rtol=1e-5)


@pytest.mark.usefixtures("all_devices")
def test_metrics_that_are_not_means_are_over_all_rows():
    """The last of three batches has 5 rows, and one label is rare."""
    labels = np.where(np.arange(21) % 7 == 0, 2, LABELS[:21] % 2)
    held_out = (X[:21], labels)
    metrics = {"macro": F1Score("macro"), "each": F1Score(None), "rows": AllRows(f1), "mean": right}
    named = ["auc", "confusion_matrix", "perplexity"]
    result = fit(validation=held_out, metrics={**metrics, **{name: name for name in named}})
    values = {name: x[-1] for name, x in result.history.validation.items()}
    outputs = result.last.predict(X[:21])
    probabilities, predicted = jax.nn.softmax(outputs), outputs.argmax(-1)
    wanted = {
        "macro": sklearn.f1_score(labels, predicted, average="macro"),
        "each": sklearn.f1_score(labels, predicted, average=None),
        "rows": f1(outputs, {"y": labels}),
        "mean": np.mean(predicted == labels),
        "auc": sklearn.roc_auc_score(labels, probabilities, multi_class="ovr"),
        "confusion_matrix": sklearn.confusion_matrix(labels, predicted),
        "perplexity": np.exp(sklearn.log_loss(labels, probabilities)),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)
    assert result.history.validation["each"].shape == (3, 3)
    assert result.history.train["confusion_matrix"].sum((1, 2)).tolist() == [8, 8, 8]


def test_a_scalar_that_cannot_be_called_for_a_row():
    def on_host(out, batch):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda x: np.float32(x.mean()), shape, out)

    with pytest.raises(NotImplementedError) as caught:
        fit(validation=(X, LABELS), metrics=on_host)
    assert any("weft.metrics.AllRows(on_host)" in note for note in caught.value.__notes__)


def test_a_scalar_that_turns_out_to_be_no_mean():
    """At first all rows are equal, as far as the metric can tell."""

    def hidden(out, batch):
        return jnp.where(jnp.abs(out).max() < 50, 1.0, f1(out, batch))

    with pytest.raises(LossError, match="'hidden' is a scalar that is not a mean over rows"):
        fit(validation=(X, LABELS), metrics=hidden, learning_rate=100.0)


class Sows(nn.Module):
    @nn.compact
    def __call__(self, batch):
        logits = nn.Dense(CLASSES)(batch["x"])
        self.sow("summaries", "f1", F1Score("macro").update(logits, batch["y"]))
        return per_row(logits, batch).mean(), {}


class SowsInNNX(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, batch):
        logits = self.linear(batch["x"])
        self.sow("summaries", "f1", F1Score("macro").update(logits, batch["y"]))
        return per_row(logits, batch).mean(), {}


class Reports(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=4, output_dim=CLASSES))

    def forward(self, input_batch):
        logits = self.linear(input_batch["x"])
        self.add_summary("f1", F1Score("macro").update(logits, input_batch["y"]))
        return WeightedScalar(per_row(logits, input_batch).mean(), len(logits)), {}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Sows(), ("params", "Dense_0", "kernel", "bias")),
        (config_for_class(SowsInNNX), ("params", "linear", "kernel", "bias")),
        (Reports.default_config(), ("linear", "weight", "bias")),
    ],
    ids=["linen", "nnx", "hierarchy"],
)
def test_metrics_that_a_model_reports_itself(model, names):
    held_out = (X[:21], LABELS[:21])
    result = fit(model, loss=None, validation=held_out)
    *path, kernel, bias = names
    variables = result.last.variables
    for name in path:
        variables = variables[name]
    logits = X[:21] @ np.asarray(variables[kernel]) + np.asarray(variables[bias])
    predicted = logits.argmax(-1)
    wanted = sklearn.f1_score(LABELS[:21], predicted, average="macro")
    np.testing.assert_allclose(result.history.validation["f1"][-1], wanted, rtol=1e-5)


class HierarchyLoss(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=4, output_dim=1))

    def forward(self, input_batch):
        errors = (self.linear(input_batch["x"]) - input_batch["y"])[:, 0]
        self.add_summary("loss", WeightedScalar(jnp.mean(errors**2), errors.size))
        return jnp.mean(errors**2), {}


@pytest.mark.parametrize(
    "model",
    [OwnLoss(), HierarchyLoss.default_config()],
    ids=["linen", "hierarchy"],
)
def test_models_with_their_own_loss(model):
    result = fit(model, (X, Y), None, steps=40, learning_rate=0.1, validation=(X, Y))
    assert result.history.validation["loss"][-1] < 0.1 * result.history.validation["loss"][0]
    with pytest.raises(LayerMethodError, match="predict is for models that were given a loss"):
        result.last.predict(X)


@pytest.mark.parametrize(
    "model",
    [
        lambda: config_for_class(nnx.Linear).set(in_features=4, out_features=1),
        lambda: Linear.default_config().set(input_dim=4, output_dim=1),
    ],
    ids=["config", "hierarchy"],
)
def test_kinds_of_models(model):
    result = fit(model(), (X, Y), "mse", steps=60, optimizer=optax.adam(0.1))
    np.testing.assert_allclose(result.best.predict(X), Y, atol=0.3)
    assert result.best is result.last
    assert result.history.validation == {}


@pytest.mark.parametrize("make", [linear, lambda: nn.Dense(CLASSES)], ids=["nnx", "linen"])
def test_precision_holds_in_the_run_and_for_predictions(make):
    model = make()
    result = fit(model, precision="int8", validation=(X, LABELS))
    outputs = result.last.predict(X)
    with default_dot_general(int8_dot_general):
        np.testing.assert_array_equal(call(model, result, X), outputs)
    assert (call(model, result, X) != outputs).any()
    other = fit(make(), validation=(X, LABELS)).history
    for of in ("train", "validation"):
        ours, theirs = (getattr(history, of)["loss"] for history in (result.history, other))
        assert (ours != theirs).all()
        np.testing.assert_allclose(ours, theirs, rtol=0.02)


def test_run_is_resumed_with_its_precision(tmp_path):
    kwargs = {"precision": "int8", "validation": (X, LABELS)}
    fit(**kwargs, dir=str(tmp_path / "a"))
    resumed = fit(**kwargs, dir=str(tmp_path / "a"), steps=6)
    whole = fit(**kwargs, steps=6)
    assert resumed.history.train["loss"].tolist() == whole.history.train["loss"].tolist()
    with pytest.raises(RunDirError, match=r"precision: - 'int8'\n  precision: \+ 'fp8'"):
        fit(**kwargs | {"precision": "fp8"}, dir=str(tmp_path / "a"))


def call(model, result, x):
    if isinstance(model, nnx.Module):
        return model(x)
    return model.apply(result.last.variables, x)


def test_config_can_be_run_and_the_seed_determines_the_run(tmp_path):
    result = fit(nn.Dense(3), seed=1)
    trainer = result.config.clone(dir=str(tmp_path)).instantiate(parent=None)
    trainer.run()
    again = trainer.trainer_state.model["model"]
    jax.tree.map(np.testing.assert_array_equal, again, result.last.variables)
    other = fit(nn.Dense(3), seed=2).last.variables["params"]["kernel"]
    assert not np.array_equal(other, result.last.variables["params"]["kernel"])


def test_best_state_is_kept_and_restored(tmp_path):
    """Validation on the opposite labels gets worse with each step."""
    opposite = (X, (LABELS + 1) % CLASSES)
    model = linear()
    result = fit(model, steps=12, learning_rate=0.1, validation=opposite, dir=str(tmp_path))
    assert (result.best.step, result.last.step) == (2, 12)
    np.testing.assert_array_equal(model.kernel[...], result.last.variables["params"]["kernel"])
    result.best.update(model)
    np.testing.assert_array_equal(model(X), result.best.predict(X))
    again = fit(steps=15, learning_rate=0.1, validation=opposite, dir=str(tmp_path))
    assert (again.best.step, again.last.step) == (2, 15)
    np.testing.assert_array_equal(again.best.predict(X), result.best.predict(X))
    assert again.history.train["step"].tolist() == list(range(1, 16))
    without = fit(steps=16, learning_rate=0.1, dir=str(tmp_path))
    assert without.best is without.last


class Chain(nnx.Module):
    def __init__(self, activation=nnx.relu, rate=0.0, seed=0):
        self.linear, self.activation = linear(seed=seed), activation
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.dropout(self.activation(self.linear(x)))


def test_an_object_of_another_structure_is_refused(tmp_path):
    fit(Chain(), dir=str(tmp_path))
    fit(Chain(seed=1), dir=str(tmp_path), steps=4)
    for other in (Chain(nnx.tanh), Chain(rate=0.5)):
        with pytest.raises(RunDirError, match=r"Chain with structure .*\n.*Chain with structure"):
            fit(other, dir=str(tmp_path), steps=5)


@pytest.fixture(scope="module")
def of_eight_rows():
    """A fit to the first eight rows alone."""
    return fit(linear(1), (X[:8], Y[:8]), "mse", validation=(X[:8], Y[:8]))


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize("ignored", [1.0, np.nan, np.inf])
def test_rows_have_weights(of_eight_rows, ignored):
    counts = np.arange(ROWS)[:, None] < 8
    x, y = np.where(counts, X, ignored), np.where(counts, Y, ignored)
    weighted = {"x": x, "y": y, "row_weight": counts[:, 0].astype(np.float32)}
    kwargs = {"loss": "mse", "batch_size": ROWS, "validation": weighted}
    some = fit(linear(1), weighted, **kwargs)
    for of in ("train", "validation"):
        losses = [getattr(result.history, of)["loss"] for result in (some, of_eight_rows)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_run_is_resumed_on_the_same_data_only(tmp_path):
    fit(dir=str(tmp_path / "a"))
    resumed = fit(dir=str(tmp_path / "a"), steps=6)
    whole = fit(steps=6)
    assert resumed.history.train["loss"].tolist() == whole.history.train["loss"].tolist()
    for change in (
        {"data": (X + 1, LABELS)},
        {"model": nn.Dense(3)},
        {"loss": "mse", "data": (X, np.eye(3)[LABELS])},
    ):
        with pytest.raises(RunDirError, match="belongs to a run with another config"):
            fit(dir=str(tmp_path / "a"), steps=6, **change)


def test_a_run_that_is_stopped_keeps_what_there_is():
    def batches():
        yield from [(X[:8], LABELS[:8])] * 3
        os.kill(os.getpid(), signal.SIGTERM)
        yield from [(X[:8], LABELS[:8])] * 100

    result = fit(data=batches(), batch_size=None, steps=90)
    assert 0 < result.last.step < 90
    assert len(result.history.train["loss"]) == result.last.step


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit()
    assert list(tmp_path.iterdir()) == []


class Target(Hook):
    """Ends the run when the loss is small."""

    def __init__(self):
        self.steps = []

    def on_summaries(self, step, outputs, batch):
        self.steps.append(step)
        return EndRun("small") if float(outputs["loss"]) < 1e6 and step == 3 else None


def test_callbacks_follow_the_run_and_may_end_it():
    first, second = Target(), Target()
    result = weft.fit(linear(1), (X, Y), "mse", steps=20, progress=False, callbacks=[first, second])
    assert first.steps == second.steps and first.steps[:3] == [1, 2, 3]
    assert result.last.step == len(first.steps) == 4  # step 4 was dispatched before 3 was read
    with pytest.raises(HookError, match=r"^fit: callbacks\[0\] is the class Target, which"):
        weft.fit(linear(1), (X, Y), "mse", steps=1, progress=False, callbacks=[Target])
