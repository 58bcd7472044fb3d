"""Metrics over batches equal scikit-learn's over all rows."""

import functools
import inspect
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn import metrics as sklearn

from weft import metrics, struct
from weft.config import from_text, to_text
from weft.errors import LossError
from weft.trainer.supervised import Supervised

ROWS, CLASSES = 37, 4  # the last batch of 8 has 5 rows
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LOGITS[:, 3] -= 10  # never predicted, and class 2 never occurs
LABELS = RNG.choice([0, 1, 3], size=ROWS)
PREDICTED = LOGITS.argmax(-1)
WEIGHTS = RNG.choice([0.0, 0.5, 1.0, 2.0], size=ROWS).astype(np.float32)
LIVE = WEIGHTS > 0
SCORES = {
    metrics.Precision: sklearn.precision_score,
    metrics.Recall: sklearn.recall_score,
    metrics.F1Score: sklearn.f1_score,
}

update = jax.jit(lambda metric, *batch: metric.update(*batch))


def over_batches(metric, *arrays):
    for start in range(0, ROWS, 8):
        batch = (x if x is None else x[start : start + 8] for x in arrays)
        metric = update(metric, *batch)
    return metric.compute()


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
@pytest.mark.parametrize("metric", SCORES, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["rows", "weights"])
def test_scores_of_several_classes(metric, average, weights):
    rows = slice(None) if weights is None else LIVE
    wanted = SCORES[metric](
        LABELS[rows],
        PREDICTED[rows],
        average=average,
        sample_weight=None if weights is None else weights[rows],
        zero_division=0,
        labels=None if average else range(CLASSES),
    )
    value = over_batches(metric(average), LOGITS, LABELS, weights)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)


@pytest.mark.parametrize("metric", SCORES, ids=lambda metric: metric.__name__)
def test_scores_of_two_classes(metric):
    """One logit of class 1, two logits, probabilities as targets, and predicted classes."""
    targets, logit = (LABELS == 1).astype(int), LOGITS[:, 1]
    wanted = SCORES[metric](targets, logit > 0, sample_weight=WEIGHTS)
    two = np.stack([np.zeros(ROWS, np.float32), logit], axis=-1)
    forms = [
        (metric(), logit, targets),
        (metric(), two, targets),
        (metric(), logit, targets * 0.9),
        (metric(num_classes=2), (logit > 0).astype(int), targets),
        (metric(), logit > 0, targets),
    ]
    for form in forms:
        np.testing.assert_allclose(over_batches(*form, WEIGHTS), wanted, rtol=1e-6)


def test_accuracy_confusion_matrix_and_perplexity():
    assert over_batches(metrics.Accuracy(), LOGITS, LABELS, WEIGHTS) == pytest.approx(
        sklearn.accuracy_score(LABELS, PREDICTED, sample_weight=WEIGHTS)
    )
    wanted = sklearn.confusion_matrix(
        LABELS, PREDICTED, sample_weight=WEIGHTS, labels=range(CLASSES)
    )
    matrix = over_batches(metrics.ConfusionMatrix(), LOGITS, LABELS, WEIGHTS)
    np.testing.assert_array_equal(matrix, wanted)
    entropy = sklearn.log_loss(
        LABELS, jax.nn.softmax(LOGITS), sample_weight=WEIGHTS, labels=range(CLASSES)
    )
    perplexity = over_batches(metrics.Perplexity(), LOGITS, LABELS, WEIGHTS)
    np.testing.assert_allclose(perplexity, np.exp(entropy), rtol=1e-6)


@pytest.mark.parametrize("logits", [LOGITS[:, 0].round(1), LOGITS[:, :2], LOGITS])
def test_auc_is_exact(logits):
    """With equal scores, of two logits, and of each class against the rest."""
    labels = np.where(LABELS == 3, 2, LABELS)
    if logits.ndim == 1:
        targets, scores, many = labels > 0, logits, {}
    elif logits.shape[-1] == 2:
        targets, scores, many = (labels > 0).astype(int), logits[:, 1] - logits[:, 0], {}
    else:
        logits, targets = logits[:, :3], labels
        scores, many = jax.nn.softmax(logits), {"multi_class": "ovr"}
    wanted = sklearn.roc_auc_score(targets, scores, sample_weight=WEIGHTS, **many)
    value = over_batches(metrics.AUC(), logits, targets, WEIGHTS)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_auc_without_a_value_is_nan():
    score = jnp.array([0.1, jnp.nan, 0.7])
    assert np.isnan(metrics.AUC().update(score, jnp.array([0, 1, 1])).compute())
    assert np.isnan(metrics.AUC().update(score[::2], jnp.array([1, 1])).compute())
    weights = jnp.array([1.0, 0.0, 1.0])
    assert metrics.AUC().update(score, jnp.array([0, 1, 1]), weights).compute() == 1


def test_rows_of_a_function_are_joined_and_filtered():
    macro = functools.partial(sklearn.f1_score, average="macro", zero_division=0)

    def f1(outputs, batch):
        return macro(batch["y"], outputs.argmax(-1))

    metric = metrics.AllRows(f1)
    for rows in (slice(0, 30), slice(30, None)):
        metric = metric.update(LOGITS[rows], {"y": LABELS[rows]}, WEIGHTS[rows])
    assert metric.compute() == pytest.approx(macro(LABELS[LIVE], PREDICTED[LIVE]))


