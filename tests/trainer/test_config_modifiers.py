import jax

from weft.cli.configs import load_config
from weft.config import REQUIRED, ConfigModifier, Required, config_class, to_text
from weft.recipes.lm import lm_tiny
from weft.trainer.config_modifiers import apply_config_modifiers
from weft.trainer.trainer_config_modifier import MeshShapeModifier


class Longer(ConfigModifier):
    @config_class
    class Config(ConfigModifier.Config):
        by: Required[int] = REQUIRED

    def __call__(self, cfg):
        return cfg.set(max_step=cfg.max_step + self.config.by)


class Twice(ConfigModifier):
    def __call__(self, cfg):
        return cfg.set(max_step=2 * cfg.max_step)


def config(*modifiers):
    return lm_tiny().set(max_step=5, mesh_shape=(1, 1), config_modifiers=modifiers)


LONGER = Longer.default_config().set(by=3)


def test_modifiers_change_a_copy_in_their_order():
    cfg = config(LONGER, Twice.default_config())
    assert apply_config_modifiers(cfg).max_step == 16
    assert apply_config_modifiers(config(Twice.default_config(), LONGER)).max_step == 13
    assert (cfg.max_step, len(cfg.config_modifiers)) == (5, 2)
    assert apply_config_modifiers(config()).max_step == 5


def test_a_trainer_is_made_of_what_they_give():
    trainer = config(LONGER).instantiate(parent=None, devices=jax.devices()[:1])
    assert trainer.config.max_step == 8
    assert list(trainer.config.config_modifiers) == []


def test_the_command_line_sees_the_config_that_is_run(tmp_path):
    cfg = load_config("lm-tiny", ["max_step=3"])
    assert cfg.max_step == 3
    file = tmp_path / "config.txt"
    cfg.config_modifiers = [MeshShapeModifier.default_config().set(mesh_shape=(1, 1))]
    file.write_text(to_text(cfg))
    assert load_config(str(file)).mesh_shape == (1, 1)
