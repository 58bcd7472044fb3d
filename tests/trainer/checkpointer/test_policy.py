import jax.numpy as jnp
import pytest

from weft.config import config_for_function
from weft.errors import CheckpointPolicyError, StepIntervalError
from weft.trainer.checkpointer import policy as checkpoint_policy
from weft.trainer.checkpointer.policy import (
    AnyPolicy,
    BestMetricPolicy,
    EvalMetric,
    EverySecondsPolicy,
    KeepBest,
    every_n_steps_and_last_policy,
    every_n_steps_policy,
    kept_steps,
)


def steps_of(policy, last=10):
    return [s for s in range(last + 1) if policy(step=s, evaler_summaries={})]


def test_every_n_steps():
    assert steps_of(every_n_steps_policy(3)) == [3, 6, 9]
    assert steps_of(every_n_steps_policy(3, min_step=5)) == [6, 9]
    assert steps_of(every_n_steps_policy()) == list(range(1, 11))
    with pytest.raises(StepIntervalError, match=r"save_policy.n=-1; expected an interval of 1 or"):
        every_n_steps_policy(-1)


def test_last_step():
    cfg = config_for_function(every_n_steps_and_last_policy).set(n=4, max_step=10)
    assert steps_of(cfg.instantiate(), last=12) == [4, 8, 10, 12]


def best(mode="max", metric="accuracy"):
    cfg = BestMetricPolicy.default_config()
    return cfg.set(metric=EvalMetric("valid", metric), mode=mode).instantiate()


@pytest.mark.parametrize(
    ("mode", "saved"), [("max", [1.0, 2.0, 3.0]), ("min", [1.0, 0.5])], ids=["max", "min"]
)
def test_only_better_values_are_saved(mode, saved):
    policy = best(mode)
    values = [float("nan"), 1.0, 2.0, 2.0, 0.5, float("nan"), 3.0]
    found = [
        v for v in values if policy(step=1, evaler_summaries={"valid": {"accuracy": jnp.array(v)}})
    ]
    assert found == saved


def test_missing_evaluation_saves_nothing():
    assert not best()(step=1, evaler_summaries={})
    assert not best()(step=1, evaler_summaries={"other": {"accuracy": 1.0}})


def test_best_value_is_restored():
    policy, again = best(), best()
    assert policy(step=1, evaler_summaries={"valid": {"accuracy": 0.9}})
    again.set_state(policy.get_state())
    assert not again(step=2, evaler_summaries={"valid": {"accuracy": 0.8}})


def test_unreported_metric_error_suggests_names():
    text = r"'acuracy'.*'valid'.*Did you mean 'accuracy'"
    with pytest.raises(CheckpointPolicyError, match=text):
        best(metric="acuracy")(step=1, evaler_summaries={"valid": {"accuracy": 0.9}})


def test_by_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint_policy.time, "monotonic", lambda: now[0])
    policy = EverySecondsPolicy.default_config().set(seconds=60).instantiate()
    saved = []
    for step in range(1, 10):
        now[0] += 25
        if policy(step=step, evaler_summaries={}):
            saved.append(step)
    assert saved == [3, 6, 9]
    with pytest.raises(CheckpointPolicyError, match=r"seconds=0; expected more than 0"):
        EverySecondsPolicy.default_config().set(seconds=0).instantiate()


def test_any_policy_evaluates_and_saves_each():
    def any_policy():
        metric = EvalMetric("valid", "accuracy")
        policies = [
            config_for_function(every_n_steps_policy).set(n=3),
            BestMetricPolicy.default_config().set(metric=metric),
        ]
        return AnyPolicy.default_config().set(policies=policies).instantiate()

    def saved(policy, values):
        return [
            s
            for s, v in values.items()
            if policy(step=s, evaler_summaries={"valid": {"accuracy": v}})
        ]

    policy = any_policy()
    assert saved(policy, {1: 1.0, 2: 0.5, 3: 2.0, 4: 1.5, 5: 3.0, 6: 0.0}) == [1, 3, 5, 6]
    again = any_policy()
    again.set_state(policy.get_state())
    assert saved(again, {7: 2.9, 8: 3.1, 9: 0.0}) == [8, 9]
    again.set_state({})  # of a run whose policies had no state
    assert saved(again, {10: 3.0, 11: 3.2}) == [11]


def keep_best(**kwargs):
    cfg = KeepBest.default_config().set(metric=EvalMetric("valid", "loss"))
    return cfg.set(**kwargs).instantiate()


def facts(**losses):
    return {int(s[1:]): {"metrics": {"valid": {"loss": v}}} for s, v in losses.items()}


def test_best_of_steps_with_value():
    values = {**facts(_1=3.0, _2=float("nan"), _3=1.0, _4=3.0), 5: {}, 6: {"metrics": {"x": {}}}}
    assert keep_best(mode="min").kept(values) == {3}
    assert keep_best().kept(values) == {4}
    assert keep_best(n=2).kept(values) == {1, 4}
    assert keep_best(n=9).kept(values) == {1, 3, 4}
    assert keep_best().kept({5: {}}) == set()


def test_step_without_time_is_not_kept_by_time():
    at = {1: {"saved_at": 0.0}, 2: {}, 3: {"saved_at": 6.0}, 4: {}}
    assert kept_steps(at, last_n=1, every_n_seconds=5) == {1, 3, 4}


def test_invalid_arguments():
    with pytest.raises(CheckpointPolicyError, match=r"KeepBest got n=0; expected 1 or more"):
        keep_best(n=0)
    with pytest.raises(CheckpointPolicyError, match=r"KeepBest got mode='most'; expected 'max' or"):
        keep_best(mode="most")


def test_modes():
    with pytest.raises(CheckpointPolicyError, match="mode='best'; expected 'max' or 'min'"):
        best("best")
