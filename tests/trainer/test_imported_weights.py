"""A run that begins with imported parameters, of which it trains adapters alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import WeightsMismatchError
from weft.hierarchy.lora import merge_adapters
from weft.hierarchy.lora_setters import set_lora_recursively
from weft.input.fake import FakeLmInput
from weft.interop.huggingface import huggingface_model_config, to_huggingface
from weft.serialization import save_safetensors
from weft.trainer.imported_weights import ImportedWeightsBuilder, import_weights
from weft.trainer.learner import Learner, UpdateType
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.trainer import SpmdTrainer

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint: its folder, the config of its model, and its parameters."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(QWEN))
    cfg = huggingface_model_config(folder)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * np.sin(np.arange(x.size)).reshape(x.shape), x.dtype),
        shapes_of(cfg),
    )
    to_huggingface(folder, cfg, params)
    return folder, cfg, params


def shapes_of(cfg):
    model = cfg.clone(name="model").instantiate(parent=None)
    return jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))


def trainer_of(directory, model, path):
    set_lora_recursively(model, rank=2, alpha=4.0)
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=2,
        model=model,
        learner=Learner.default_config().set(
            optimizer=optimizer,
            update_rules=[
                (".*/adapter/.*", UpdateType.ALL_UPDATES),
                (".*", UpdateType.NO_UPDATE),
            ],
        ),
        input=FakeLmInput.default_config().set(
            is_training=True, global_batch_size=8, source_length=4, max_token_id=16
        ),
        mesh_shape=(8, 1),
        mesh_axis_names=("data", "model"),
        init_state_builder=ImportedWeightsBuilder.default_config().set(path=str(path)),
    )
    return cfg.instantiate(parent=None)


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in found}


def test_a_run_begins_with_the_checkpoint_and_trains_adapters_alone(base, tmp_path):
    folder, cfg, params = base
    trainer = trainer_of(tmp_path / "run", cfg.clone(), folder)
    trainer.init(jax.random.key(0))
    begun = trainer.trainer_state.model
    merged = merge_adapters(trainer.model, begun)
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    before = leaves(begun)
    trainer.run()
    after = leaves(trainer.trainer_state.model)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed and all("/adapter/" in path for path in changed)


def test_exported_files_are_read_by_the_names_of_the_parameters(base, tmp_path):
    _, cfg, params = base
    path = tmp_path / "m.safetensors"
    save_safetensors(path, params)
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)
    read = import_weights(str(path), given)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype("bfloat16")), read, params)
    other = cfg.clone()
    other.decoder.dim = 16
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(other))
    with pytest.raises(
        WeightsMismatchError, match=r"shape: decoder.emb.token_emb.weight \[16, 8\]"
    ):
        import_weights(str(path), zeros)
