"""What all checkpointers share: their interface."""

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
        """The directories of all complete checkpoints, in the order of their steps.

        Args:
            base_dir: The directory of all checkpoints of a run.
        """
        raise NotImplementedError(cls)

    @classmethod
    def checkpoint_steps(cls, base_dir: str) -> list[int]:
        """The steps of all complete checkpoints, ascending.

        Args:
            base_dir: The directory of all checkpoints of a run.
        """
        return [parse_step_from_dir(path) for path in cls.checkpoint_paths(base_dir)]

    @classmethod
    def latest_checkpoint_path(cls, base_dir: str) -> str:
        """The directory of the newest complete checkpoint.

        Args:
            base_dir: The directory of all checkpoints of a run.

        Raises:
            CheckpointNotFoundError: If there is none.
        """
        paths = cls.checkpoint_paths(base_dir)
        if not paths:
            raise not_found(base_dir)
        return paths[-1]

    @classmethod
    def latest_checkpoint_step(cls, base_dir: str) -> int:
        """The step of the newest complete checkpoint.

        Args:
            base_dir: The directory of all checkpoints of a run.

        Raises:
            CheckpointNotFoundError: If there is none.
        """
        return parse_step_from_dir(cls.latest_checkpoint_path(base_dir))

    def save(
        self,
        *,
        step: int,
        state: Nested[Any],
        evaler_summaries: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Begins to save a state, if the policy says so.

        Args:
            step: The step that the state is from.
            state: A pytree of arrays, Python values and savable objects. It may be changed or
                donated when the call returns.
            evaler_summaries: What each evaler that ran after this step reported, by its name.
            force: Whether to save whatever the policy says, unless this step is saved already.

        Returns:
            Whether it is being saved.

        Raises:
            CheckpointSaveError: If this save cannot begin, or an earlier one has failed since the
                last call; in the second case, this one has begun all the same.
            CheckpointStateError: If the state holds something that a checkpoint cannot.
        """
        raise NotImplementedError(type(self))

    def restore(
        self, *, step: int | None = None, state: Nested[Any]
    ) -> tuple[int | None, Nested[Any]]:
        """Restores a state.

        Args:
            step: The step; None for the newest.
            state: What the state is to look like: arrays, or `jax.ShapeDtypeStruct`s with the
                shardings that the arrays are to get; Python values; savable objects, which go on
                from the saved state in place.

        Returns:
            The step and the state; None and `state` itself if there is no checkpoint.

        Raises:
            CheckpointNotFoundError: If there is none of this step.
            DamagedCheckpointError: If it is damaged, or for the newest, if all are.
            CheckpointStructureError: If the checkpoint has another structure than `state`.
        """
        raise NotImplementedError(type(self))

    def wait_until_finished(self) -> None:
        """Waits for the save that is under way.

        Raises:
            CheckpointSaveError: If it, or an earlier one since the last call, has failed.
        """
        raise NotImplementedError(type(self))

    def stop(self, *, has_exception: bool = False) -> None:
        """Waits for the save that is under way, and gives back what is held.

        Args:
            has_exception: Whether the run ends by an exception, which a failed save is not to hide.
        """
        raise NotImplementedError(type(self))
