"""The errors of checkpoints in the formats of Flax."""

from weft.errors._training import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError


class CheckpointStepError(CheckpointError, ValueError):
    """Something is no step, or the steps of a directory are not of the type asked for."""


class MatchingCheckpointNotFoundError(CheckpointNotFoundError, ValueError):
    """There is no checkpoint of the step that was asked for."""


class AlreadyExistsError(CheckpointError, FileExistsError):
    """What stands where a checkpoint is to be written is no checkpoint, and is not replaced.

    Args:
        path: where it is.
    """

    def __init__(self, path: object):
        super().__init__(
            f"{str(path)!r} already exists and is no checkpoint, so it is not replaced; move it "
            "away, or save to another `ckpt_dir` or with another `prefix`."
        )


class InvalidCheckpointError(CheckpointError, ValueError):
    """A checkpoint to be saved is not newer than the newest.

    Args:
        path: where it was to be saved.
        step: its step.
    """

    def __init__(self, path: object, step: object):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: a checkpoint of this step or of a "
            "later one is there already. Save a later step, or give `overwrite=True`, which "
            "removes those."
        )


class MPACheckpointingRequiredError(CheckpointError, ValueError):
    """An array whose values lie on several processes was to be saved to one file.

    Args:
        path: where the checkpoint was to be saved.
        step: its step.
    """

    def __init__(self, path: object, step: object):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: one of its arrays is spread over "
            "several processes, and the checkpoint is one file, written by one of them. Save with "
            "`weft.trainer.checkpointer.Checkpointer` or with Orbax, or gather the array first "
            "(`jax.experimental.multihost_utils.process_allgather`)."
        )


class MPARestoreTargetRequiredError(CheckpointError, ValueError):
    """A checkpoint has arrays of several processes, and the target does not lay them out.

    Args:
        path: the checkpoint.
        step: its step.
        key: the path of the array in the target, if there is a target.
    """

    def __init__(self, path: object, step: object, key: object = None):
        lacking = "there is no `target`" if key is None else f"the target has none at {key!r}"
        super().__init__(
            f"the checkpoint {str(path)!r} of step {step} has arrays that were spread over several "
            f"processes; they are read into the layouts of the target's arrays, and {lacking}. "
            "Give a target with a `jax.Array`, or a `jax.ShapeDtypeStruct` with a `sharding`, "
            "for each."
        )


class MPARestoreDataCorruptedError(DamagedCheckpointError):
    """A checkpoint has arrays of several processes, and their files are missing or damaged.

    Args:
        step: the step of the checkpoint.
        path: where the files of the array are expected.
    """

    def __init__(self, step: object, path: object):
        super().__init__(
            f"the checkpoint of step {step} has an array that was spread over several processes, "
            f"and {str(path)!r} does not hold its values whole: the save was not finished, or the "
            "directory was not copied along with the checkpoint's file. Copy it again, or restore "
            "another step."
        )
