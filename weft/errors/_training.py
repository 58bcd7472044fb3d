"""Errors of inputs, training, checkpoints and processes."""

import warnings as _warnings
from collections.abc import Hashable as _Hashable
from collections.abc import Sequence as _Sequence
from os import PathLike as _PathLike

from weft.errors._base import WeftError


class RunFailedError(WeftError):
    """Base of the errors of a run that was set up correctly: its data, disk or processes failed."""

    exit_code = 1


class EmptyCorpusError(WeftError, ValueError):
    """A corpus, or one of its splits, has no text."""


class FileRefusedError(WeftError, OSError):
    """A file of a directory is neither read nor written: a link, no regular file, or too large."""


class PathNotLocalError(WeftError, ValueError):
    """A path is a URL, or begins with a `~` that nothing has replaced."""


class CorpusReadError(WeftError, OSError):
    """A file of a corpus cannot be read, or two of them have the same name."""


class BatchShardingError(WeftError, ValueError):
    """An input batch cannot be sharded over the mesh."""


class NoMeshError(WeftError, RuntimeError, ValueError):
    """No mesh is set, and one is needed."""


class InputReadError(RunFailedError, RuntimeError):
    """An input source failed; the message names the file and record, or the position."""


class InputDatasetError(WeftError, ValueError):
    """A dataset has the wrong kind or size for an operation."""


class TokenizerError(WeftError, ValueError):
    """A tokenizer cannot be loaded, or lacks a required token."""


class ChatTemplateError(WeftError, ValueError):
    """A chat template cannot write a conversation as text, or tell the assistant's part of it."""


class InputDispatchError(WeftError, ValueError):
    """The sizes and indices of the processes' parts of a batch contradict each other."""


class ModelSizeError(WeftError, ValueError):
    """A model, or the state of a run, is larger than arrays or the devices' memory can be."""


class MeshError(WeftError, ValueError):
    """The mesh does not fit the devices, or an array does not fit the mesh."""


class RunDirError(WeftError, ValueError):
    """The directory of a run cannot be written, is in use, or belongs to another run.

    Attributes:
        free_dir: a directory that can be used instead; None if there is no reason to use another.
    """

    def __init__(self, message: str, *, free_dir: str | None = None):
        super().__init__(message)
        self.free_dir = free_dir


class RunDirInUseError(RunDirError):
    """Another run is writing to the directory."""


class RunDirTakenError(RunFailedError, RuntimeError):
    """Another run has taken the directory while this one was frozen; it writes no more."""


class RunDirMovedError(RunFailedError, RuntimeError):
    """The directory was renamed or removed while a run was writing to it; it writes no more."""


class UndefinedLossException(RunFailedError, FloatingPointError):
    """The loss is NaN or infinite."""


class ModelOutputError(WeftError, TypeError):
    """The call of a trained model returns no loss, or a loss that is not a scalar."""


class ModelCallError(WeftError, TypeError):
    """A trained model needs more arguments than a batch."""


class LossError(WeftError, ValueError):
    """A loss or metric is unknown, or does not fit the outputs or the targets."""


class FitError(WeftError, ValueError):
    """The arguments of `weft.fit` contradict each other, or do not fit the data."""


class ModelLoadError(WeftError, ValueError):
    """The model of a run cannot be made from its directory, or its best step is not known."""


class BatchFieldError(WeftError, KeyError):
    """A model looks up a field that its batches do not have."""


class ScheduleError(WeftError, ValueError):
    """The steps and values of a schedule contradict each other."""


class OptimizerArgumentError(WeftError, ValueError):
    """Arguments of an optimizer contradict each other."""


class TransformationTypeError(WeftError, TypeError):
    """Something that is not an optimizer was used as one."""


class UpdateRuleError(WeftError, ValueError):
    """Update rules do not fit the parameters or the learners."""


class UntrainableParameterError(WeftError, TypeError):
    """A parameter without gradients, by its dtype, cannot be trained."""


class InplaceUpdateError(WeftError, ValueError):
    """An in-place update does not fit the parameters."""


class SummaryValueError(WeftError, ValueError):
    """A summary has a value that no writer supports."""


class MetricCalculatorError(WeftError, ValueError):
    """A metric calculator does not fit its model, its batches or the other calculators."""


