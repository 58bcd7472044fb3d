import math

import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import LearningRateSearchError
from weft.recipes.lm import lm_tiny
from weft.trainer.learner import Learner
from weft.trainer.learning_rate_finder import exponential_sweep, find_learning_rate
from weft.trainer.optimizers import sgd_optimizer


def config(directory):
    cfg = lm_tiny().set(dir=str(directory / "run"))
    cfg.model.decoder.dim = 8
    cfg.model.decoder.transformer.num_layers = 1
    return cfg


def test_a_sweep_goes_by_equal_factors():
    rates = [
        float(exponential_sweep(min_rate=1e-3, max_rate=10.0, num_steps=9)(i)) for i in range(9)
    ]
    np.testing.assert_allclose(np.diff(np.log(rates)), math.log(1e4) / 8, rtol=1e-4)


@pytest.mark.long
def test_a_rate_is_found_where_the_loss_falls_and_nothing_is_left(tmp_path):
    cfg = config(tmp_path)
    before = str(cfg)
    search = find_learning_rate(cfg, min_rate=1e-5, max_rate=10.0, num_steps=40)
    assert 1e-3 < search.suggestion < 3
    assert len(search.rates) == len(search.losses) == len(search.smoothed) <= 40
    assert min(search.smoothed) < search.smoothed[0] - 0.5
    assert search.fields == ["learner.optimizer.inner.learning_rate"]
    assert str(cfg) == before
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sweep_is_said(tmp_path):
    for kwargs in ({"min_rate": 0}, {"min_rate": 2.0}, {"num_steps": 9}):
        with pytest.raises(LearningRateSearchError, match=r"expected 0 < min_rate < max_rate"):
            find_learning_rate(config(tmp_path), **kwargs)


def test_a_learner_without_a_rate_is_refused(tmp_path):
    def fixed(params):
        return params

    cfg = config(tmp_path)
    cfg.learner = Learner.default_config().set(optimizer=config_for_function(fixed))
    with pytest.raises(LearningRateSearchError, match=r"has no field `learning_rate`"):
        find_learning_rate(cfg)


@pytest.mark.long
def test_a_loss_that_falls_at_no_rate_is_said(tmp_path):
    cfg = config(tmp_path)
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(decouple_weight_decay=True)
    cfg.learner.optimizer.learning_rate = 0.0
    with pytest.raises(LearningRateSearchError, match=r"does not fall at any rate from 1000 to"):
        find_learning_rate(cfg, min_rate=1e3, max_rate=1e4, num_steps=10)
