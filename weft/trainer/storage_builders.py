"""Builders that read checkpoints of other runs.

They read only the requested leaves, into the layouts that the run needs, and check every file of
the checkpoint. A damaged checkpoint is named, and skipped if any step is acceptable.
"""

import os
from typing import Any

from weft.config import config_class
from weft.errors import StateBuilderError
from weft.trainer.builder_base import Builder
from weft.trainer.checkpoint_dirs import not_found, parse_step_from_dir
from weft.trainer.checkpoint_index import (
    CheckpointValidationType,
    build_index,
    check_state_structure,
    flatten_state,
    is_array,
    read_index_file,
)
from weft.trainer.checkpointer import Checkpointer
from weft.trainer.state_storage import OrbaxStateStorage, StateStorage
from weft.trainer.train_step import TrainerState


class BaseStateStorageBuilder(Builder):
    """Base class of builders that read a checkpoint."""

    @config_class
    class Config(Builder.Config):
        """Configures a BaseStateStorageBuilder.

        Attributes:
            base_dir: directory of all checkpoints of a run.
            step: None for the newest undamaged checkpoint.
            validation: required similarity of the checkpoint and the requested leaves, within each
                requested one of model, learner and PRNG key.
        """

        base_dir: str | None = None
        step: int | None = None
        validation: CheckpointValidationType = CheckpointValidationType.EXACT

    def input_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSOR_SPECS

    def _read(
        self, state: Builder.State, base_dir: str, step: int | None, storage: StateStorage.Config
    ) -> Builder.State:
        validation = self.config.validation
        cfg = Checkpointer.default_config().set(
            name="checkpointer",
            dir=base_dir,
            storage=storage,
            validation=validation.allowing_more,
        )
        wanted = state.trainer_state
        with cfg.instantiate(parent=None) as checkpointer:
            found, restored = checkpointer.restore(step=step, state=wanted._asdict())
            if found is None:
                raise not_found(base_dir)
            if not validation.allows_more:
                asked = {path.split("/")[0] for path, _ in flatten_state(wanted)}
                saved = read_index_file(checkpointer.ckpt_dir(found))
                check_state_structure(
                    [(path, entry) for path, entry in saved if path.split("/")[0] in asked],
                    build_index(wanted),
                    validation=validation,
                )
        built = {path for path, leaf in flatten_state(wanted) if is_array(leaf)}
        return Builder.State(
            step=found,
            trainer_state=TrainerState(**restored),
            built_keys=state.built_keys | built,
        )


class TensorStoreStateStorageBuilder(BaseStateStorageBuilder):
    """Builder that reads a checkpoint of a `Checkpointer`."""

    @config_class
    class Config(BaseStateStorageBuilder.Config):
        """Configures a TensorStoreStateStorageBuilder.

        `dir`, the directory of one checkpoint, replaces `base_dir` and `step`.
        """

        dir: str | None = None
        storage: StateStorage.Config = OrbaxStateStorage.default_config()

    def __call__(self, state: Builder.State) -> Builder.State:
        cfg = self.config
        if (cfg.dir is None) == (cfg.base_dir is None):
            raise StateBuilderError(
                f"{self.path()} got dir={cfg.dir!r} and base_dir={cfg.base_dir!r}; expected one of "
                "the two: `dir` of one checkpoint, or `base_dir` of all checkpoints of a run."
            )
        if cfg.dir is None:
            return self._read(state, cfg.base_dir, cfg.step, cfg.storage)
        base_dir = os.path.dirname(os.path.normpath(cfg.dir))
        return self._read(state, base_dir, parse_step_from_dir(cfg.dir), cfg.storage)


class OrbaxStateBuilder(BaseStateStorageBuilder):
    """Builder that reads a checkpoint of a `Checkpointer` with an `OrbaxStateStorage`."""

    def __call__(self, state: Builder.State) -> Builder.State:
        cfg = self.config
        if cfg.base_dir is None:
            raise StateBuilderError(
                f"{self.path()}: base_dir is None; expected the directory of all checkpoints of a "
                "run, such as 'runs/lm/checkpoints'."
            )
        storage: Any = OrbaxStateStorage.default_config()
        return self._read(state, cfg.base_dir, cfg.step, storage)
