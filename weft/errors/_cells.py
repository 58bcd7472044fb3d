from weft.errors._base import WeftError


class CellDefinitionError(WeftError, NotImplementedError):
    """A recurrent cell does not define a required method."""