class MissingExtraError(WeftError, ImportError):
    """A package of one of Weft's extras is not installed."""


class CheckpointError(WeftError):
    """Base of the errors of checkpoints."""


class CheckpointSaveError(CheckpointError, RunFailedError, RuntimeError):
    """A checkpoint could not be saved; earlier checkpoints remain.

    Attributes:
        lacks_room: whether the disk or a quota is full.
        of_file_system: whether the file system refused, as a full disk does; a run can continue
            after that.
    """

    def __init__(
        self,
        message: str,
        *,
        lacks_room: bool = False,
        of_file_system: bool = False,
    ):
        super().__init__(message)
        self.lacks_room = lacks_room
        self.of_file_system = of_file_system or lacks_room


class CheckpointReadError(CheckpointError, RunFailedError, RuntimeError):
    """The file system does not let a checkpoint be read, which may be undamaged."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A directory has no checkpoint, or none of the requested step."""


class DamagedCheckpointError(CheckpointError, RunFailedError, RuntimeError):
    """Files of a checkpoint are damaged.

    Attributes:
        damage: one line for each damaged file.
    """

    def __init__(self, message: str, *, damage: _Sequence[str] = ()):
        super().__init__(message)
        self.damage = tuple(damage)


class CheckpointStructureError(CheckpointError, ValueError):
    """A checkpoint and the state to be restored have different structures."""


class CheckpointStateError(CheckpointError, TypeError):
    """A state has a value that a checkpoint cannot hold."""


class FrozenBaseError(WeftError, ValueError):
    """The frozen base of adapters is missing, or has other weights than when they were trained."""


class StateBuilderError(CheckpointError, ValueError):
    """A builder or converter of the initial state does not fit the run or its source."""


class CheckpointPolicyError(CheckpointError, ValueError):
    """A save policy needs something that the run does not have."""


class GenerationError(WeftError, ValueError):
    """A model, a prompt or a setting does not fit the generation of text."""


class EvaluationError(WeftError, ValueError):
    """A row of data or a setting does not fit the evaluation of a language model."""


class CommandLineError(WeftError, ValueError):
    """Arguments of a command name something that does not exist, or contradict each other."""


class RecipeError(WeftError, ValueError):
    """A recipe cannot be imported, or does not make a trainer's config."""


class RewardError(WeftError, ValueError):
    """A reward function of the user failed, or returned no number."""


class TrainStateError(WeftError, ValueError):
    """Parameters or gradients do not fit a train state."""


class LossSpikeError(RunFailedError, ArithmeticError):
    """The loss spiked, and the run's policy is to stop."""


class AnomalyPolicyError(WeftError, ValueError):
    """A policy for undefined losses and spikes contradicts itself."""


class StatusPageError(WeftError, OSError):
    """The status page of a run cannot be served."""


class CheckpointStepError(CheckpointError, ValueError):
    """Something is not a step, or the steps of a directory have another type than requested."""


class MatchingCheckpointNotFoundError(CheckpointNotFoundError, ValueError):
    """A directory has no checkpoint of the requested step."""


class AlreadyExistsError(CheckpointError, FileExistsError):
    """The path of a new checkpoint is taken by something that is not a checkpoint."""

    def __init__(self, path: str | _PathLike[str]):
        super().__init__(
            f"{str(path)!r} already exists and is not a checkpoint, so it is not replaced; "
            "move it away, or save to another `ckpt_dir` or with another `prefix`."
        )


class InvalidCheckpointError(CheckpointError, ValueError):
    """A checkpoint to be saved is not newer than the newest one."""

    def __init__(self, path: str | _PathLike[str], step: int | float | str):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: a checkpoint of this or a later "
            "step already exists there. Save a later step, or pass `overwrite=True`, which "
            "removes those."
        )


class MPACheckpointingRequiredError(CheckpointError, ValueError):
    """An array that is spread over several processes cannot be saved to one file."""

    def __init__(self, path: str | _PathLike[str], step: int | float | str):
        super().__init__(
            f"step {step} cannot be saved to {str(path)!r}: one of its arrays is spread over "
            "several processes, but the checkpoint is a single file, written by one of them. "
            "Call `save_checkpoint_multiprocess` on all processes, or gather the array first "
            "(`jax.experimental.multihost_utils.process_allgather`)."
        )