def test_targets_that_are_no_class_do_not_count():
    """Of tokens, with one weight for each row."""
    labels = np.where(RNG.random((5, 7)) < 0.3, -1, RNG.integers(0, 3, (5, 7)))
    logits = RNG.normal(size=(5, 7, 3)).astype(np.float32)
    weights = np.array([1.0, 2.0, 0.0, 1.0, 1.0], np.float32)
    each = np.where(labels >= 0, weights[:, None], 0).ravel()
    live = each > 0
    actual, predicted = labels.ravel()[live], logits.argmax(-1).ravel()[live]
    wanted = sklearn.f1_score(actual, predicted, average="macro", sample_weight=each[live])
    value = metrics.F1Score("macro").update(logits, labels, weights).compute()
    assert value == pytest.approx(wanted)
    matrix = metrics.ConfusionMatrix().update(logits, labels, weights).compute()
    assert matrix.sum() == pytest.approx(each.sum())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_may_be_sharded(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        logits, labels = jax.device_put((LOGITS[:32], LABELS[:32]), rows)
        f1 = update(metrics.F1Score("macro"), logits, labels)
        auc = update(metrics.AUC(), logits[:, 1], labels == 1)
        count = update(metrics.AllRows(lambda outputs, targets: len(targets)), logits, labels)
    wanted = sklearn.f1_score(LABELS[:32], PREDICTED[:32], average="macro")
    assert f1.value() == pytest.approx(wanted)
    assert auc.value() == pytest.approx(sklearn.roc_auc_score(LABELS[:32] == 1, LOGITS[:32, 1]))
    assert count.value() == 32


def test_metrics_of_parts_are_merged():
    first = metrics.F1Score("macro").of_batch(LOGITS[:9], LABELS[:9])
    second = metrics.F1Score("macro").of_batch(LOGITS[9:], LABELS[9:])
    whole = metrics.F1Score("macro").update(LOGITS, LABELS)
    assert first.merge(second).compute() == whole.compute()
    assert metrics.F1Score("macro").merge(first) is first
    assert first.merge(metrics.F1Score("macro")) is first


class Largest(metrics.Metric):
    largest: jax.Array | None = None
    scale: float = struct.field(pytree_node=False, default=1.0)

    def of_batch(self, outputs, targets, weights=None):
        return self.replace(largest=jnp.max(outputs))

    def merge(self, other):
        return other if self.largest is None else jax.tree.map(jnp.maximum, self, other)

    def compute(self):
        return self.scale * self.largest


def test_a_metric_of_ones_own():
    assert over_batches(Largest(scale=2.0), LOGITS, LABELS) == pytest.approx(2 * LOGITS.max())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.F1Score("makro"), "F1Score got average='makro'. Did you mean 'macro'"),
        (
            lambda: metrics.F1Score().update(LOGITS, LABELS),
            "F1Score got outputs of 4 classes, and average='binary'.*choose average='macro'",
        ),
        (lambda: metrics.Recall().update(PREDICTED, LABELS), "predicted classes.*num_classes=…"),
        (lambda: metrics.Recall().update(LOGITS[:, :1], LABELS), "logits of a single class"),
        (lambda: metrics.AUC().update(LOGITS[:, :1], LABELS), "AUC got .* of a single class"),
        (lambda: metrics.Accuracy().update(LOGITS[:3], LABELS), r"\(3, 4\) and the targets \(37,"),
        (
            lambda: metrics.Perplexity().update(LOGITS, LABELS.astype(float)),
            "dtype float32; expected integers",
        ),
        (
            lambda: metrics.Accuracy().update(LOGITS, LABELS, WEIGHTS[:3]),
            r"weights have shape \(3,\) and the targets \(37,\); expected one weight",
        ),
        (lambda: metrics.F1Score().compute(), "no batch yet; call `metric = metric.update"),
        (lambda: metrics.AUC().compute(), "AUC has no batch yet; call `metric = metric.update"),
        (
            lambda: (
                metrics.F1Score("macro")
                .update(LOGITS, LABELS)
                .merge(metrics.F1Score("micro").update(LOGITS, LABELS))
            ),
            "are different metrics, or of different classes",
        ),
        (
            lambda: jax.jit(lambda: metrics.AllRows(len).update(LOGITS, LABELS).compute())(),
            "AllRows computes on the host.*outside of jax.jit",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(LossError, match=message):
        make()


def test_a_text_of_a_config_has_the_options():
    cfg = Supervised.default_config().set(metrics={"f1": metrics.F1Score("macro"), "a": "auc"})
    assert from_text(to_text(cfg)) == cfg


def test_what_a_metric_has_to_define():
    with pytest.raises(NotImplementedError, match="Metric must define `of_batch`"):
        metrics.Metric().update(LOGITS, LABELS)
    with pytest.raises(NotImplementedError, match="Metric must define `compute`"):
        metrics.Metric().compute()


@pytest.mark.parametrize(
    ("metric", "arguments"),
    [
        (metrics.F1Score, ["average", "num_classes"]),
        (metrics.Accuracy, ["num_classes"]),
        (metrics.AllRows, ["fn"]),
    ],
)
def test_help_shows_the_options_and_not_the_sums(metric, arguments):
    assert list(inspect.signature(metric).parameters) == arguments
    first_line = pydoc.plain(pydoc.render_doc(metric)).splitlines()[3]
    assert "hits" not in first_line and arguments[0] in first_line
