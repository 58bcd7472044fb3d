from weft.errors._base import WeftError


class WeightsError(WeftError):
    """Base of the errors of weights in files."""


class WeightsReadError(WeightsError, OSError):
    """A file of weights does not exist, or is damaged."""


class WeightsMismatchError(WeightsError, ValueError):
    """The tensors of a file differ from the expected ones in name, shape or dtype."""


class WeightsWriteError(WeightsError, ValueError):
    """A value cannot be written as a file of weights."""


class HuggingFaceConfigError(WeightsError, ValueError):
    """A Hugging Face model has no counterpart in Weft, or the reverse."""
