import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import MetricArgumentError, MetricMethodError, MetricValueError
from weft.nnx.metrics import (
    Accuracy,
    Average,
    Metric,
    MetricState,
    MultiMetric,
    Welford,
)


def test_many_small_values_of_low_precision():
    average = Average()
    average.update(values=jnp.full(1000, 1.0, jnp.bfloat16))
    assert float(average.total[...]) == 1000


def test_custom_metric_missing_a_method():
    class Mine(Metric):
        def __init__(self):
            self.x = MetricState(jnp.array(0))

    mine = Mine()
    for call, name in (
        (mine.reset, "reset"),
        (mine.update, "update"),
        (mine.compute, "compute"),
        (lambda: type("Other", (Metric,), {})(), "__init__"),
    ):
        with pytest.raises(MetricMethodError, match=f"does not define {name}; a metric defines"):
            call()


@pytest.mark.parametrize("metric", [Average("loss"), Welford("loss")], ids=["Average", "Welford"])
def test_missing_or_invalid_argument(metric):
    name = type(metric).__name__
    with pytest.raises(MetricArgumentError, match=f"{name}.update needs .* 'loss', .* 'values'; c"):
        metric.update(values=1.0)
    with pytest.raises(MetricArgumentError, match=r"given none; call metric.update\(loss=...\)"):
        metric.update()
    with pytest.raises(MetricArgumentError, match=f"{name}.update was given loss='a'; give an arr"):
        metric.update(loss="a")


def test_mask_for_each_metric_by_name():
    metrics = MultiMetric(
        kept=Average(), all=Average(), inner=MultiMetric(kept=Average(), spread=Welford())
    )
    values, mask = jnp.array([1.0, 3.0, 8.0]), np.array([True, True, False])
    metrics.update(values=values, mask={"kept": mask, "inner": {"spread": mask}})
    assert float(metrics.kept.compute()) == 2 and float(metrics.all.compute()) == 4
    assert float(metrics.inner.kept.compute()) == 4
    spread = metrics.inner.spread.compute()
    assert float(spread.mean) == 2 and float(spread.standard_deviation) == 1
    metrics.reset()
    metrics.update(values=values, mask=mask)
    assert float(metrics.all.compute()) == 2 and float(metrics.inner.spread.compute().mean) == 2


def test_masks_of_unknown_metrics():
    metrics = MultiMetric(all=Average())
    with pytest.raises(MetricArgumentError, match="mask for 'none'; the metrics are 'all'"):
        metrics.update(values=jnp.ones(3), mask={"none": np.ones(3, bool)})
    with pytest.raises(MetricArgumentError, match=r"Average.update was given mask=\{'x': .* array"):
        metrics.update(values=jnp.ones(3), mask={"all": {"x": np.ones(3, bool)}})
    assert int(metrics.all.count[...]) == 0


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_masked_values_are_ignored(data):
    average, welford, kept = Average(), Welford(), []
    for _ in range(data.draw(st.integers(1, 3))):
        values = data.draw(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3))
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
        average.update(values=jnp.array(values), mask=mask)
        welford.update(values=jnp.array(values), mask=mask)
        kept += [v for v, m in zip(values, mask, strict=True) if m]
    assert int(welford.count[...]) == len(kept)
    assert float(welford.mean[...]) == pytest.approx(np.mean(kept) if kept else 0, abs=1e-4)
    if kept:
        np.testing.assert_allclose(average.compute(), np.mean(kept), atol=1e-4)
        deviation = welford.compute().standard_deviation
        np.testing.assert_allclose(deviation, np.std(kept), atol=1e-2)


def test_mismatched_masks_logits_and_labels():
    message = r"Average.update was given a mask of shape \(2,\) for values of shape \(2, 3\)"
    with pytest.raises(MetricValueError, match=message):
        Average().update(values=jnp.ones((2, 3)), mask=jnp.ones(2))
    with pytest.raises(MetricValueError, match=r"mask of shape \(1, 3\) for values of shape \(3,"):
        Average().update(values=jnp.ones(3), mask=jnp.ones((1, 3)))
    message = (
        r"logits of shape \(2, 3\) and labels of shape \(3,\); .* logits of shape \(\*batch, n\)"
    )
    with pytest.raises(MetricValueError, match=message):
        Accuracy().update(logits=jnp.ones((2, 3)), labels=jnp.array([1, 1, 1]))
    with pytest.raises(MetricValueError, match=r"logits of shape \(\*batch\) with a threshold"):
        Accuracy(0.5).update(logits=jnp.ones((2, 3)), labels=jnp.array([1, 1]))
    with pytest.raises(MetricValueError, match=r"labels of dtype float32; give integers"):
        Accuracy().update(logits=jnp.ones((2, 3)), labels=jnp.ones(2))


def test_invalid_metrics():
    with pytest.raises(MetricArgumentError, match="threshold is 1, a int; give a float, or None"):
        Accuracy(1)
    with pytest.raises(MetricArgumentError, match="the metric 'loss' is 3, which lacks the meth"):
        MultiMetric(loss=3)
    with pytest.raises(MetricArgumentError, match="given the name 'compute', which is a method of"):
        MultiMetric(compute=Average())


def test_multiclass_and_binary_accuracy():
    accuracy = Accuracy()
    logits = jnp.array([[[0.1, 0.9], [0.8, 0.2]]])
    accuracy.update(logits=logits, labels=jnp.array([[1, 1]]), step=3)
    assert accuracy.compute() == 0.5
    accuracy.update(logits=logits, labels=jnp.array([[1, 0]]), mask=jnp.array([[True, False]]))
    assert accuracy.compute() == pytest.approx(2 / 3)
    binary = Accuracy(0.5)
    binary.update(logits=jnp.array([0.1, 0.5, 0.6, 0.7]), labels=jnp.array([0, 1, 1, 0]))
    assert binary.compute() == 0.5 and binary.threshold == 0.5
