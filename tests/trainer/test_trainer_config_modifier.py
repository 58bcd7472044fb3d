import jax
import pytest

from weft.cli.configs import load_config
from weft.config import REQUIRED, ConfigModifier, Required, config_class, from_text, to_text
from weft.errors import ConfigModifierError
from weft.hierarchy.attention import TransformerFeedForwardLayer
from weft.hierarchy.base_layer import RematSpec
from weft.hierarchy.layers import LayerNorm, RMSNorm
from weft.hierarchy.layers.linear import Linear
from weft.recipes.lm import lm_tiny
from weft.trainer.gradients import with_minibatch_steps
from weft.trainer.mesh import select_mesh_config
from weft.trainer.trainer_config_modifier import (
    ChainConfigModifier,
    GradientAccumulationModifier,
    MeshShapeModifier,
    ModuleConfigModifier,
    PartitionSpecModifier,
    RematSpecModifier,
    ReplaceLayerConfigModifier,
    apply_config_modifiers,
)

LAYER = "model.decoder.transformer.layer"
EMB = "model.decoder.emb.token_emb"


def modified(modifier, **fields):
    return modifier.default_config().set(**fields).instantiate()(lm_tiny())


def test_remat_policies():
    spec = RematSpec(prevent_cse=False)
    cfg = modified(RematSpecModifier, remat_policies={LAYER: spec})
    assert cfg.get_recursively(LAYER).remat_spec == spec


def test_partition_specs():
    specs = {EMB: ("model", None), LAYER: {"dtype": None}}
    specs[f"{LAYER}.feed_forward.linear1"] = {
        "param_partition_spec": ("data", "model"),
        "output_partition_spec": ("data", None, "model"),
    }
    cfg = modified(PartitionSpecModifier, partition_specs=specs)
    assert cfg.get_recursively(EMB).param_partition_spec == ("model", None)
    linear = cfg.get_recursively(f"{LAYER}.feed_forward.linear1")
    assert linear.param_partition_spec == ("data", "model")
    assert linear.output_partition_spec == ("data", None, "model")


def test_config_replacement():
    norm = LayerNorm.default_config().set(eps=0.1)
    path = f"{LAYER}.feed_forward.norm"
    cfg = modified(ModuleConfigModifier, target_config=path, modification=norm)
    assert cfg.get_recursively(path) == norm
    norm.eps = 0.2  # the modifier holds a copy
    assert cfg.get_recursively(path).eps == 0.1


def test_every_config_of_a_class_is_replaced():
    source = LayerNorm.default_config().set(eps=0.1)
    cfg = modified(ReplaceLayerConfigModifier, target_cls=RMSNorm, source_config=source)
    norms = [
        cfg.get_recursively(f"{LAYER}.self_attention.norm"),
        cfg.get_recursively(f"{LAYER}.feed_forward.norm"),
        cfg.model.decoder.output_norm,
    ]
    assert {norm.klass for norm in norms} == {LayerNorm}
    # Common fields carry over, but for those that are left out.
    assert {norm.eps for norm in norms} == {1e-8}
    cfg = modified(
        ReplaceLayerConfigModifier,
        target_cls=RMSNorm,
        source_config=source,
        exclude_keys=["eps"],
    )
    assert cfg.model.decoder.output_norm.eps == 0.1


class Wider(TransformerFeedForwardLayer):
    """A feed-forward layer of a project's own."""


def test_replacement_keeps_nested_fields():
    cfg = modified(
        ReplaceLayerConfigModifier,
        target_cls=TransformerFeedForwardLayer,
        source_config=Wider.default_config(),
    )
    layer = cfg.get_recursively(f"{LAYER}.feed_forward")
    assert layer.klass is Wider
    assert layer.activation == ("nn.silu", "linear")
    assert layer.linear1.bias is False


def test_microbatches():
    cfg = modified(GradientAccumulationModifier, grad_acc_steps=4)
    transformation = cfg.learner.forward_fn_transformation
    assert transformation.fn is with_minibatch_steps
    assert transformation.steps == 4


def test_rule_of_modifiers_round_trips_as_text():
    remat = RematSpecModifier.default_config().set(remat_policies={LAYER: RematSpec()})
    mesh = MeshShapeModifier.default_config().set(mesh_shape=(2, 4))
    chain = ChainConfigModifier.default_config().set(config_modifiers=[mesh, remat])
    cfg = from_text(to_text(lm_tiny().set(mesh_rules=[("gpu-.*", chain), (".*", (-1, 1))])))
    select_mesh_config(cfg, mesh_selector="gpu-h100")
    assert cfg.mesh_shape == (2, 4)
    assert cfg.get_recursively(LAYER).remat_spec == RematSpec()


@pytest.mark.parametrize(
    ("modifier", "fields", "message"),
    [
        (
            RematSpecModifier,
            {"remat_policies": {"model.decoder.transfomer.layer": RematSpec()}},
            "RematSpecModifier finds nothing at 'model.decoder.transfomer.layer': .*transformer",
        ),
        (
            PartitionSpecModifier,
            {"partition_specs": {f"{EMB}.dim": ("model",)}},
            "PartitionSpecModifier expects a config at .*token_emb.dim', but found",
        ),
        (
            PartitionSpecModifier,
            {"partition_specs": {EMB: {"outputs_partition_spec": ("model",)}}},
            "'outputs_partition_spec' of .*token_emb', but Embedding has no .*"
            "'output_partition_spec'",
        ),
        (
            ModuleConfigModifier,
            {"target_config": "model.encoder", "modification": Linear.default_config()},
            "ModuleConfigModifier finds nothing at 'model.encoder'",
        ),
        (
            ReplaceLayerConfigModifier,
            {"target_cls": LayerNorm, "source_config": RMSNorm.default_config()},
            "ReplaceLayerConfigModifier finds no config of LayerNorm to replace",
        ),
    ],
    ids=["remat", "no config", "field", "module", "class"],
)
def test_unmatched_modifier(modifier, fields, message):
    with pytest.raises(ConfigModifierError, match=message):
        modified(modifier, **fields)


def test_unsupported_microbatches():
    cfg = lm_tiny().set(learner=LayerNorm.default_config())
    modifier = GradientAccumulationModifier.default_config().set(grad_acc_steps=2).instantiate()
    with pytest.raises(ConfigModifierError, match="'forward_fn_transformation' of 'learner'"):
        modifier(cfg)


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


def test_trainer_uses_modified_config():
    trainer = config(LONGER).instantiate(parent=None, devices=jax.devices()[:1])
    assert trainer.config.max_step == 8
    assert list(trainer.config.config_modifiers) == []


def test_command_line_shows_modified_config(tmp_path):
    cfg = load_config("lm-tiny", ["max_step=3"])
    assert cfg.max_step == 3
    file = tmp_path / "config.txt"
    cfg.config_modifiers = [MeshShapeModifier.default_config().set(mesh_shape=(1, 1))]
    file.write_text(to_text(cfg), encoding="utf-8")
    assert load_config(str(file)).mesh_shape == (1, 1)
