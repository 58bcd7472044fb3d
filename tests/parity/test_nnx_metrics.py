"""Metrics of NNX: the same programs on Flax and on Weft."""

import flax.nnx
import jax.numpy as jnp
import pytest

import weft.nnx
from tests.keys import draw
from tests.parity.objects import described, same_arrays, same_error

LOGITS = draw(0, 2, 3, 4)
LABELS = jnp.array([[0, 1, 2], [3, 0, 1]])
MASK = jnp.array([[True, False, True], [True, True, False]])


def updated(make, *updates):
    """Returns a program that updates a metric, and computes after each update and after a reset."""

    def program(nnx):
        metric = make(nnx)
        values = [metric.compute()]
        for update in updates:
            metric.update(**update)
            values.append(metric.compute())
        state = described(nnx.state(metric))
        metric.reset()
        return [*values, metric.compute()], state, described(metric)

    return program


VALUES = {
    "average": updated(
        lambda nnx: nnx.metrics.Average(),
        {"values": jnp.array([1.0, 2, 3])},
        {"values": 4.0},
        {"values": 5},
        {"values": jnp.ones((2, 3)), "mask": MASK},
        # A broadcast mask counts once in Flax, and once per value in Weft.
        {"values": jnp.ones(3), "mask": jnp.array([True, False, True]), "other": 3},
        {"values": jnp.ones((2, 1)), "mask": jnp.array([[1], [0]])},
        {"values": jnp.ones(3, jnp.int32)},
    ),
    "by name": updated(lambda nnx: nnx.metrics.Average("loss"), {"loss": jnp.array(2.0), "x": 1}),
    "welford": updated(
        lambda nnx: nnx.metrics.Welford(),
        {"values": jnp.array([1.0, 2, 3, 4])},
        {"values": jnp.array([[3.0, 7.0]])},
        {"values": 4.0},
        {"values": jnp.array([1, 2])},
    ),
    "welford by name": updated(lambda nnx: nnx.metrics.Welford("x"), {"x": jnp.ones(2), "y": 1}),
    "accuracy": updated(
        lambda nnx: nnx.metrics.Accuracy(),
        {"logits": LOGITS, "labels": LABELS},
        {"logits": LOGITS, "labels": LABELS, "mask": MASK, "other": 1},
    ),
    "yes or no": updated(
        lambda nnx: nnx.metrics.Accuracy(0.5),
        {"logits": LOGITS[0, 0], "labels": jnp.array([0, 1, 1, 0])},
    ),
    "several": updated(
        lambda nnx: nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(),
            loss=nnx.metrics.Average("loss"),
            inner=nnx.MultiMetric(values=nnx.metrics.Welford()),
        ),
        {"logits": LOGITS, "labels": LABELS, "loss": 1.0, "values": jnp.arange(3.0), "z": 0},
    ),
    "masks by name": updated(
        lambda nnx: nnx.MultiMetric(a=nnx.metrics.Average(), b=nnx.metrics.Average()),
        {"values": jnp.array([1.0, 3.0]), "mask": {"a": jnp.array([True, False])}},
        {"values": jnp.array([1.0, 3.0]), "mask": jnp.array([True, False])},
    ),
    "none": updated(lambda nnx: nnx.MultiMetric(), {"x": 1}),
}


def plain(x):
    """Results with the statistics as dicts."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list):
        return [plain(v) for v in x]
    return vars(x) if type(x).__name__ == "Statistics" else x


@pytest.mark.parametrize("program", VALUES.values(), ids=VALUES)
def test_values(program):
    of_flax, *theirs = program(flax.nnx)
    of_weft, *ours = program(weft.nnx)
    same_arrays(plain(of_flax), plain(of_weft))
    assert theirs == ours


def test_in_jit_and_split():
    def program(nnx):
        metric = nnx.metrics.Average()

        @nnx.jit
        def step(metric, x):
            metric.update(values=x)

        step(metric, jnp.ones(3))
        step(metric, jnp.zeros(3))
        _, state, rest = metric.split(nnx.metrics.MetricState, ...)
        return metric.compute(), described(state), described(rest)

    assert [float(p[0]) for p in (program(flax.nnx), program(weft.nnx))] == [0.5, 0.5]
    assert program(flax.nnx)[1:] == program(weft.nnx)[1:]


@pytest.mark.parametrize(
    "program",
    [
        lambda nnx: nnx.Metric(),
        lambda nnx: nnx.Metric.reset(nnx.metrics.Average()),
        lambda nnx: nnx.Metric.update(nnx.metrics.Average()),
        lambda nnx: nnx.Metric.compute(nnx.metrics.Average()),
        lambda nnx: nnx.metrics.Average().update(x=1),
        lambda nnx: nnx.metrics.Average("loss").update(values=1),
        lambda nnx: nnx.metrics.Average().update(values=jnp.ones((2, 3)), mask=jnp.ones(2)),
        lambda nnx: nnx.metrics.Welford().update(x=1),
        lambda nnx: nnx.metrics.Accuracy(threshold="x"),
        lambda nnx: nnx.metrics.Accuracy(threshold=1),
        lambda nnx: nnx.metrics.Accuracy().update(logits=LOGITS),
        lambda nnx: nnx.metrics.Accuracy().update(logits=LOGITS, labels=LABELS[0]),
        lambda nnx: nnx.metrics.Accuracy().update(logits=LOGITS, labels=LABELS * 1.0),
        lambda nnx: nnx.metrics.Accuracy(0.5).update(logits=LOGITS, labels=LABELS),
        lambda nnx: nnx.MultiMetric(a=nnx.metrics.Accuracy()).update(values=1),
    ],
    ids=[
        "abstract", "no reset", "no update", "no compute", "no values", "no loss", "mask",
        "no values of welford", "threshold", "threshold of integer", "no labels", "shapes",
        "dtype", "shapes of yes or no", "one of several",
    ],
)  # fmt: skip
def test_errors(program):
    same_error(program)
