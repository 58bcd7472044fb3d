import sys
import types

import pytest

from weft.config import (
    Configurable,
    UnknownConfigError,
    UnknownFieldError,
    config_class,
    get_named_trainer_config,
    with_overrides,
)


class Trainer(Configurable):
    @config_class
    class Config(Configurable.Config):
        data: str | None = None
        max_step: int = 10


def small(data_dir=None):
    """A small one."""
    return Trainer.default_config().set(data=data_dir)


@pytest.fixture
def recipes(monkeypatch):
    module = types.ModuleType("some_recipes")
    module.named_trainer_configs = lambda: {"lm-small": small, "lm-large": small}
    monkeypatch.setitem(sys.modules, "some_recipes", module)
    return module


def test_a_recipe_is_found_by_name(recipes):
    fn = get_named_trainer_config("lm-small", config_module="some_recipes")
    assert fn(data_dir="/data").data == "/data"
    assert fn().data is None


def test_an_unknown_recipe_names_the_nearest(recipes):
    with pytest.raises(UnknownConfigError) as error:
        get_named_trainer_config("lm-smal", config_module="some_recipes")
    assert str(error.value).startswith("unknown recipe 'lm-smal' in some_recipes. Did you mean 'lm")
    assert isinstance(error.value, KeyError)


def test_a_module_without_recipes():
    with pytest.raises(UnknownConfigError, match="does not define named_trainer_configs"):
        get_named_trainer_config("lm", config_module="math")


def test_the_error_without_a_message():
    assert str(UnknownConfigError()) == ""


def test_with_overrides():
    fn = with_overrides(small, max_step=3)
    cfg = fn("/data")
    assert (cfg.data, cfg.max_step) == ("/data", 3)
    assert fn.__doc__ == "A small one."
    assert small().max_step == 10
    with pytest.raises(UnknownFieldError, match="Did you mean 'max_step'"):
        with_overrides(small, max_steps=3)()
