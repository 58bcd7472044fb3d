from weft.errors._base import WeftError


class GradientAccumulationError(WeftError, ValueError):
    """A batch cannot be split into microbatches, or more than their loss is differentiated."""


class LossScaleError(WeftError, ValueError):
    """The settings of a loss scale contradict each other."""


class TrainDtypeError(WeftError, ValueError):
    """Compute dtypes do not fit the parameters."""


class EarlyStoppingError(WeftError, ValueError):
    """Early stopping monitors a value that no evaler reports."""


class LearningRateSearchError(WeftError, ValueError):
    """A learning rate search cannot run, or found no rate."""


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
