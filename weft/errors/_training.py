from collections.abc import Sequence as _Sequence

from weft.errors._base import WeftError


class EmptyCorpusError(WeftError, ValueError):
    """A corpus, or one of its splits, has no text."""


class CorpusReadError(WeftError, OSError):
    """A file of a corpus cannot be read, or two of them have the same name."""


class BatchShardingError(WeftError, ValueError):
    """An input batch cannot be sharded over the mesh."""


class NoMeshError(WeftError, RuntimeError, ValueError):
    """No mesh is set, and one is needed."""


class InputReadError(WeftError, RuntimeError):
    """An input source failed; the message names the file and record, or the position."""


class InputDatasetError(WeftError, ValueError):
    """A dataset has the wrong kind or size for an operation."""


class TokenizerError(WeftError, ValueError):
    """A tokenizer cannot be loaded, or lacks a required token."""


class InputDispatchError(WeftError, ValueError):
    """The sizes and indices of the processes' parts of a batch contradict each other."""


class MeshError(WeftError, ValueError):
    """The mesh does not fit the devices, or an array does not fit the mesh."""


class RunDirError(WeftError, ValueError):
    """The directory of a run cannot be written, or belongs to another run."""


class UndefinedLossException(WeftError, FloatingPointError):
    """The loss is NaN or infinite."""


class ModelOutputError(WeftError, TypeError):
    """The call of a trained model returns no loss, or a loss that is not a scalar."""


class ModelCallError(WeftError, TypeError):
    """A trained model needs more arguments than a batch."""


class BatchFieldError(WeftError, KeyError):
    """A model looks up a field that its batches do not have."""

    def __str__(self) -> str:
        return str(self.args[0])  # that of a KeyError is a repr


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


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A checkpoint could not be saved; earlier checkpoints remain.

    Attributes:
        lacks_room: whether the disk or a quota is full; a run can continue after that.
    """

    def __init__(self, message: str, *, lacks_room: bool = False):
        super().__init__(message)
        self.lacks_room = lacks_room


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A directory has no checkpoint, or none of the requested step."""


class DamagedCheckpointError(CheckpointError, RuntimeError):
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


class StateBuilderError(CheckpointError, ValueError):
    """A builder or converter of the initial state does not fit the run or its source."""


class CheckpointPolicyError(CheckpointError, ValueError):
    """A save policy needs something that the run does not have."""


class CommandLineError(WeftError, ValueError):
    """Arguments of a command name something that does not exist, or contradict each other."""


class TrainStateError(WeftError, ValueError):
    """Parameters or gradients do not fit a train state."""


class LossSpikeError(WeftError, ArithmeticError):
    """The loss spiked, and the run's policy is to stop."""


class AnomalyPolicyError(WeftError, ValueError):
    """A policy for undefined losses and spikes contradicts itself."""


class StatusPageError(WeftError, OSError):
    """The status page of a run cannot be served."""
