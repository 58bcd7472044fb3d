"""Checkpoints: the state of a run on the disk, so that what was cut goes on as if it was not.

A checkpoint is written beside its final place by a thread, described file by file in a manifest,
and then published by one rename. When a state is restored, the manifest is checked first: a
checkpoint with damage is named and passed over for the one before it. Old checkpoints go when a
newer one stands.

What lies where: the directories in `checkpoint_dirs`, digests in `checkpoint_manifest`, the
structure of a state in `checkpoint_index`, when to save in `checkpoint_policy`, the arrays in
`state_storage`.
"""

import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from weft.config import (
    REQUIRED,
    ConfigOr,
    InstantiableConfig,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from weft.errors import (
    CheckpointError,
    CheckpointPolicyError,
    CheckpointSaveError,
    DamagedCheckpointError,
)
from weft.hierarchy.module import Module
from weft.trainer.base_checkpointer import BaseCheckpointer
from weft.trainer.checkpoint_dirs import (
    STEP_NUM_DIGITS,
    STEP_PREFIX,
    build_step_dir,
    dir_being_written,
    not_found,
    parse_step_from_dir,
    publish_dir,
    remove_dir,
    step_dirs,
    tidy,
)
from weft.trainer.checkpoint_index import (
    CheckpointValidationType,
    Index,
    IndexFileWriter,
    check_state_structure,
    read_index_file,
    read_state_spec,
    write_index_file,
)
from weft.trainer.checkpoint_manifest import find_damage, has_manifest, write_manifest
from weft.trainer.checkpoint_policy import (
    BestMetricPolicy,
    CheckpointPolicy,
    EvalMetric,
    every_n_steps_and_last_policy,
    every_n_steps_policy,
)
from weft.trainer.python_savables import (
    PythonSavable,
    maybe_restore_python_savables,
    maybe_save_python_savables,
)
from weft.trainer.state_storage import (
    OrbaxStateStorage,
    StateStorage,
    StateStorageCommitCallback,
)
from weft.trainer.summary_writer import CheckpointerAction, SummaryWriter
from weft.typing import Nested

__all__ = [
    "STEP_NUM_DIGITS",
    "STEP_PREFIX",
    "BaseCheckpointer",
    "BestMetricPolicy",
    "CheckpointPolicy",
    "CheckpointValidationType",
    "Checkpointer",
    "DamagedCheckpoint",
    "EvalMetric",
    "IndexFileWriter",
    "OrbaxStateStorage",
    "PythonSavable",
    "RestoreStateFilter",
    "StateStorage",
    "StateStorageCommitCallback",
    "build_step_dir",
    "check_state_structure",
    "drop_learner_optimizer_cfg",
    "every_n_steps_and_last_policy",
    "every_n_steps_policy",
    "maybe_restore_python_savables",
    "maybe_save_python_savables",
    "parse_step_from_dir",
    "read_index_file",
    "read_state_spec",
    "write_index_file",
]

logger = logging.getLogger(__name__)

RestoreStateFilter = Callable[[Nested[Any]], Nested[Any]]
"""From the state that is to be restored to the part of it that is."""

_POLICY_STATE = "save_policy.json"


def drop_learner_optimizer_cfg() -> InstantiableConfig[RestoreStateFilter]:
    """A filter for restoring all but the optimizer's state, as for another optimizer, or none."""
    return config_for_function(_drop_learner_optimizer)


def _drop_learner_optimizer() -> RestoreStateFilter:
    def without(state: Nested[Any]) -> Nested[Any]:
        whole: Any = state
        learner = whole["learner"] if isinstance(whole, dict) else whole.learner
        learner = {name: part for name, part in learner.items() if name != "optimizer"}
        if isinstance(whole, dict):
            return {**whole, "learner": learner}
        return whole._replace(learner=learner)

    return without


@dataclasses.dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that was to be restored and could not.

    Attributes:
        path: Its directory.
        damage: What is wrong, one line per file.
    """

    path: str
    damage: tuple[str, ...]

    def __str__(self) -> str:
        shown = [*self.damage[:3], *(["…"] if len(self.damage) > 3 else [])]
        return f"{self.path} ({'; '.join(shown)})"


class Checkpointer(BaseCheckpointer):
    """Saves in the background, keeps the newest, never restores what is damaged.

    Example:
        >>> import tempfile
        >>> cfg = Checkpointer.default_config().set(name="checkpointer", dir=tempfile.mkdtemp())
        >>> with cfg.instantiate(parent=None) as checkpointer:
        ...     checkpointer.save(step=1, state={"w": np.arange(3.0), "epoch": 1})
        ...     checkpointer.wait_until_finished()
        ...     checkpointer.restore(state={"w": np.zeros(3), "epoch": 0})
        True
        (1, {'epoch': 1, 'w': array([0., 1., 2.])})
    """

    @config_class
    class Config(BaseCheckpointer.Config):
        """Configures a Checkpointer.

        Attributes:
            keep_last_n: How many of the newest checkpoints are kept.
            keep_every_n_steps: Checkpoints whose steps are this far apart, or farther, are kept as
                well; None keeps none of them.
            gc_loop_interval_seconds: The shortest time between two removals of old checkpoints. 0
                removes them as soon as a newer one stands.
            storage: Where the states go.
            validation: How alike checkpoint and state must be when restored; None for EXACT.
            index_writer: Writes the index; None for `write_index_file`.
            summary_writer: Is told of every checkpoint; writes in `dir` if it has none.
            restore_state_filter: Says which part of a state to restore.
        """

        keep_last_n: int = 1
        keep_every_n_steps: int | None = None
        gc_loop_interval_seconds: float = 0
        storage: StateStorage.Config = OrbaxStateStorage.default_config()
        validation: CheckpointValidationType | None = None
        index_writer: ConfigOr[IndexFileWriter] | None = None
        summary_writer: SummaryWriter.Config | None = None
        restore_state_filter: InstantiableConfig[RestoreStateFilter] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.keep_last_n < 1:
            raise CheckpointPolicyError(
                f"{self.path()}: keep_last_n={cfg.keep_last_n}; expected 1 or more, since a run "
                "goes on from the last checkpoint."
            )
        self._storage: StateStorage = cfg.storage.instantiate()
        self._index_writer = maybe_instantiate(cfg.index_writer) or write_index_file
        self._filter = maybe_instantiate(cfg.restore_state_filter)
        if cfg.summary_writer is not None:
            writer = cfg.summary_writer
            writer = writer if writer.dir is not REQUIRED else writer.clone(dir=cfg.dir)
            self._add_child("summary_writer", writer)
        self._saving: int | None = None  # the step of the save that is under way
        self._last_step: int | None = None  # saved or restored, so it need not be saved again
        self._last_removal = -float("inf")
        self._damaged: list[DamagedCheckpoint] = []
        self._damaged_steps: set[int] = set()

    def ckpt_dir(self, step: int) -> str:
        """The directory of a step's checkpoint."""
        return build_step_dir(self.config.dir, step=step)

    @property
    def damaged_checkpoints(self) -> tuple[DamagedCheckpoint, ...]:
        """What `restore` found damaged, and passed over or refused."""
        return tuple(self._damaged)

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        return [path for path in step_dirs(base_dir).values() if has_manifest(path)]

    @classmethod
    def cleanup_checkpoint(cls, ckpt_dir: str, *, sync: bool = True) -> None:
        """Removes a checkpoint.

        Args:
            ckpt_dir: Its directory.
            sync: Whether all processes call this, and wait for the one that removes.
        """
        if jax.process_index() == 0 and os.path.exists(ckpt_dir):
            remove_dir(ckpt_dir)
        if sync:
            _sync_processes(f"removed {ckpt_dir}")

    # Saving.

    def save(
        self,
        *,
        step: int,
        state: Nested[Any],
        evaler_summaries: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        wanted = self._save_policy(step=step, evaler_summaries=evaler_summaries or {})
        if not (wanted or force) or step in (self._saving, self._last_step):
            return False
        failure = self._finish_save()
        try:
            self._begin_save(step, state)
        except CheckpointError:
            raise
        except Exception as error:
            raise self._save_error(step, error) from error
        if failure is not None:
            raise failure
        return True

    def _begin_save(self, step: int, state: Nested[Any]) -> None:
        final_dir = self.ckpt_dir(step)
        ckpt_dir = dir_being_written(final_dir)
        if jax.process_index() == 0:
            os.makedirs(self.config.dir, exist_ok=True)
            tidy(self.config.dir)
            os.makedirs(ckpt_dir)
        _sync_processes(f"made {ckpt_dir}")
        policy = self._save_policy
        policy_state = policy.get_state() if isinstance(policy, PythonSavable) else None

        def publish(*, ckpt_dir: str, index: Index) -> None:
            if jax.process_index() != 0:
                return
            self._index_writer(ckpt_dir=ckpt_dir, index=index)
            if policy_state is not None:
                with open(os.path.join(ckpt_dir, _POLICY_STATE), "w", encoding="utf-8") as file:
                    json.dump(policy_state, file)
            write_manifest(ckpt_dir)
            publish_dir(final_dir)
            self._damaged_steps.discard(step)
            self._log(final_dir, step, CheckpointerAction.SAVE, state=None)
            self._remove_old(step)

        try:
            self._storage.save_to_dir(
                step=step, state=state, ckpt_dir=ckpt_dir, on_commit_callback=publish
            )
        except BaseException:
            shutil.rmtree(ckpt_dir, ignore_errors=True)
            raise
        self._saving = step

    def _finish_save(self) -> CheckpointSaveError | None:
        """Waits for the save that is under way; returns its failure."""
        step, self._saving = self._saving, None
        if step is None:
            return None
        try:
            self._storage.wait_until_finished()
        except Exception as error:
            failure = self._save_error(step, error)
            failure.__cause__ = error
            return failure
        self._last_step = step
        return None

    def _save_error(self, step: int, error: BaseException) -> CheckpointSaveError:
        stand = ", ".join(map(str, self.checkpoint_steps(self.config.dir))) or "none"
        return CheckpointSaveError(
            f"the checkpoint of step {step} could not be saved in {self.config.dir!r}: "
            f"{type(error).__name__}: {error}. Those that stand: {stand}. Make room, or make the "
            "directory writable; the next one that is due will be tried again."
        )

    def _remove_old(self, step: int) -> None:
        """Removes what the config does not keep, now that the checkpoint of `step` stands."""
        now = time.monotonic()
        if now - self._last_removal < self.config.gc_loop_interval_seconds:
            return
        self._last_removal = now
        # What lies ahead is of another course of the run, and no reason to remove what is behind.
        dirs = {s: path for s, path in step_dirs(self.config.dir).items() if s <= step}
        kept = self._kept([s for s in dirs if s not in self._damaged_steps])
        for old in dirs.keys() - kept:
            try:
                self.cleanup_checkpoint(dirs[old], sync=False)
            except OSError as error:
                logger.warning("The old checkpoint %s cannot be removed: %s", dirs[old], error)

    def _kept(self, steps: list[int]) -> set[int]:
        cfg = self.config
        kept = set(steps[-cfg.keep_last_n :])
        if cfg.keep_every_n_steps is not None:
            last = -float("inf")
            for step in steps:
                if step - last >= cfg.keep_every_n_steps:
                    kept.add(step)
                    last = step
        return kept

    def wait_until_finished(self) -> None:
        failure = self._finish_save()
        if failure is not None:
            raise failure

    def stop(self, *, has_exception: bool = False) -> None:
        failure = self._finish_save()
        self._storage.stop()
        if "summary_writer" in self.children:
            self.summary_writer.close()
        if failure is not None and has_exception:
            logger.error("%s", failure)
        elif failure is not None:
            raise failure

    # Restoring.

    def restore(
        self, *, step: int | None = None, state: Nested[Any]
    ) -> tuple[int | None, Nested[Any]]:
        self.wait_until_finished()
        step = self._choose_step(step)
        if step is None:
            return None, state
        cfg, ckpt_dir = self.config, self.ckpt_dir(step)
        validation = cfg.validation or CheckpointValidationType.EXACT
        if self._filter is not None:
            state = self._filter(state)
            validation = validation.allowing_more
        state = self._storage.restore_from_dir(
            step, state, ckpt_dir=ckpt_dir, validation=validation
        )
        policy_file = os.path.join(ckpt_dir, _POLICY_STATE)
        if isinstance(self._save_policy, PythonSavable) and os.path.exists(policy_file):
            with open(policy_file, encoding="utf-8") as file:
                self._save_policy.set_state(json.load(file))
        self._last_step = step
        self._log(ckpt_dir, step, CheckpointerAction.RESTORE, state)
        return step, state

    def _choose_step(self, wanted: int | None) -> int | None:
        """The step to restore; the first process looks, and tells the others."""
        none, refused = -1, -2
        found, error = none, None
        if jax.process_index() == 0:
            try:
                chosen = self._newest_whole() if wanted is None else self._if_whole(wanted)
                found = none if chosen is None else chosen
            except CheckpointError as e:
                found, error = refused, e
        if jax.process_count() > 1:
            found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if error is not None:
            raise error
        if found == refused:
            raise DamagedCheckpointError(
                f"process 0 found no checkpoint in {self.config.dir!r} that can be restored. Its "
                "own error says why."
            )
        return None if found == none else found

    def _newest_whole(self) -> int | None:
        damaged = []
        for step, path in reversed(step_dirs(self.config.dir).items()):
            checkpoint = self._if_damaged(step, path)
            if checkpoint is None:
                return step
            damaged.append(checkpoint)
            logger.warning(
                "The checkpoint %s is damaged. It is passed over for the one before.", checkpoint
            )
        if damaged:
            raise DamagedCheckpointError(
                f"every checkpoint in {self.config.dir!r} is damaged: "
                f"{'; '.join(map(str, damaged))}. Bring one back from a copy, or move the "
                "directory away to begin anew."
            )
        return None

    def _if_whole(self, step: int) -> int:
        path = self.ckpt_dir(step)
        if not os.path.isdir(path):
            raise not_found(self.config.dir, step)
        checkpoint = self._if_damaged(step, path)
        if checkpoint is not None:
            others = [s for s in self.checkpoint_steps(self.config.dir) if s != step]
            raise DamagedCheckpointError(
                f"the checkpoint {checkpoint} is damaged. "
                f"Restore another step: {', '.join(map(str, others)) or 'there is none'}."
            )
        return step

    def _if_damaged(self, step: int, path: str) -> DamagedCheckpoint | None:
        damage = find_damage(path)
        if not damage:
            return None
        checkpoint = DamagedCheckpoint(path, tuple(damage))
        self._damaged.append(checkpoint)
        self._damaged_steps.add(step)
        return checkpoint

    def _log(self, ckpt_dir: str, step: int, action: CheckpointerAction, state: Any) -> None:
        if "summary_writer" in self.children:
            self.summary_writer.log_checkpoint(ckpt_dir, state=state, action=action, step=step)


def _sync_processes(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
