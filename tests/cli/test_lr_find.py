import io

import pytest
from rich.console import Console

from weft.cli import main
from weft.cli.lr_find import loss_table
from weft.trainer.learning_rate_finder import LearningRateSearch


def test_the_table_has_a_bar_for_each_rate_and_marks_the_suggestion():
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
def test_a_recipe_is_searched(tmp_path, capsys):
    arguments = [f"dir={tmp_path}/run", "model.decoder.dim=8"]
    assert main(["lr-find", "--steps", "20", "--max", "3", "lm-tiny", *arguments]) == 0
    text = capsys.readouterr().out
    assert "The loss falls fastest at a learning rate of" in text
    assert "learner.optimizer.inner.learning_rate" in text.replace("\n", "")
    assert not (tmp_path / "run").exists()