class MPARestoreTargetRequiredError(CheckpointError, ValueError):
    """A checkpoint has arrays of several processes, and the target lacks layouts for them."""

    def __init__(
        self,
        path: str | _PathLike[str],
        step: int | float | str,
        key: _Hashable = None,
    ):
        lacking = "there is no `target`"
        if key is not None:
            lacking = f"the target has none at {key!r}"
        super().__init__(
            f"the checkpoint {str(path)!r} of step {step} has arrays that were spread over "
            "several processes; they are restored to the layouts of the target's arrays, and "
            f"{lacking}. Pass a target with a `jax.Array`, or a `jax.ShapeDtypeStruct` with a "
            "`sharding`, for each."
        )


class MPARestoreDataCorruptedError(DamagedCheckpointError):
    """The files of an array that was spread over several processes are missing or damaged."""

    def __init__(self, step: int | float | str, path: str | _PathLike[str]):
        super().__init__(
            f"the checkpoint of step {step} has an array that was spread over several "
            f"processes, and {str(path)!r} does not hold all of its values: the save did not "
            "finish, or the directory was not copied along with the checkpoint's file. Copy "
            "it again, or restore another step."
        )


class GradientAccumulationError(WeftError, ValueError):
    """A batch cannot be split into microbatches, or more than their loss is differentiated."""


class LossWeightWarning(WeftError, UserWarning):
    """Microbatches count equally, since the weight of the loss is not known."""


class PaddingWarning(WeftError, UserWarning):
    """Padding is known by its value alone, which is also that of the end of a text."""


_PADDING_WARNED: set[tuple[str, str]] = set()


def warn_of_padding_by_value(
    fault: str, owner: str, name: str = "live_targets"
) -> None:
    """Warns once that padding has the id of the end of a text, and nothing tells them apart.

    Args:
        fault: What is equal, such as "pad_token_id and eos_token_id are both 2".
        owner: What to add the field `name` to, such as "the batch".
    """
    if (fault, name) in _PADDING_WARNED:
        return
    _PADDING_WARNED.add((fault, name))
    _warnings.warn(
        f"{fault}, and {owner} does not have {name!r}, so ends of texts count as padding. "
        f"Add {name!r}, as Weft's own inputs do, or pad with another id.",
        PaddingWarning,
        stacklevel=3,
    )


class LossScaleError(WeftError, ValueError):
    """The settings of a loss scale contradict each other."""


class TrainDtypeError(WeftError, ValueError):
    """Compute dtypes do not fit the parameters."""


class HookError(WeftError, TypeError):
    """An object given as a hook of a run is not a `weft.trainer.Hook`."""


class EarlyStoppingError(WeftError, ValueError):
    """Early stopping monitors a value that no evaler reports."""


class LearningRateSearchError(WeftError, ValueError):
    """A learning rate search cannot run, or found no rate."""


class StepIntervalError(WeftError, ValueError):
    """An interval between steps is not 1 or more."""

    def __init__(self, name: str, interval: int):
        super().__init__(
            f"{name}={interval}; expected an interval of 1 or more steps."
        )


class ThroughputError(WeftError, ValueError):
    """A throughput measurement does not fit the run."""


class InferenceError(WeftError, ValueError):
    """A model cannot run inference on batches as configured."""


class ProfilerTraceError(WeftError, ValueError):
    """A profiler trace would be empty."""


class DecodingEvalError(WeftError, ValueError):
    """A batch has no prompts for decoding."""


class VariableStatError(WeftError, ValueError):
    """A requested statistic of parameters is unknown."""


class JobConfigError(WeftError, ValueError):
    """The config of a job cannot be started."""


class ProcessEnvironmentError(WeftError, ValueError):
    """Environment variables that identify this process are missing or contradict each other."""


class CoordinatorNotFoundError(RunFailedError, TimeoutError):
    """The coordinator, process 0, did not answer in time."""


class ProcessesNotReadyError(RunFailedError, TimeoutError):
    """Some processes of a run did not join in time; the message names them."""


class ProcessesDifferError(WeftError, ValueError):
    """Processes of one run have another config, code, data or version; the message names it."""


class ProcessLostError(RunFailedError, RuntimeError):
    """Another process of the run failed or ended, and this one cannot continue without it."""
