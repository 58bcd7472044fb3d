import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import OutputConflictError, SummaryValueError
from weft.hierarchy.metrics import (
    ImageSummary,
    MaxSummary,
    MetricAccumulator,
    MetricSummary,
    MinSummary,
    SumSummary,
    WeightedScalar,
    WeightedSummary,
    WeightedValue,
)


@pytest.fixture
def accumulator():
    return MetricAccumulator.default_config().instantiate()


def test_sum_is_the_mean_over_all_examples():
    rng = np.random.default_rng(0)
    batches = [rng.random(n).astype(np.float32) for n in (3, 1, 8)]
    total = sum(
        (WeightedScalar(jnp.array(b.mean()), jnp.array(float(len(b)))) for b in batches[1:]),
        WeightedScalar(jnp.array(batches[0].mean()), jnp.array(3.0)),
    )
    np.testing.assert_allclose(total.mean, np.concatenate(batches).mean(), rtol=1e-6)
    assert float(total.weight) == 12
    assert total.value() is total.mean


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 4)), min_size=1, max_size=5))
def test_sums_are_commutative_and_zero_weight_is_zero(pairs):
    scalars = [WeightedScalar(jnp.array(m), jnp.array(float(w))) for m, w in pairs]
    forward, backward = scalars[0], scalars[-1]
    for scalar in scalars[1:]:
        forward = forward + scalar
    for scalar in scalars[-2::-1]:
        backward = backward.accumulate(scalar)
    np.testing.assert_allclose(forward.mean, backward.mean, rtol=1e-4, atol=1e-5)
    weight = sum(w for _, w in pairs)
    if len(pairs) > 1:
        mean = sum(m * w for m, w in pairs) / weight if weight else 0.0
        np.testing.assert_allclose(forward.mean, mean, rtol=1e-4, atol=1e-5)


def test_nan_without_examples_does_not_count():
    total = WeightedScalar(jnp.nan, 0.0) + WeightedScalar(2.0, 3.0)
    assert (float(total.mean), float(total.weight)) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (
            WeightedSummary(np.ones(3), np.ones(2)),
            r"shape \(3,\) and a weight of shape \(2",
        ),
        (
            WeightedSummary(np.ones(2), np.array([1.0, -1.0])),
            "the weight .*expected at least 0",
        ),
        (WeightedScalar(np.ones(2), np.ones(2)), "a single number. Write `WeightedSummary`"),
    ],
)
def test_invalid_weighted_summaries(summary, message):
    with pytest.raises(SummaryValueError, match=message):
        summary.validate()


def test_summaries_accumulate_by_kind(accumulator):
    image = ImageSummary(jnp.zeros((1, 1, 1)))
    for i, n in enumerate((1.0, 3.0)):
        accumulator.update(
            {
                "model": {"loss": WeightedScalar(jnp.array(float(i)), jnp.array(n))},
                "plain": jnp.array(i, jnp.float32),
                "array": jnp.full(3, i),
                "image": image if i == 0 else ImageSummary(jnp.ones((1, 1, 1))),
                "text": str(i),
                "nothing": None,
                **({"late": WeightedScalar(jnp.array(9.0), jnp.array(1.0))} if i else {}),
            }
        )
    summaries = accumulator.summaries()
    assert float(summaries["model"]["loss"].mean) == 0.75
    assert float(summaries["plain"]) == 0.5
    assert not isinstance(summaries["plain"], WeightedScalar)
    np.testing.assert_array_equal(summaries["array"], np.zeros(3))
    assert summaries["image"] is image
    assert (summaries["text"], summaries["nothing"]) == ("0", None)
    assert float(summaries["late"].mean) == 9.0


def test_no_batches_give_no_summaries(accumulator):
    assert accumulator.summaries() == {}


def test_name_cannot_be_a_dict_in_one_batch_only(accumulator):
    accumulator.update({"model": {"loss": 1.0}})
    with pytest.raises(OutputConflictError, match="'model/loss' is a dict in one batch"):
        accumulator.update({"model": {"loss": {"total": 1.0}}})


BATCHES = [[1.0, 5.0], [3.0, 2.0], [-4.0, 0.5]]


@pytest.mark.parametrize(
    "cls, reduce", [(MaxSummary, np.max), (MinSummary, np.min), (SumSummary, np.sum)]
)
def test_batches_are_reduced_element_by_element(cls, reduce):
    accumulator = MetricAccumulator.default_config().instantiate()
    for batch in BATCHES:
        accumulator.update({"x": cls(jnp.array(batch))})
    np.testing.assert_allclose(accumulator.summaries()["x"].value(), reduce(BATCHES, axis=0))


def test_weighted_value_keeps_first_batch():
    first = WeightedValue(2.0, 1.0)
    assert first.accumulate(WeightedValue(5.0, 3.0)) is first
    assert first.value() == 2.0


@pytest.mark.parametrize("cls", [WeightedValue, WeightedSummary, WeightedScalar])
def test_weighted_scalars_escape_jit(cls):
    out = jax.jit(lambda x: cls(x.mean(), x.size))(jnp.arange(4.0))
    assert isinstance(out, cls) and isinstance(out, MetricSummary)
    assert (float(out.mean), int(out.weight)) == (1.5, 4)
