"""The errors of input pipelines, the trainer and the command line."""

from collections.abc import Sequence as _Sequence

from weft.errors._base import WeftError


class EmptyCorpusError(WeftError, ValueError):
    """A corpus, or one of its parts, has no text."""


class CorpusReadError(WeftError, OSError):
    """A file of a corpus cannot be read, or two of them share a name."""


class BatchShardingError(WeftError, ValueError):
    """An input batch cannot be laid over the mesh."""


class NoMeshError(WeftError, RuntimeError, ValueError):
    """A mesh is needed and none is set."""


class InputReadError(WeftError, RuntimeError):
    """A source of input failed; the message names the file and record, or the place."""


class InputDatasetError(WeftError, ValueError):
    """A dataset is of the wrong kind or size for what it is asked to do."""


class TokenizerError(WeftError, ValueError):
    """A tokenizer cannot be loaded, or lacks a token that it should have."""


class InputDispatchError(WeftError, ValueError):
    """The sizes and indices by which processes share a batch do not fit together."""


class MeshError(WeftError, ValueError):
    """The mesh does not fit the devices, or an array does not fit the mesh."""


class RunDirError(WeftError, ValueError):
    """The directory of a run cannot be written, or belongs to another run."""


class UndefinedLossException(WeftError, FloatingPointError):
    """The loss is NaN or infinite."""


class ModelOutputError(WeftError, TypeError):
    """The call of a model that is trained returns no loss, or one that is no scalar."""


class ModelCallError(WeftError, TypeError):
    """A model that is trained is to be called with more than a batch."""


class BatchFieldError(WeftError, KeyError):
    """A model looks up a field that its batches do not have."""

    def __str__(self) -> str:
        return str(self.args[0])  # that of a KeyError is a repr


class ScheduleError(WeftError, ValueError):
    """The steps and values of a schedule do not fit together."""


class OptimizerArgumentError(WeftError, ValueError):
    """An optimizer was given arguments that do not go together."""


class TransformationTypeError(WeftError, TypeError):
    """Something was to be used as an optimizer that is none."""


class UpdateRuleError(WeftError, ValueError):
    """The rules that say how parameters are updated do not fit the parameters or the learners."""


class UntrainableParameterError(WeftError, TypeError):
    """A parameter of a dtype without gradients was to be trained."""


class InplaceUpdateError(WeftError, ValueError):
    """An in-place update does not fit the parameters."""


class SummaryValueError(WeftError, ValueError):
    """A summary holds a value that no writer can show."""


class MetricCalculatorError(WeftError, ValueError):
    """A metric calculator does not fit its model, its batches or the calculators beside it."""


class MissingExtraError(WeftError, ImportError):
    """A package is needed that one of Weft's extras installs."""


class CheckpointError(WeftError):
    """Base of the errors about checkpoints."""


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A checkpoint could not be saved; those before it stand.

    Args:
        message: the whole text.
        lacks_room: whether a disk or a quota is full, which a run can outlive.
    """

    def __init__(self, message: str, *, lacks_room: bool = False):
        super().__init__(message)
        self.lacks_room = lacks_room


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint in a directory, or none of the step that was asked for."""


class DamagedCheckpointError(CheckpointError, RuntimeError):
    """The files of a checkpoint are not as they were written.

    Args:
        message: the whole text.
        damage: a line for each file that is not.
    """

    def __init__(self, message: str, *, damage: _Sequence[str] = ()):
        super().__init__(message)
        self.damage = tuple(damage)


class CheckpointStructureError(CheckpointError, ValueError):
    """A checkpoint and the state that it is to be restored to have different structures."""


class CheckpointStateError(CheckpointError, TypeError):
    """A state holds something that a checkpoint cannot."""


class StateBuilderError(CheckpointError, ValueError):
    """A builder or converter of the initial state does not fit the run, or what it reads."""


class CheckpointPolicyError(CheckpointError, ValueError):
    """A save policy asks for something that the run does not have."""


class CommandLineError(WeftError, ValueError):
    """The arguments of a command name something that is not there, or do not go together."""


class TrainStateError(WeftError, ValueError):
    """Parameters, or their gradients, are not as a train state needs them."""


class LossSpikeError(WeftError, ArithmeticError):
    """The loss rose far above what it was, and the policy of the run is to stop then."""


class AnomalyPolicyError(WeftError, ValueError):
    """A policy for undefined losses and spikes asks for what does not go together."""


class StatusPageError(WeftError, OSError):
    """The page with the status of a run cannot be served."""
