import pytest

from weft.errors import EarlyStoppingError
from weft.hierarchy.metrics import WeightedScalar
from weft.trainer.checkpoint_policy import EvalMetric
from weft.trainer.early_stopping import EarlyStopping


def make(**kwargs):
    cfg = EarlyStopping.default_config().set(metric=EvalMetric("held_out", "loss"))
    return cfg.set(**kwargs).instantiate()


def stops_at(stopping, values):
    """The first evaluation after which the run ends."""
    for i, value in enumerate(values):
        if stopping(step=i, evaler_summaries={"held_out": {"loss": WeightedScalar(value, 2.0)}}):
            return i
    return None


def test_patience_counts_evaluations_without_an_improvement():
    assert stops_at(make(), [2.0, 1.0, 1.5]) == 2
    assert stops_at(make(patience=2), [2.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.0]) == 6
    assert stops_at(make(min_delta=0.5), [2.0, 1.8]) == 1
    assert stops_at(make(mode="max"), [1.0, 2.0, 2.0]) == 2
    assert stops_at(make(), [float("nan")]) == 0


def test_an_evaler_that_did_not_run_counts_for_nothing():
    stopping = make()
    stops_at(stopping, [1.0])
    assert not stopping(step=2, evaler_summaries={"other": {"loss": 5.0}})
    assert not stopping(step=3, evaler_summaries={})


@pytest.mark.parametrize("cut", range(5))
def test_a_run_that_was_cut_stops_where_the_other_does(cut):
    values = [2.0, 3.0, 1.0, 2.0, 2.0, 2.0]
    before, after = make(patience=1, mode="min"), make(patience=1, mode="min")
    assert stops_at(before, values[:cut]) is None
    after.set_state(before.get_state())
    assert cut + stops_at(after, values[cut:]) == stops_at(make(patience=1), values) == 4


def test_with_more_patience_a_run_that_was_stopped_goes_on():
    stopped, patient = make(), make(patience=3)
    stops_at(stopped, [1.0, 2.0])
    patient.set_state(stopped.get_state())
    assert stopped.should_stop
    assert not patient.should_stop


def test_what_cannot_be_looked_at_is_named():
    with pytest.raises(EarlyStoppingError, match=r"patience=-1 and min_delta=0; expected numbers"):
        make(patience=-1)
    with pytest.raises(EarlyStoppingError, match=r"the evaler 'held_out'.*test, valid. Set early"):
        make().check(["test", "valid"])
