"""The recipes: each makes a config that can be read, written and trained."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from weft.cli.check import without_corpus
from weft.config import diff, from_text, to_text
from weft.errors import ConfigError
from weft.hierarchy.causal_lm import Model
from weft.input.fake import FakeLmInput
from weft.recipes import named_trainer_configs
from weft.recipes.lm import trainer_config
from weft.trainer.mesh import select_mesh_config
from weft.trainer.model import build_model
from weft.trainer.run_dir import learner_config
from weft.trainer.trainer import SpmdTrainer


def needs_no_arguments(recipe):
    return all(x.default is not x.empty for x in recipe.arguments().values())


# The others have tests of their own.
NAMES = [name for name, recipe in named_trainer_configs().items() if needs_no_arguments(recipe)]


@pytest.mark.parametrize("name", NAMES)
def test_recipe_config_round_trips(name):
    cfg = named_trainer_configs()[name]()
    assert isinstance(cfg, SpmdTrainer.Config)
    assert cfg.dir == f"runs/{name}"
    for omit_defaults in (True, False):
        assert not diff(from_text(to_text(cfg, omit_defaults)), cfg)


@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices")
@pytest.mark.parametrize("name", NAMES)
def test_model_shards_over_data_and_model_axes(name):
    cfg = without_corpus(named_trainer_configs()[name]())
    others = len(cfg.mesh_axis_names) - 2
    cfg.mesh_shape = (4, *(1,) * others, 2)
    specs = cfg.instantiate(parent=None).trainer_state_partition_specs
    assert any("model" in spec for spec in jax.tree.leaves(specs.model))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("lm-1b", 1.2e9, 1.3e9), ("lm-8b", 8.0e9, 8.1e9), ("lm-70b", 70e9, 71e9)],
)
def test_large_models_have_their_sizes(name, least, most):
    cfg: Any = named_trainer_configs()[name]()
    specs = build_model(without_corpus(cfg)).create_parameter_specs_recursively()
    assert least < sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs)) < most
    with pytest.raises(ConfigError, match="paths"):
        cfg.instantiate(parent=None)
    select_mesh_config(cfg, mesh_selector="gpu-h100-64")
    assert dict(zip(cfg.mesh_axis_names, cfg.mesh_shape, strict=True))["fsdp"] == -1


def test_text_folder_replaces_the_standard_library(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 5000, encoding="utf-8")
    cfg = named_trainer_configs()["lm-tiny"](str(tmp_path))
    cfg.input.source.corpus.held_out_fraction = 0.0
    batch = next(iter(cfg.input.set(name="input").instantiate(parent=None).dataset()))
    assert set(np.unique(batch["input_ids"])) <= {ord("a"), 256}


def test_steps_evaluations_and_saves_follow_arguments():
    train, held_out = (
        FakeLmInput.default_config().set(is_training=is_training, global_batch_size=2)
        for is_training in (True, False)
    )
    cfg = trainer_config(
        "runs/a",
        model=Model.default_config(),
        train_input=train,
        held_out_input=held_out,
        max_step=40,
        peak_lr=0.5,
        eval_every=10,
        save_every=20,
    )
    assert (cfg.dir, cfg.max_step, cfg.input) == ("runs/a", 40, train)
    evaler = cfg.evalers["held_out"]
    assert evaler.input == held_out
    policy = evaler.eval_policy.instantiate()
    assert [s for s in range(1, 41) if policy(step=s, train_summaries={})] == [10, 20, 30, 40]
    save = cfg.checkpointer.save_policy.instantiate()
    assert [s for s in range(1, 41) if save(step=s, evaler_summaries={})] == [20, 40]
    rate = learner_config(cfg).optimizer.inner.learning_rate.instantiate()
    assert float(rate(2)) == 0.5
