"""A run that starts with imported parameters and added adapters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import WeightsMismatchError
from weft.hierarchy.lora_setters import base_state, set_lora_recursively
from weft.input.fake import FakeLmInput
from weft.interop.huggingface import huggingface_model_config, to_huggingface
from weft.serialization import save_safetensors
from weft.trainer.imported_weights import ImportedWeightsBuilder, import_weights
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.trainer import SpmdTrainer

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
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


def test_a_run_begins_with_the_checkpoint_and_draws_its_adapters(base, tmp_path):
    folder, cfg, params = base
    model = cfg.clone()
    set_lora_recursively(model, rank=2, alpha=4.0)
    trainer = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(tmp_path),
        model=model,
        learner=Learner.default_config().set(
            optimizer=config_for_function(sgd_optimizer).set(
                learning_rate=0.1, decouple_weight_decay=True
            )
        ),
        input=FakeLmInput.default_config().set(is_training=True, global_batch_size=8),
        mesh_shape=(4, 2),
        mesh_axis_names=("data", "model"),
        init_state_builder=ImportedWeightsBuilder.default_config().set(path=str(folder)),
    )
    trainer = trainer.instantiate(parent=None)
    trainer.init(jax.random.key(0))
    begun = trainer.trainer_state.model
    jax.tree.map(np.testing.assert_array_equal, base_state(begun), params)
    specs = trainer.trainer_state_partition_specs.model
    layouts = jax.tree.map(lambda x: x.sharding.spec, begun)
    assert layouts == specs and any("model" in spec for spec in jax.tree.leaves(specs))
    adapters = {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(begun)
        if "adapter" in jax.tree_util.keystr(path)
    }
    assert adapters
    for name, value in adapters.items():
        assert np.any(value) == ("lora_down" in name)


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
