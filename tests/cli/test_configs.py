import pytest

from weft.cli.configs import load_config, run_config
from weft.config import to_text
from weft.errors import CommandLineError, ConfigTextError, UnknownConfigError, UnknownFieldError


def test_a_recipe_and_the_text_of_its_config_are_the_same(tmp_path):
    recipe = load_config("lm-tiny", ["max_step=7"])
    assert recipe.max_step == 7
    text = tmp_path / "mine.txt"
    text.write_text(to_text(recipe))
    assert load_config(str(text)) == recipe
    (tmp_path / "config.txt").write_text(to_text(recipe))
    assert run_config(str(tmp_path)) == recipe.clone(dir=str(tmp_path))


def test_what_is_no_config(tmp_path):
    with pytest.raises(
        UnknownConfigError, match=r"unknown recipe 'lm-tinny'\. Did you mean 'lm-tiny'"
    ):
        load_config("lm-tinny")
    with pytest.raises(UnknownConfigError, match="there is no file or directory 'no/where'"):
        load_config("no/where")
    with pytest.raises(CommandLineError, match="has no run in it"):
        load_config(str(tmp_path))
    (tmp_path / "bad.txt").write_text("this is not a config")
    with pytest.raises((ConfigTextError, CommandLineError)):
        load_config(str(tmp_path / "bad.txt"))
    with pytest.raises((UnknownFieldError, ValueError), match=r"Did you mean 'max_step'"):
        load_config("lm-tiny", ["max_steps=3"])


def test_arguments_of_a_recipe_are_given_to_it(tmp_path):
    cfg = load_config("lm-tiny", [f"data_dir={tmp_path}", "seed=3"])
    assert cfg.seed == 3 and cfg.input.source.corpus.paths == str(tmp_path)
