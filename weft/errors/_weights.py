"""The errors about weights in the formats of others."""

from weft.errors._base import WeftError


class WeightsError(WeftError):
    """Base of the errors about weights in files."""


class WeightsReadError(WeightsError, OSError):
    """A file of weights is not there, or is not as it was written."""


class WeightsMismatchError(WeightsError, ValueError):
    """The tensors of a file are not those that are wanted: names, shapes or dtypes differ."""


class WeightsWriteError(WeightsError, ValueError):
    """Something cannot be written as a file of weights."""


class HuggingFaceConfigError(WeightsError, ValueError):
    """A Hugging Face model has no counterpart, or a model has none in Hugging Face's format."""
