"""Builders that read checkpoints; more of them in test_state_builder.py."""

import jax
import jax.numpy as jnp

from weft.trainer.builder_base import Builder
from weft.trainer.checkpointer import Checkpointer, CheckpointValidationType
from weft.trainer.storage_builders import TensorStoreStateStorageBuilder
from weft.trainer.train_step import TrainerState


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog):
    cfg = Checkpointer.default_config().set(name="c", dir=str(tmp_path), keep_last_n=2)
    with cfg.instantiate(parent=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step=step, state={"model": {"w": jnp.full(3, float(step))}})
    (tmp_path / "step_00000002/arrays/model-w/0").write_bytes(b"x" * 12)

    cfg = TensorStoreStateStorageBuilder.default_config().set(
        name="builder",
        base_dir=str(tmp_path),
        validation=CheckpointValidationType.CONTAINS_STATE,
    )
    wanted = TrainerState(
        prng_key={}, model={"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, learner={}
    )
    state = cfg.instantiate(parent=None)(Builder.State(0, wanted, {"learner/x"}))
    assert (state.step, state.built_keys) == (1, {"model/w", "learner/x"})
    assert float(state.trainer_state.model["w"][0]) == 1.0
    assert "step_00000002 (arrays/model-w/0: its content has changed) is damaged" in caplog.text
