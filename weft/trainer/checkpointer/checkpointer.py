"""Checkpointers, which save a run's state, and from it continue an interrupted run exactly.

A thread writes a checkpoint to a temporary directory, then the manifest of its files, and then
renames the directory. A restore checks the manifest first; a damaged checkpoint is reported and
skipped for the previous one. Old checkpoints are removed when a newer one is complete.
"""

import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from weft import config
from weft.distributed.preemption import (
    broadcast_from_first,
    each_of_first,
    max_over_processes,
)
from weft.errors import (
    CheckpointPolicyError,
    CheckpointReadError,
    CheckpointSaveError,
    DamagedCheckpointError,
    RunDirError,
    StepIntervalError,
)
from weft.hierarchy.module import Module, nowrap
from weft.serialization.untrusted import check_local_path
from weft.trainer.checkpointer import dirs, manifest, retries
from weft.trainer.checkpointer import index as index_lib
from weft.trainer.checkpointer import policy as policy_lib
from weft.trainer.checkpointer.host_state import (
    PythonSavable,
    read_policy_state,
    state_of_policy,
    write_policy_state,
)
from weft.trainer.checkpointer.local import LocalCheckpoints
from weft.trainer.checkpointer.storage import OrbaxStateStorage, StateStorage
from weft.trainer.checkpointer.stores import StoreCopies
from weft.trainer.summary_writer.base import with_dir
from weft.trainer.summary_writer.files import CheckpointerAction, SummaryWriter
from weft.typing import Nested

logger = logging.getLogger(__name__)


