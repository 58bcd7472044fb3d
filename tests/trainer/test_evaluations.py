import types

import pytest

from weft.trainer.eval_policy import AtEndPolicy
from weft.trainer.evaluations import due_at_end, run_evalers
from weft.trainer.progress import RunListener


class Evaler:
    """Runs if its rule says so, or if it has to."""

    def __init__(self, rule):
        self.rule, self.eval_policy = rule, None

    def eval_step(self, step, *, prng_key, model_params, train_summaries, force_run):
        ran = force_run or self.rule(step, train_summaries)
        return prng_key, {"sum": step + model_params} if ran else None, None


class Told(RunListener):
    def __init__(self):
        self.told = []

    def on_eval(self, name, step, summaries):
        self.told.append((name, step, summaries["sum"]))


@pytest.fixture
def evalers():
    return {
        "even": Evaler(lambda step, summaries: step % 2 == 0),
        # As a policy that waits for another evaler's result.
        "after": Evaler(lambda step, summaries: "even" in summaries["evalers"]),
        "never": Evaler(lambda step, summaries: False),
    }


def run(evalers, step, **kwargs):
    listener = Told()
    found = run_evalers(
        evalers,
        step=step,
        prng_key=None,
        model_params=10,
        train_summaries={"loss": 1.0},
        listener=listener,
        **kwargs,
    )
    return found, listener.told


def test_those_that_are_due_run_and_the_later_see_what_the_earlier_found(evalers):
    assert run(evalers, 3) == ({}, [])
    found, told = run(evalers, 4)
    assert found == {"even": {"sum": 14}, "after": {"sum": 14}}
    assert told == [("even", 4, 14), ("after", 4, 14)]


def test_those_that_are_forced_run_alone(evalers):
    assert run(evalers, 4, forced={"never"})[0] == {"never": {"sum": 14}}
    assert run(evalers, 4, forced=set())[0] == {}


def test_those_of_the_end_are_known(evalers):
    evalers["last"] = types.SimpleNamespace(eval_policy=AtEndPolicy.default_config().instantiate())
    assert due_at_end(evalers) == {"last"}
