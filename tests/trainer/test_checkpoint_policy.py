import jax.numpy as jnp
import pytest

from weft.config import config_for_function
from weft.errors import CheckpointPolicyError
from weft.hierarchy.metrics import WeightedScalar
from weft.trainer.checkpoint_policy import (
    BestMetricPolicy,
    EvalMetric,
    every_n_steps_and_last_policy,
    every_n_steps_policy,
)


def steps_of(policy, last=10):
    return [s for s in range(last + 1) if policy(step=s, evaler_summaries={})]


def test_every_n_steps():
    assert steps_of(every_n_steps_policy(3)) == [3, 6, 9]
    assert steps_of(every_n_steps_policy(3, min_step=5)) == [6, 9]
    assert steps_of(every_n_steps_policy()) == list(range(1, 11))


def test_the_last_step_too():
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


def test_nothing_is_saved_where_the_evaler_did_not_run():
    assert not best()(step=1, evaler_summaries={})
    assert not best()(step=1, evaler_summaries={"other": {"accuracy": 1.0}})


def test_a_metric_may_be_nested_and_weighted():
    policy = best("min", "model/loss")
    summaries = {"valid": {"model": {"loss": WeightedScalar(jnp.array(2.0), jnp.array(5.0))}}}
    assert policy(step=1, evaler_summaries=summaries)
    assert policy.get_state() == {"best": 2.0}


def test_the_best_value_outlives_the_process():
    policy, again = best(), best()
    assert policy(step=1, evaler_summaries={"valid": {"accuracy": 0.9}})
    again.set_state(policy.get_state())
    assert not again(step=2, evaler_summaries={"valid": {"accuracy": 0.8}})


def test_a_metric_that_is_not_reported_is_an_error_with_the_near_names():
    text = r"'acuracy'.*'valid'.*Did you mean 'accuracy'"
    with pytest.raises(CheckpointPolicyError, match=text):
        best(metric="acuracy")(step=1, evaler_summaries={"valid": {"accuracy": 0.9}})


def test_modes():
    with pytest.raises(CheckpointPolicyError, match="mode='best'; expected 'max' or 'min'"):
        best("best")
