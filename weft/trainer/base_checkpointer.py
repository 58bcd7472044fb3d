"""Interface of the checkpointers."""

from typing import Any

from weft.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from weft.hierarchy.module import Module
from weft.trainer.checkpoint_dirs import not_found, parse_step_from_dir
from weft.trainer.checkpoint_policy import CheckpointPolicy, every_n_steps_policy
from weft.typing import Nested


class BaseCheckpointer(Module):
    """Base of the checkpointers. As a context manager, it stops at the end of the block."""

    _needs_allow = ("dir",)  # a trainer sets it

    @config_class
    class Config(Module.Config):
        """Configures a BaseCheckpointer.

        Attributes:
            dir: The directory of all checkpoints of the run.
            save_policy: Decides after which steps to save.
        """

        dir: Required[str] = REQUIRED
        save_policy: InstantiableConfig[CheckpointPolicy] = config_for_function(
            every_n_steps_policy
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._save_policy: CheckpointPolicy = maybe_instantiate(cfg.save_policy)

    def __enter__(self) -> "BaseCheckpointer":
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        self.stop(has_exception=exc is not None)

    @classmethod
    def checkpoint_paths(cls, base_dir: str) -> list[str]:
        """Returns the directories of all complete checkpoints of a run, ordered by step."""
        raise NotImplementedError(cls)

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """Returns the steps of all complete checkpoints of a run, ascending."""
        return [parse_step_from_dir(path) for path in cls.checkpoint_paths(base_dir)]

    @classmethod
    def latest_checkpoint_path(cls, base_dir: str) -> str:
        """Returns the newest complete checkpoint, or raises CheckpointNotFoundError."""
        paths = cls.checkpoint_paths(base_dir)
        if not paths:
            raise not_found(base_dir)
        return paths[-1]

    @classmethod
    def latest_checkpoint_step(cls, base_dir: str) -> int:
        """Returns the step of the newest complete checkpoint, or raises CheckpointNotFoundError."""
        return parse_step_from_dir(cls.latest_checkpoint_path(base_dir))

    def save(
        self,
        *,
        step: int,
        state: Nested[Any],
        evaler_summaries: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Starts saving a state if the policy wants this step.

        Args:
            step: The step of the state.
            state: A pytree of arrays, Python values and savable objects. It may be changed or
                donated when the call returns.
            evaler_summaries: Summaries of the evalers that ran after this step, by evaler name.
            force: Whether to save regardless of the policy, unless this step is already saved.

        Returns:
            Whether a save was started.

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
            step: The step; None for the newest.
            state: The expected state: arrays or `jax.ShapeDtypeStruct`s with the target
                shardings; Python values; savable objects, which are updated in place.

        Returns:
            The step and the state; None and `state` itself if there is no checkpoint.

        Raises:
            CheckpointNotFoundError: If there is none of this step.
            DamagedCheckpointError: If it is damaged, or for the newest, if all are.
            CheckpointStructureError: If the checkpoint has another structure than `state`.
        """
        raise NotImplementedError(type(self))

    def wait_until_finished(self) -> None:
        """Waits for the save in progress; raises CheckpointSaveError if a save has failed."""
        raise NotImplementedError(type(self))

    def stop(self, *, has_exception: bool = False) -> None:
        """Waits for the save in progress and releases all resources.

        If an exception ends the run (`has_exception`), a failed save does not raise.
        """
        raise NotImplementedError(type(self))
