import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.hierarchy.layers.classification import (
    BaseClassificationHead,
    BinaryClassificationMetric,
    CategoricalHingeLossMetric,
    ClassificationMetric,
)
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.module import functional as F

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(8, 3)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0, -1, 1, 3, 2])
LIVE = np.array([1, 1, 1, 1, 0, 1, 0, 1], bool)


def run(cls, logits, labels, soft_labels=None, **kwargs):
    layer = cls.default_config().set(name="metric", **kwargs).instantiate(parent=None)
    inputs = {"logits": logits, "labels": labels, "soft_labels": soft_labels}
    loss, collection = jax.jit(lambda inputs: F(layer, None, {}, inputs, is_training=False))(inputs)
    return loss, collection.summaries


@functools.partial(jax.jit, static_argnums=0)
def mean_of(loss, *args):
    return loss(*args).mean()


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4)


def test_classification_reports_loss_perplexity_and_accuracy():
    loss, summaries = run(ClassificationMetric, LOGITS, LABELS, num_classes=3)
    expected = mean_of(optax.softmax_cross_entropy_with_integer_labels, LOGITS[LIVE], LABELS[LIVE])
    close(loss, expected)
    close(summaries["loss"].mean, expected)
    close(summaries["perplexity"].mean, np.exp(expected))
    close(summaries["accuracy"].mean, (LOGITS.argmax(-1) == LABELS)[LIVE].mean())
    assert all(summary.weight == 6 for summary in summaries.values())


def test_perplexities_of_batches_add_up_to_that_of_all():
    parts = [
        run(ClassificationMetric, LOGITS[rows], LABELS[rows], num_classes=3)[1]["perplexity"]
        for rows in (slice(0, 2), slice(2, None))
    ]
    _, summaries = run(ClassificationMetric, LOGITS, LABELS, num_classes=3)
    close((parts[0] + parts[1]).mean, summaries["perplexity"].mean)


@pytest.mark.parametrize("threshold", [0.5, 0.8])
@pytest.mark.parametrize("trailing", [(), (1,)])
def test_binary_metrics(threshold, trailing):
    logits = RNG.normal(size=40).astype(np.float32) * 2
    labels = RNG.integers(-1, 2, 40)
    loss, summaries = run(
        BinaryClassificationMetric,
        logits.reshape(-1, *trailing),
        labels,
        prediction_threshold=threshold,
    )
    live = labels >= 0
    true, predicted = labels[live] == 1, 1 / (1 + np.exp(-logits[live])) >= threshold
    close(loss, mean_of(optax.sigmoid_binary_cross_entropy, logits[live], labels[live]))
    hits = (true & predicted).sum()
    precision, recall = hits / predicted.sum(), hits / true.sum()
    close(summaries["accuracy"].mean, (true == predicted).mean())
    close(summaries["precision"].mean, precision)
    close(summaries["recall"].mean, recall)
    close(summaries["f_score"].mean, 2 * precision * recall / (precision + recall))


def test_binary_metrics_of_two_batches_add_up():
    logits, labels = RNG.normal(size=30).astype("f"), RNG.integers(0, 2, 30)
    _, whole = run(BinaryClassificationMetric, logits, labels)
    _, first = run(BinaryClassificationMetric, logits[:10], labels[:10])
    _, second = run(BinaryClassificationMetric, logits[10:], labels[10:])
    for name in ("accuracy", "precision", "recall", "f_score"):
        close((first[name] + second[name]).mean, whole[name].mean)


def test_hinge_loss():
    loss, summaries = run(CategoricalHingeLossMetric, LOGITS, LABELS, num_classes=3)
    logits, labels = LOGITS[LIVE], LABELS[LIVE]
    others = np.where(np.arange(3) == labels[:, None], 0, logits).max(-1)
    right = logits[np.arange(6), labels]
    close(loss, np.maximum(others - right + 1, 0).mean())
    close(summaries["accuracy"].mean, (logits.argmax(-1) == labels).mean())


class Head(BaseClassificationHead):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "linear",
            Linear.default_config().set(input_dim=cfg.input_dim, output_dim=cfg.num_classes),
        )

    def forward(self, input_batch):
        return self.linear(input_batch["x"])


def test_head_computes_the_loss_by_its_metric():
    cfg = Head.default_config().set(name="head", input_dim=4, num_classes=3)
    cfg.metric.label_smoothing = 0.3
    head = cfg.instantiate(parent=None)
    params = head.initialize_parameters_recursively(jax.random.key(0))
    x = jnp.array(RNG.normal(size=(8, 4)))
    logits, _ = F(head, None, params, ({"x": x},), is_training=True)
    assert logits.shape == (8, 3)
    loss, collection = F(
        head,
        None,
        params,
        {"logits": logits, "target_labels": LABELS},
        method="loss",
        is_training=True,
    )
    expected, _ = run(ClassificationMetric, logits, LABELS, num_classes=3, label_smoothing=0.3)
    close(loss, expected)
    assert collection.summaries["metric"]["loss"].weight == 6
