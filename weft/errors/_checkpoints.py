from weft.errors._training import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError


class CheckpointStepError(CheckpointError, ValueError):
    """Something is not a step, or the steps of a directory have another type than requested."""


class MatchingCheckpointNotFoundError(CheckpointNotFoundError, ValueError):
    """A directory has no checkpoint of the requested step."""


class AlreadyExistsError(CheckpointError, FileExistsError):
    """The path of a new checkpoint is taken by something that is not a checkpoint."""

    def __init__(self, path: object):
        super().__init__(
            f"{str(path)!r} already exists and is not a checkpoint, so it is not replaced; "
            "move it away, or save to another `ckpt_dir` or with another `prefix`."
        )


class InvalidCheckpointError(CheckpointError, ValueError):
    """A checkpoint to be saved is not newer than the newest one."""

    def __init__(self, path: object, step: object):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: a checkpoint of this or a later "
            "step already exists there. Save a later step, or pass `overwrite=True`, which "
            "removes those."
        )


class MPACheckpointingRequiredError(CheckpointError, ValueError):
    """An array that is spread over several processes cannot be saved to one file."""

    def __init__(self, path: object, step: object):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: one of its arrays is spread over "
            "several processes, but the checkpoint is a single file, written by one of them. "
            "Save with `weft.trainer.checkpointer.Checkpointer` or with Orbax, or gather the "
            "array first (`jax.experimental.multihost_utils.process_allgather`)."
        )


class MPARestoreTargetRequiredError(CheckpointError, ValueError):
    """A checkpoint has arrays of several processes, and the target lacks layouts for them."""

    def __init__(self, path: object, step: object, key: object = None):
        lacking = "there is no `target`" if key is None else f"the target has none at {key!r}"
        super().__init__(
            f"the checkpoint {str(path)!r} of step {step} has arrays that were spread over "
            "several processes; they are restored to the layouts of the target's arrays, and "
            f"{lacking}. Pass a target with a `jax.Array`, or a `jax.ShapeDtypeStruct` with a "
            "`sharding`, for each."
        )


class MPARestoreDataCorruptedError(DamagedCheckpointError):
    """The files of an array that was spread over several processes are missing or damaged."""

    def __init__(self, step: object, path: object):
        super().__init__(
            f"the checkpoint of step {step} has an array that was spread over several "
            f"processes, and {str(path)!r} does not hold all of its values: the save did not "
            "finish, or the directory was not copied along with the checkpoint's file. Copy "
            "it again, or restore another step."
        )
