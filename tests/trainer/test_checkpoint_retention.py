import pytest

from weft.errors import CheckpointPolicyError
from weft.trainer.checkpoint_policy import EvalMetric
from weft.trainer.checkpoint_retention import KeepBest, kept_steps


def best(**kwargs):
    cfg = KeepBest.default_config().set(metric=EvalMetric("valid", "loss"))
    return cfg.set(**kwargs).instantiate()


def facts(**losses):
    return {int(s[1:]): {"metrics": {"valid": {"loss": v}}} for s, v in losses.items()}


def test_the_best_of_those_that_have_a_value():
    values = {**facts(_1=3.0, _2=float("nan"), _3=1.0, _4=3.0), 5: {}, 6: {"metrics": {"x": {}}}}
    assert best(mode="min").kept(values) == {3}
    assert best().kept(values) == {4}
    assert best(n=2).kept(values) == {1, 4}
    assert best(n=9).kept(values) == {1, 3, 4}
    assert best().kept({5: {}}) == set()


def test_rules_add_up():
    at = {step: {"saved_at": 10.0 * step} for step in range(1, 11)}
    assert kept_steps(at, last_n=1) == {10}
    assert kept_steps(at, last_n=20) == set(at)
    assert kept_steps(at, last_n=1, every_n_seconds=35) == {1, 5, 9, 10}
    assert kept_steps(at, last_n=1, every_n_steps=5, every_n_seconds=35) == {1, 5, 6, 9, 10}


def test_one_without_a_time_is_not_kept_for_its_time():
    at = {1: {"saved_at": 0.0}, 2: {}, 3: {"saved_at": 6.0}, 4: {}}
    assert kept_steps(at, last_n=1, every_n_seconds=5) == {1, 3, 4}


def test_what_makes_no_sense():
    with pytest.raises(CheckpointPolicyError, match=r"KeepBest got n=0; expected 1 or more"):
        best(n=0)
    with pytest.raises(CheckpointPolicyError, match=r"KeepBest got mode='most'; expected 'max' or"):
        best(mode="most")
