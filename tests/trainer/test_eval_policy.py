import pytest

from weft.config import config_for_function
from weft.errors import CheckpointPolicyError
from weft.hierarchy.metrics import WeightedScalar
from weft.trainer.checkpoint_policy import EvalMetric
from weft.trainer.eval_policy import AtEndPolicy, BestMetricEvalPolicy, every_n_steps_policy


def reported(loss, evaler="held_out"):
    return {"evalers": {evaler: {"loss": WeightedScalar(loss, 4.0)}}}


def best(**kwargs):
    cfg = BestMetricEvalPolicy.default_config().set(metric=EvalMetric("held_out", "loss"))
    return cfg.set(**kwargs).instantiate()


def asked(policy, losses):
    return [policy(step=i, train_summaries=reported(loss)) for i, loss in enumerate(losses)]


def test_every_n_steps_and_the_last():
    policy = every_n_steps_policy(3, min_step=4, max_step=10)
    assert [s for s in range(1, 12) if policy(step=s, train_summaries={})] == [6, 9, 10]


def test_at_the_end_and_as_another_says():
    assert not AtEndPolicy.default_config().instantiate()(step=4, train_summaries={})
    also = config_for_function(every_n_steps_policy).set(n=2)
    policy = AtEndPolicy.default_config().set(also=also).instantiate()
    assert [s for s in range(1, 6) if policy(step=s, train_summaries={})] == [2, 4]


def test_the_best_so_far():
    assert asked(best(), [2.0, 3.0, 2.0, 1.0, float("nan")]) == [True, False, False, True, False]
    assert asked(best(mode="max"), [2.0, 3.0, 1.0]) == [True, True, False]
    # An evaler that did not run says nothing.
    assert not best()(step=1, train_summaries=reported(1.0, evaler="other"))
    assert not best()(step=1, train_summaries={})


def test_the_best_so_far_outlives_the_run():
    policy, other = best(), best()
    asked(policy, [2.0])
    other.set_state(policy.get_state())
    assert asked(other, [2.5, 1.5]) == [False, True]


def test_what_cannot_be_compared_is_named():
    with pytest.raises(CheckpointPolicyError, match=r"BestMetricEvalPolicy got mode='least'"):
        best(mode="least")
    policy = best(metric=EvalMetric("held_out", "los"))
    with pytest.raises(CheckpointPolicyError, match=r"'los', which the evaler 'held_out'.*'?loss"):
        asked(policy, [1.0])
