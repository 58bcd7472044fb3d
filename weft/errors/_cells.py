"""The errors about recurrent cells of NNX."""

from weft.errors._base import WeftError


class CellDefinitionError(WeftError, NotImplementedError):
    """A recurrent cell does not define a method that it needs."""
