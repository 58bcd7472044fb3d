import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.metrics import (
    MaxSummary,
    MetricAccumulator,
    MetricSummary,
    MinSummary,
    SumSummary,
    WeightedScalar,
    WeightedSummary,
    WeightedValue,
)

BATCHES = [[1.0, 5.0], [3.0, 2.0], [-4.0, 0.5]]


@pytest.mark.parametrize(
    "cls, reduce", [(MaxSummary, np.max), (MinSummary, np.min), (SumSummary, np.sum)]
)
def test_batches_are_reduced_element_by_element(cls, reduce):
    accumulator = MetricAccumulator.default_config().instantiate()
    for batch in BATCHES:
        accumulator.update({"x": cls(jnp.array(batch))})
    np.testing.assert_allclose(accumulator.summaries()["x"].value(), reduce(BATCHES, axis=0))


def test_a_weighted_summary_becomes_the_mean_over_both():
    total = WeightedSummary(2.0, 1.0).accumulate(WeightedSummary(5.0, 3.0))
    assert isinstance(total, WeightedSummary)
    assert (float(total.value()), float(total.weight)) == (4.25, 4.0)
    nothing = WeightedSummary(7.0, 0.0).accumulate(WeightedSummary(8.0, 0.0))
    assert float(nothing.value()) == 0


def test_a_weighted_value_stays_that_of_the_first_batch():
    first = WeightedValue(2.0, 1.0)
    assert first.accumulate(WeightedValue(5.0, 3.0)) is first
    assert first.value() == 2.0


@pytest.mark.parametrize("cls", [WeightedValue, WeightedSummary, WeightedScalar])
def test_weighted_ones_leave_a_compiled_step(cls):
    out = jax.jit(lambda x: cls(x.mean(), x.size))(jnp.arange(4.0))
    assert isinstance(out, cls) and isinstance(out, MetricSummary)
    assert (float(out.mean), int(out.weight)) == (1.5, 4)
