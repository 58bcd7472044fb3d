import io

import pytest
from rich.console import Console

from weft.cli import main
from weft.cli.lr_find import LearningRateSearch, find_learning_rate, loss_table
from weft.config import config_for_function
from weft.errors import LearningRateSearchError
from weft.recipes.lm import lm_tiny
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer

pytestmark = pytest.mark.usefixtures("one_device")


def test_table_has_a_bar_for_each_rate_and_marks_the_suggestion():
    search = LearningRateSearch(
        rates=[1e-3, 1e-2, 1e-1],
        losses=[4.0, 3.0, 6.0],
        smoothed=[4.0, 2.0, 6.0],
        suggestion=1e-3,
        fields=["learner.optimizer.learning_rate"],
    )
    console = Console(width=100, file=io.StringIO())
    console.print(loss_table(search))
    first, second, third = console.file.getvalue().splitlines()[1:]
    assert first.split()[:2] == ["1.00e-03", "4.0000"]
    assert "falls fastest" in first and "falls fastest" not in second
    assert second.count("█") < first.count("█") < third.count("█")


@pytest.mark.long
def test_search_on_recipe(tmp_path, capsys):
    arguments = [f"dir={tmp_path}/run", "model.decoder.dim=8"]
    assert main(["lr-find", "--steps", "20", "--max", "3", "lm-tiny", *arguments]) == 0
    text = capsys.readouterr().out
    assert "The loss falls fastest at a learning rate of" in text
    assert "learner.optimizer.inner.learning_rate" in text.replace("\n", "")
    assert not (tmp_path / "run").exists()


def config(directory):
    cfg = lm_tiny().set(dir=str(directory / "run"))
    cfg.model.decoder.dim = 8
    cfg.model.decoder.transformer.num_layers = 1
    return cfg


def test_invalid_sweep_is_rejected(tmp_path):
    for kwargs in ({"min_rate": 0}, {"min_rate": 2.0}):
        with pytest.raises(LearningRateSearchError, match=r"expected 0 < min_rate < max_rate"):
            find_learning_rate(config(tmp_path), **kwargs)


def test_learner_without_rate_is_rejected(tmp_path):
    def fixed(params):
        return params

    cfg = config(tmp_path)
    cfg.learner = Learner.default_config().set(optimizer=config_for_function(fixed))
    with pytest.raises(LearningRateSearchError, match=r"has no field `learning_rate`"):
        find_learning_rate(cfg)


@pytest.mark.long
def test_loss_that_never_falls_is_reported(tmp_path):
    cfg = config(tmp_path)
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(decouple_weight_decay=True)
    cfg.learner.optimizer.learning_rate = 0.0
    with pytest.raises(LearningRateSearchError, match=r"does not fall at any rate from 1000 to"):
        find_learning_rate(cfg, min_rate=1e3, max_rate=1e4, num_steps=20)
