import sys
import types

import pytest

from weft.config import (
    REQUIRED,
    ConfigModifier,
    ConfigOr,
    Configurable,
    InstantiableConfig,
    InvalidConfigClassError,
    InvalidConfigValueError,
    Required,
    RequiredFieldMissingError,
    UnknownConfigError,
    UnknownFieldError,
    config_class,
    get_named_trainer_config,
    maybe_instantiate,
    maybe_set_config,
    with_overrides,
)


class Part(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        depth: Required[int] = REQUIRED
        scale: float = 1.0


class Whole(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        part: Part.Config = Part.default_config()
        parts: list[InstantiableConfig] = []

    def __init__(self, config, *, parent=None):
        super().__init__(config)
        cfg = self.config
        self.parent = parent
        self.part = cfg.part.set(dim=cfg.dim, depth=1).instantiate()


def test_factory_creates_objects():
    cfg = Part.default_config().set(dim=1, depth=1)
    assert cfg.instantiate() is not cfg.instantiate()


def test_object_config_is_independent_of_its_source():
    cfg = Part.default_config().set(dim=1, depth=1)
    part = cfg.instantiate()
    cfg.dim = 2
    assert part.config.dim == 1


def test_subclass_without_config_inherits_it():
    class Special(Part):
        pass

    cfg = Special.default_config().set(dim=1, depth=2)
    assert type(cfg) is Part.Config
    assert type(cfg.instantiate()) is Special
    assert repr(cfg) == "Special.Config(depth=2, dim=1, scale=1.0)"


def test_default_config_may_be_extended():
    class Wide(Part):
        @classmethod
        def default_config(cls):
            return super().default_config().set(dim=512)

    assert Wide.default_config().dim == 512
    assert Wide.default_config().klass is Wide


def test_required_field_is_rejected():
    with pytest.raises(RequiredFieldMissingError) as error:
        Whole.default_config().instantiate()
    message = str(error.value)
    assert message.startswith("dim is still REQUIRED in Whole.Config, which was created at ")
    assert "test_configurable.py:" in message
    assert message.endswith("Write cfg.set(dim=…) before cfg.instantiate().")


def test_all_required_fields_are_named_with_their_paths():
    cfg = Whole.default_config()
    with pytest.raises(RequiredFieldMissingError) as error:
        cfg.part.instantiate()
    assert "part.depth, part.dim are still REQUIRED in Part.Config" in str(error.value)
    assert "Write cfg.set(depth=…, dim=…)" in str(error.value)


def test_invalid_appended_value_is_rejected():
    cfg = Whole.default_config().set(dim=1)
    cfg.parts.append(Part.default_config().set(dim=1, depth=1).instantiate())
    with pytest.raises(InvalidConfigValueError, match=r"parts\[0\]: A config cannot hold an obj"):
        cfg.instantiate()


def test_objects_are_not_config_values():
    part = Part.default_config().set(dim=1, depth=1).instantiate()
    with pytest.raises(InvalidConfigValueError) as error:
        Whole.default_config().part = part
    assert "part: A config cannot hold an object of type Part" in str(error.value)
    assert "Part.default_config(), or the object's `.config.clone()`" in str(error.value)
    assert Whole.default_config().set(part=part.config.clone()).part.dim == 1


def test_config_not_derived_from_parent():
    class Wrong(Part):
        class Config:
            dim: int = 1

    with pytest.raises(InvalidConfigClassError) as error:
        Wrong.default_config()
    assert "Wrong.Config does not derive from the config of its parent" in str(error.value)
    assert "Write `class Config(Part.Config):`" in str(error.value)


def test_base_classes_name_missing_methods():
    with pytest.raises(NotImplementedError, match="InstantiableConfig"):
        InstantiableConfig().instantiate()
    with pytest.raises(NotImplementedError, match="ConfigModifier"):
        ConfigModifier.default_config().instantiate()(Part.default_config())


def test_modifier_changes_configs():
    class Scale(ConfigModifier):
        @config_class
        class Config(ConfigModifier.Config):
            by: Required[float] = REQUIRED

        def __call__(self, cfg):
            return cfg.set(scale=cfg.scale * self.config.by)

    modifier = Scale.default_config().set(by=3.0).instantiate()
    assert modifier(Part.default_config()).scale == 3.0


def test_factory_may_define_instantiate():
    @config_class
    class Doubled(InstantiableConfig[int]):
        x: int = 1

        def instantiate(self, **kwargs):
            return 2 * self.x

    class Holder(Configurable):
        @config_class
        class Config(Configurable.Config):
            value: ConfigOr[int] = 0

    cfg = Holder.default_config().set(value=Doubled(x=4))
    assert maybe_instantiate(cfg.value) == 8
    assert Holder.default_config().set(value=5).value == 5


def test_maybe_set_config_ignores_unknown_fields():
    cfg = Part.default_config()
    assert maybe_set_config(cfg, dim=3, colour="red") is cfg
    assert cfg.dim == 3
    assert maybe_set_config("not a config", dim=3) == "not a config"


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


def test_recipe_is_found_by_name(recipes):
    fn = get_named_trainer_config("lm-small", config_module="some_recipes")
    assert fn(data_dir="/data").data == "/data"
    assert fn().data is None


def test_unknown_recipe_names_the_nearest(recipes):
    with pytest.raises(UnknownConfigError) as error:
        get_named_trainer_config("lm-smal", config_module="some_recipes")
    assert str(error.value).startswith("unknown recipe 'lm-smal' in some_recipes. Did you mean 'lm")
    assert isinstance(error.value, KeyError)


def test_module_without_recipes():
    with pytest.raises(UnknownConfigError, match="does not define named_trainer_configs"):
        get_named_trainer_config("lm", config_module="math")


def test_with_overrides():
    fn = with_overrides(small, max_step=3)
    cfg = fn("/data")
    assert (cfg.data, cfg.max_step) == ("/data", 3)
    assert fn.__doc__ == "A small one."
    assert small().max_step == 10
    with pytest.raises(UnknownFieldError, match="Did you mean 'max_step'"):
        with_overrides(small, max_steps=3)()