class BaseCheckpointer(Module):
    """Base of the checkpointers. As a context manager, it stops at the end of the block."""

    _needs_allow = ("dir",)  # a trainer sets it

    class Config(Module.Config):
        """Configures a BaseCheckpointer; `dir` is the directory of all checkpoints of the run."""

        dir: config.Required[str] = config.REQUIRED
        save_policy: config.InstantiableConfig[policy_lib.CheckpointPolicy] = (
            config.config_for_function(policy_lib.every_n_steps_policy)
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._save_policy: policy_lib.CheckpointPolicy = (
            config.maybe_instantiate(cfg.save_policy)
        )

    def __enter__(self) -> "BaseCheckpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop(has_exception=exc_info[1] is not None)

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        """Returns the directories of all complete checkpoints of a run, ordered by step."""
        raise NotImplementedError(cls)

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """Returns the steps of all complete checkpoints of a run, ascending."""
        return [
            dirs.parse_step_from_dir(path)
            for path in cls.checkpoint_paths(base_dir)
        ]

    @classmethod
    def latest_checkpoint_path(cls, base_dir: str) -> str:
        """Returns the newest complete checkpoint, or raises CheckpointNotFoundError."""
        paths = cls.checkpoint_paths(base_dir)
        if not paths:
            raise dirs.not_found_error(base_dir)
        return paths[-1]

    @classmethod
    def latest_checkpoint_step(cls, base_dir: str) -> int:
        """Returns the step of the newest complete checkpoint, or raises CheckpointNotFoundError."""
        return dirs.parse_step_from_dir(cls.latest_checkpoint_path(base_dir))

    def save(
        self,
        *,
        step: int,
        state: Nested[Any] | Callable[[], Nested[Any] | None],
        evaler_summaries: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Starts saving a state if the policy wants this step.

        Args:
            state: A pytree of arrays, Python values and savable objects. It may be changed or
                donated when the call returns. Or a function that returns it, called if it is due;
                None if it must not be saved after all.
            evaler_summaries: Summaries of the evalers that ran after this step, by evaler name.
            force: Whether to save regardless of the policy, unless this step is already saved.

        Returns whether a save was started.

        Raises:
            CheckpointSaveError: If this save cannot start, or an earlier one has failed since the
                last call; in the second case, this save has started nevertheless.
            CheckpointStateError: If the state holds a value that cannot be saved.
        """
        raise NotImplementedError(type(self))

    def restore(
        self, *, step: int | None = None, state: Nested[Any]
    ) -> tuple[int | None, Nested[Any]]:
        """Restores a state.

        Args:
            step: None for the newest.
            state: The expected state: arrays or `jax.ShapeDtypeStruct`s with the target
                shardings; Python values; savable objects, which are updated in place.

        Returns the step and the state; None and `state` itself if there is no checkpoint.

        Raises:
            CheckpointNotFoundError: If there is none of this step.
            CheckpointReadError: If the file system does not let it be read, which may pass.
            DamagedCheckpointError: If it is damaged, or for the newest, if all are.
            CheckpointStructureError: If the checkpoint has another structure than `state`.
        """
        raise NotImplementedError(type(self))

    def fetch_copy(self) -> int | None:
        """Fetches a checkpoint that is newer than those in `dir`, from where copies are kept.

        The first process does, at the start of a run. Returns the step; None if there is none.
        """
        return None

    def wait_until_finished(self) -> None:
        """Waits for the save in progress; raises CheckpointSaveError if a save has failed."""
        raise NotImplementedError(type(self))

    def stop(self, *, has_exception: bool = False) -> None:
        """Waits for the save in progress and releases all resources.

        If an exception ends the run (`has_exception`), a failed save does not raise.
        """
        raise NotImplementedError(type(self))


RestoreStateFilter = Callable[[Nested[Any]], Nested[Any]]
"""Function that selects the part of a state to restore."""


def drop_learner_optimizer_cfg() -> config.InstantiableConfig[
    RestoreStateFilter
]:
    """Returns the config of a filter that omits the optimizer state, to change the optimizer."""
    return config.config_for_function(drop_learner_optimizer)


def drop_learner_optimizer() -> RestoreStateFilter:
    """Returns a filter that omits the state of the learner's optimizer."""

    def without(state: Any) -> Nested[Any]:
        learner = dict(
            state["learner"] if isinstance(state, dict) else state.learner
        )
        learner.pop("optimizer", None)
        if isinstance(state, dict):
            return {**state, "learner": learner}
        return state._replace(learner=learner)

    return without


@dataclasses.dataclass(frozen=True)
class DamagedCheckpoint:
    """Checkpoint that could not be restored, with a description of the damage per file."""

    path: str
    damage: tuple[str, ...]

    def __str__(self) -> str:
        more = ["…"] if len(self.damage) > 3 else []
        return f"{self.path} ({'; '.join([*self.damage[:3], *more])})"


class Checkpointer(BaseCheckpointer):
    """Checkpointer that saves in the background and never restores a damaged checkpoint.

    >>> import tempfile
    >>> cfg = Checkpointer.default_config().set(name="checkpointer", dir=tempfile.mkdtemp())
    >>> with cfg.instantiate(parent=None) as checkpointer:
    ...     checkpointer.save(step=1, state={"w": np.arange(3.0), "epoch": 1})
    ...     checkpointer.wait_until_finished()
    ...     checkpointer.restore(state={"w": np.zeros(3), "epoch": 0})
    True
    (1, {'epoch': 1, 'w': array([0., 1., 2.])})
    """

    # One is outside of the run's directory, the other opens connections.
    _needs_allow = ("local_dir", "copy_to")

    class Config(BaseCheckpointer.Config):
        """Configures a Checkpointer."""

        keep_last_n: int = 1
        """Number of the newest checkpoints to keep."""
        keep_every_n_steps: int | None = None
        """Also keeps checkpoints at least this many steps apart."""
        keep_every_n_seconds: float | None = None
        """Also keeps checkpoints saved at least this many seconds apart."""
        keep_best: policy_lib.KeepBest.Config | None = None
        """Also keeps the best."""
        asynchronous: bool = True
        """Whether `save` returns while a thread writes. If not, `save` returns when the checkpoint
        is complete, and raises its errors."""
        gc_loop_interval_seconds: float = 0
        """The shortest time between two removals of old checkpoints. 0 removes them as soon as a
        newer one is complete."""
        storage: StateStorage.Config = OrbaxStateStorage.default_config()
        validation: index_lib.CheckpointValidationType | None = None
        """How checkpoint and state must match on restore; None for EXACT."""
        index_writer: config.ConfigOr[index_lib.IndexFileWriter] | None = None
        """Writes the index; None for `write_index_file`."""
        summary_writer: SummaryWriter.Config | None = None
        """Records each save and restore; writes to `dir` if it has none."""
        restore_state_filter: (
            config.InstantiableConfig[RestoreStateFilter] | None
        ) = None
        """Selects the part of a state to restore."""
        local_dir: str | None = None
        """Directory in the memory or on the disk of each host, such as "/dev/shm/weft", for
        checkpoints between those in `dir`, from which a run of a trainer continues if it starts
        again on the same hosts; None for none."""
        local_every_n_steps: int = 10
        """Number of steps from one local checkpoint to the next."""
        copy_to: str | None = None
        """URL in an object store, such as `s3://bucket/run`. Each complete checkpoint is copied
        there in the background, and a run without a newer one of its own continues from there.
        Needs fsspec, and its package for the store."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        check_local_path(cfg.dir, f"{self.path()}.dir")
        if cfg.keep_last_n < 1:
            raise CheckpointPolicyError(
                f"{self.path()}: keep_last_n={cfg.keep_last_n}; expected 1 or more, since a run "
                "continues from the last checkpoint."
            )
        if cfg.local_dir is not None:
            check_local_path(cfg.local_dir, f"{self.path()}.local_dir")
            self._check_apart(cfg.local_dir)
        if cfg.local_every_n_steps < 1:
            raise StepIntervalError(
                f"{self.path()}.local_every_n_steps", cfg.local_every_n_steps
            )
        self._local: LocalCheckpoints | None = None
        self._storage: StateStorage = cfg.storage.instantiate()
        writer = config.maybe_instantiate(cfg.index_writer)
        self._index_writer = writer or index_lib.write_index_file
        self._filter = config.maybe_instantiate(cfg.restore_state_filter)
        self._keep_best: policy_lib.KeepBest | None = config.maybe_instantiate(
            cfg.keep_best
        )
        if cfg.summary_writer is not None:
            self._add_child(
                "summary_writer", with_dir(cfg.summary_writer, cfg.dir)
            )
        self._copies: StoreCopies | None = None
        if cfg.copy_to is not None:
            self._copies = StoreCopies(cfg.copy_to, cfg.dir, self._kept_steps)
        self._step_in_progress: int | None = None  # that is being saved
        self._last_step: int | None = (
            None  # saved or restored, so it need not be saved again
        )
        self._last_removal = -math.inf
        self._damaged: dict[int, DamagedCheckpoint] = {}

    def _check_apart(self, local_dir: str) -> None:
        """Raises a RunDirError if local checkpoints would be among the durable ones."""
        durable_path = os.path.realpath(self.config.dir)
        local_path = os.path.realpath(local_dir)
        if os.path.commonpath([durable_path, local_path]) == durable_path:
            raise RunDirError(
                f"{self.path()}.local_dir={local_dir!r} is in {self.config.dir!r}, which has the "
                "durable checkpoints. Name a directory in the memory or on the disk of each host, "
                "such as /dev/shm/weft."
            )

    def ckpt_dir(self, step: int) -> str:
        """Returns the directory of a step's checkpoint."""
        return dirs.build_step_dir(self.config.dir, step=step)

    @property
    def damaged_checkpoints(self) -> tuple[DamagedCheckpoint, ...]:
        """The damaged checkpoints that `restore` found."""
        return tuple(self._damaged.values())

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        return [
            path
            for path in dirs.step_dirs(base_dir).values()
            if manifest.has_manifest(path)
        ]

    @classmethod
    def cleanup_checkpoint(cls, ckpt_dir: str, *, sync: bool = True) -> None:
        """Removes a checkpoint; with `sync`, all processes call this and wait for the removal."""
        if jax.process_index() == 0 and os.path.lexists(ckpt_dir):
            dirs.remove_dir(ckpt_dir)
        if sync and jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"removed {ckpt_dir}")

    # Saving.

    @nowrap
    def save(
        self,
        *,
        step: int,
        state: Nested[Any] | Callable[[], Nested[Any] | None],
        evaler_summaries: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        evaler_summaries = evaler_summaries or {}
        # The policy sees all steps, also if a save is forced.
        is_due = self._save_policy(step=step, evaler_summaries=evaler_summaries)
        if step in (self._step_in_progress, self._last_step):
            if force:
                self._start_copies()  # its copy may have failed
            return False
        if not (is_due or force):
            if self._local is not None:
                self._save_locally(self._local, step, state)
            return False
        if callable(state):
            state = state()
            if state is None:
                return False
        if self._keep_best is not None:
            metric = self._keep_best.config.metric
            policy_lib.metric_value(
                metric, step, evaler_summaries, user=f"{self.path()}.keep_best"
            )
        metrics = policy_lib.scalars_of(step, evaler_summaries)
        facts = {"step": step, "saved_at": time.time(), "metrics": metrics}
        failure = self._finish_save()
        self._begin_save(step, state, facts)
        if not self.config.asynchronous:
            failure = self._finish_save() or failure
        if failure is not None:
            raise failure
        return True

    @nowrap
    def use_local(self, run: int) -> None:
        """Uses local checkpoints from now on, if there is a `local_dir`, until `stop`.

        Args:
            run: number of the run that has `dir`, which no other run has had; in process 0.
        """
        local_dir = self.config.local_dir
        if local_dir is not None:
            self._local = LocalCheckpoints(
                local_dir, durable_dir=self.config.dir, run=run
            )

    def _save_locally(
        self,
        local: LocalCheckpoints,
        step: int,
        state: Nested[Any] | Callable[[], Nested[Any] | None],
    ) -> None:
        """Saves a local checkpoint after a step without a durable one, if it is due."""
        if step % self.config.local_every_n_steps:
            return
        if callable(state):
            state = state()
        if state is not None:
            local.save(step=step, state=state, save_policy=self._save_policy)

    def _begin_save(
        self, step: int, state: Nested[Any], facts: dict[str, Any]
    ) -> None:
        final_dir = self.ckpt_dir(step)
        dirs.check_name(self.config.dir)
        ckpt_dir = dirs.temporary_dir(final_dir)
        self._create_dir(final_dir, step)
        policy_state = state_of_policy(self._save_policy)

        def publish(*, ckpt_dir: str, index: index_lib.Index) -> None:
            if jax.process_index() != 0:
                return

            def complete() -> None:
                self._index_writer(ckpt_dir=ckpt_dir, index=index)
                write_policy_state(ckpt_dir, policy_state)
                manifest.write_manifest(ckpt_dir, facts=facts)

            retries.retried(complete)
            dirs.commit_dir(final_dir)
            self._damaged.pop(step, None)
            self._log(final_dir, step, CheckpointerAction.SAVE, state=None)
            try:
                self._remove_old(step)
            except (CheckpointReadError, OSError) as error:
                logger.warning("Old checkpoints cannot be removed: %s", error)
            self._start_copies()

        try:
            self._storage.save_to_dir(
                step=step,
                state=state,
                ckpt_dir=ckpt_dir,
                on_commit_callback=publish,
            )
        except BaseException:
            shutil.rmtree(ckpt_dir, ignore_errors=True)
            raise
        self._step_in_progress = step

    def _create_dir(self, final_dir: str, step: int) -> None:
        failure: Exception | None = None
        if jax.process_index() == 0:
            try:
                dirs.make_temporary_dir(final_dir)
            except OSError as error:
                failure = error
        if broadcast_from_first(failure is not None):
            if failure is None:
                temporary_dir = dirs.temporary_dir(final_dir)
                failure = OSError(
                    errno.EIO, f"process 0 could not make {temporary_dir}"
                )
            raise self._save_error(step, failure) from failure

    def _finish_save(
        self, *, alone: bool = False
    ) -> CheckpointSaveError | None:
        """Waits for the save in progress; returns its failure, in all processes unless `alone`."""
        step = self._step_in_progress
        self._step_in_progress = None
        if step is None:
            return None
        failure = None
        try:
            self._storage.wait_until_finished()
        except Exception as error:
            failure = self._save_error(step, error)
            failure.__cause__ = error
        if not alone:
            # All processes go on, or none: they agree on the worst failure.
            worst = max_over_processes(_severity(failure))
            if worst != _NO_FAILURE and failure is None:
                error = OSError(
                    "another process could not write its part; see its error"
                )
                failure = self._save_error(step, error)
            if failure is not None:
                failure.lacks_room = worst == _LACKS_ROOM
                failure.of_file_system = worst in (_LACKS_ROOM, _OF_FILE_SYSTEM)
        if failure is None:
            self._last_step = step
        return failure

    def _save_error(
        self, step: int, error: BaseException
    ) -> CheckpointSaveError:
        complete_steps = "unknown"
        with contextlib.suppress(CheckpointReadError):
            complete_steps = (
                ", ".join(map(str, self.checkpoint_steps(self.config.dir)))
                or "none"
            )
        lacks_room = dirs.is_disk_full(error)
        if lacks_room:
            cause = "the disk, or a quota of it, is full"
            process = re.search(r"process \d+ of \d+: ", str(error))
            if process is not None:
                cause = process[0] + cause
            advice = "Free disk space"
        else:
            # Array storage adds a description of its own settings.
            text = str(error).partition(" [tensorstore_spec=")[0].rstrip(".")
            cause = f"{type(error).__name__}: {text}"
            advice = retries.advice(error)
        message = (
            f"the checkpoint of step {step} could not be saved in {self.config.dir!r}: {cause}. "
            f"Complete checkpoints: {complete_steps}."
        )
        if advice:
            message += f" {advice}."
        return CheckpointSaveError(
            message,
            lacks_room=lacks_room,
            of_file_system=retries.is_of_file_system(error),
        )

    def _remove_old(self, step: int) -> None:
        """Removes the checkpoints that no rule keeps, after the save of a step."""
        cfg = self.config
        time_of_removal = time.monotonic()
        if time_of_removal - self._last_removal < cfg.gc_loop_interval_seconds:
            return
        self._last_removal = time_of_removal
        paths: dict[int, str] = {}
        facts: dict[int, dict[str, Any]] = {}  # of undamaged checkpoints
        for saved_step, path in dirs.step_dirs(cfg.dir).items():
            if saved_step > step:
                break  # from another course of the run; it must not cause removals
            paths[saved_step] = path
            if saved_step in self._damaged:
                continue
            content = manifest.read_manifest(path, step=saved_step)
            facts[saved_step] = {}
            if isinstance(content, manifest.Manifest):
                facts[saved_step] = content.facts
        old_steps = paths.keys() - self._kept_steps(facts)
        if self._copies is not None:
            # It is removed after a later save.
            old_steps.discard(self._copies.step_in_progress)
        for old_step in old_steps:
            try:
                self.cleanup_checkpoint(paths[old_step], sync=False)
            except OSError as error:
                logger.warning(
                    "The old checkpoint %s cannot be removed: %s",
                    paths[old_step],
                    error,
                )

    def _kept_steps(self, facts: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Returns the steps that a rule keeps, given the facts of manifests by ascending step."""
        cfg = self.config
        return policy_lib.kept_steps(
            facts,
            last_n=cfg.keep_last_n,
            every_n_steps=cfg.keep_every_n_steps,
            every_n_seconds=cfg.keep_every_n_seconds,
            best=self._keep_best,
        )

    def _start_copies(self) -> None:
        if self._copies is not None and jax.process_index() == 0:
            self._copies.start()

    def wait_until_finished(self) -> None:
        failure = self._finish_save()
        if failure is not None:
            raise failure

    def stop(self, *, has_exception: bool = False) -> None:
        failure = self._finish_save(alone=has_exception)
        self._storage.stop()
        if self._local is not None:
            self._local.stop()
            # The run has saved its last step.
            if failure is None and not has_exception:
                self._local.remove()
            self._local = None
        if self._copies is not None:
            self._copies.stop()
        if "summary_writer" in self.children:
            self.summary_writer.close()
        if failure is not None and has_exception:
            logger.error("%s", failure)
        elif failure is not None:
            raise failure

    # Restoring.

    def fetch_copy(self) -> int | None:
        if self._copies is None or jax.process_index() != 0:
            return None
        return self._copies.fetch_newer()

    def restore(
        self, *, step: int | None = None, state: Nested[Any]
    ) -> tuple[int | None, Nested[Any]]:
        self.wait_until_finished()
        given_state = state
        validation = (
            self.config.validation or index_lib.CheckpointValidationType.EXACT
        )
        if self._filter is not None:
            state = self._filter(state)
            validation = validation.allowing_more
        if self._local is not None and step is None:
            local = self._local.restore(state, validation=validation)
            if local is not None:
                self._set_policy_state(local.policy_state)
                self._log(
                    local.ckpt_dir,
                    local.step,
                    CheckpointerAction.RESTORE,
                    local.state,
                )
                return local.step, local.state
        restored_step, restored = self._restore_durable(step, state, validation)
        if self._local is not None:
            self._local.forget()
        if restored_step is None:
            return None, given_state
        return restored_step, restored

    def _restore_durable(
        self,
        step: int | None,
        state: Nested[Any],
        validation: index_lib.CheckpointValidationType,
    ) -> tuple[int | None, Nested[Any]]:
        """Returns the step and state of a durable checkpoint, None for both if there is none."""
        damaged: list[DamagedCheckpoint] = []
        for candidate in self._candidate_steps(step):
            try:
                restored = self._restore_step(candidate, state, validation)
            except DamagedCheckpointError as error:
                checkpoint = DamagedCheckpoint(
                    self.ckpt_dir(candidate), error.damage
                )
                damaged.append(checkpoint)
                self._damaged[candidate] = checkpoint
                if step is None:
                    logger.warning(
                        "The checkpoint %s is damaged. Restoring the previous one instead.",
                        checkpoint,
                    )
            else:
                return candidate, restored
        if not damaged:
            return None, None
        raise self._all_damaged_error(step, damaged)

    def _candidate_steps(self, requested_step: int | None) -> Iterator[int]:
        """Yields the requested step, or all from the newest on, as process 0 sees them."""
        steps: list[int] = []
        if jax.process_index() == 0:
            steps = list(reversed(dirs.step_dirs(self.config.dir)))
        if requested_step is not None:
            if not broadcast_from_first(requested_step in steps):
                raise dirs.not_found_error(self.config.dir, requested_step)
            yield requested_step
            return
        yield from each_of_first(steps)

    def _restore_step(
        self,
        step: int,
        state: Nested[Any],
        validation: index_lib.CheckpointValidationType,
    ) -> Nested[Any]:
        ckpt_dir = self.ckpt_dir(step)
        damage = manifest.find_damage(
            ckpt_dir, step=step, except_below=self._storage.checks_below
        )
        if max_over_processes(bool(damage)):
            damage = damage or [
                "another process found damage; its error names the file"
            ]
            raise DamagedCheckpointError(
                f"the checkpoint {ckpt_dir} is damaged", damage=damage
            )
        policy_state = None
        if isinstance(self._save_policy, PythonSavable):
            policy_state = read_policy_state(ckpt_dir)
        restored = self._storage.restore_from_dir(
            step, state, ckpt_dir=ckpt_dir, validation=validation
        )
        self._set_policy_state(policy_state)
        self._last_step = step
        self._log(ckpt_dir, step, CheckpointerAction.RESTORE, restored)
        return restored

    def _set_policy_state(self, state: dict[str, Any] | None) -> None:
        policy = self._save_policy
        if state is None or not isinstance(policy, PythonSavable):
            return
        try:
            policy.set_state(state)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # A run may continue with another policy.
            logger.warning(
                "%s.save_policy starts fresh: the checkpoint has the state of another policy (%s).",
                self.path(),
                error,
            )

    def _all_damaged_error(
        self, requested_step: int | None, damaged: list[DamagedCheckpoint]
    ) -> DamagedCheckpointError:
        if requested_step is None:
            message = (
                f"every checkpoint in {self.config.dir!r} is damaged: "
                f"{'; '.join(map(str, damaged))}. Restore one from a copy, or move the "
                "directory away to start over."
            )
        else:
            other_steps = list(self.checkpoint_steps(self.config.dir))
            if requested_step in other_steps:
                other_steps.remove(requested_step)
            message = (
                f"the checkpoint {damaged[0]} is damaged. Restore another step: "
                f"{', '.join(map(str, other_steps)) or 'there is none'}."
            )
        damage: list[str] = []
        for checkpoint in damaged:
            damage += checkpoint.damage
        return DamagedCheckpointError(message, damage=damage)

    def _log(
        self,
        ckpt_dir: str,
        step: int,
        action: CheckpointerAction,
        state: Nested[Any] | None,
    ) -> None:
        if "summary_writer" in self.children:
            self.summary_writer.log_checkpoint(
                ckpt_dir, state=state, action=action, step=step
            )


_NO_FAILURE, _LACKS_ROOM, _OF_FILE_SYSTEM, _OTHER_FAILURE = range(4)


def _severity(failure: CheckpointSaveError | None) -> int:
    """Returns a number by which processes agree on the worst failure of theirs."""
    if failure is None:
        return _NO_FAILURE
    if failure.lacks_room:
        return _LACKS_ROOM
    if failure.of_file_system:
        return _OF_FILE_SYSTEM
    return _OTHER_FAILURE
