"""The errors of what a run may do beside plain steps: microbatches, loss scales, stopping early."""

from weft.errors._base import WeftError


class GradientAccumulationError(WeftError, ValueError):
    """A batch cannot be cut into microbatches, or more than their loss was differentiated."""


class LossScaleError(WeftError, ValueError):
    """The numbers by which the scale of a loss changes do not go together."""


class TrainDtypeError(WeftError, ValueError):
    """The dtypes in which parameters are to be computed with do not fit the parameters."""


class EarlyStoppingError(WeftError, ValueError):
    """What is to stop a run early looks at something that no evaler reports."""


class LearningRateSearchError(WeftError, ValueError):
    """A search for a learning rate cannot be made, or has found none."""


class ThroughputError(WeftError, ValueError):
    """What is to be measured of the speed of a run does not fit the run."""


class InferenceError(WeftError, ValueError):
    """A model cannot be run on batches as it was asked for."""


class ProfilerTraceError(WeftError, ValueError):
    """A profiler trace was asked for that would hold nothing."""


class DecodingEvalError(WeftError, ValueError):
    """A batch has no prompts for a model to go on from."""


class VariableStatError(WeftError, ValueError):
    """A statistic of parameters was asked for that is not known."""
