"""Schedules are as long as the run, unless a config says otherwise, and keep their curve."""

import pytest

from weft.cli import main
from weft.cli.configs import load_config
from weft.config import REQUIRED, config_for_function, from_text, to_text
from weft.errors import ScheduleError
from weft.trainer.run_dir import claim_run_dir, learner_config, schedule_notes
from weft.trainer.schedule import cosine_with_linear_warmup, stepwise

RATE = "learner.optimizer.inner.learning_rate"


def length(cfg):
    return learner_config(cfg).optimizer.inner.learning_rate.max_step


def at(tmp_path, *overrides):
    return load_config("lm-tiny", [f"dir={tmp_path}", *overrides])


@pytest.fixture
def saved(tmp_path):
    """Starts a run of 40 steps, which has a checkpoint."""
    cfg = at(tmp_path, "max_step=40")
    claim_run_dir(cfg)
    (tmp_path / "checkpoints" / "step_00000020").mkdir(parents=True)
    return tmp_path


def test_length_follows_max_step_unless_it_is_set(tmp_path):
    assert length(at(tmp_path)) == 60
    assert length(at(tmp_path, "max_step=2000")) == 2000
    assert length(at(tmp_path, "max_step=2000", f"{RATE}.max_step=50")) == 50
    cfg = at(tmp_path, "max_step=2000")
    assert length(from_text(to_text(cfg))) == 2000
    # The config itself stays as it is, so that a run of another length can be made from it.
    assert cfg.learner.optimizer.inner.learning_rate.max_step is REQUIRED


def test_lengths_inside_of_schedules(tmp_path):
    cfg = at(tmp_path)
    inner = config_for_function(cosine_with_linear_warmup).set(peak_lr=0.1)
    cfg.learner.optimizer.inner.learning_rate = config_for_function(stepwise).set(
        sub=[inner, 0.1], start_step=[30]
    )
    assert learner_config(cfg).optimizer.inner.learning_rate.sub[0].max_step == 60


def test_continued_run_keeps_its_curve(saved):
    cfg = at(saved, "max_step=100")
    assert length(cfg) == 40
    assert schedule_notes(cfg) == [
        "40 steps, as when the run began; then the learning rate stays 0.001"
    ]
    claim_run_dir(cfg)
    assert length(at(saved, "max_step=200")) == 40
    assert schedule_notes(at(saved, "max_step=40")) == []


def test_schedule_that_ends_early_is_announced(tmp_path):
    words = [f"{RATE}.max_step=30", f"{RATE}.alpha=0"]
    (note,) = schedule_notes(at(tmp_path, *words))
    assert note == (
        f"30 steps, as {RATE}.max_step says; then the learning rate is 0, and steps train nothing: "
        "start a run in another `dir`"
    )
    assert schedule_notes(at(tmp_path)) == []


def test_shown_config_has_the_length(saved, capsys):
    assert main(["config", "show", "lm-tiny", "max_step=2000"]) == 0
    text = capsys.readouterr().out
    assert text.endswith(f"# {RATE}.max_step is 2000, max_step.\n")
    assert length(from_text(text)) == 2000
    assert main(["config", "show", str(saved), "max_step=100"]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown == f"# {RATE}.max_step is 40, the max_step with which the run began."


def test_neither_has_a_length(tmp_path):
    with pytest.raises(ScheduleError, match=rf"{RATE}.max_step .* Set max_step=1000"):
        learner_config(at(tmp_path, "max_step=inf"))


def test_run_without_steps(tmp_path):
    with pytest.raises(ScheduleError, match=rf"max_step=0 trains no steps, and {RATE}.max"):
        learner_config(at(tmp_path, "max_step=0"))


def test_length_beyond_the_integers_of_devices_is_refused(saved):
    record = saved / "run.json"
    text = record.read_text(encoding="utf-8")
    assert '"schedule_steps": 40' in text
    record.write_text(
        text.replace('"schedule_steps": 40', f'"schedule_steps": {2**62}'), encoding="utf-8"
    )
    with pytest.raises(ScheduleError, match=rf"{RATE}.max_step would be {2**62}, .* at most"):
        learner_config(at(saved, "max_step=40"))
