from weft.errors._base import WeftError


class AxisMetadataError(WeftError, ValueError):
    """The metadata of a variable does not fit the axes of its value.

    Attributes:
        path: path of the variable, as far as it is known; callers prepend to it.
    """

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = self.args[0]
        return f"the axis metadata of {self.path!r}: {message}" if self.path else message


class PartitionNameError(AxisMetadataError):
    """An axis to be removed has another name than the given one."""


class PartitioningUnspecifiedError(PartitionNameError):
    """An axis to be removed has a name, and no name was given."""


class LogicalAxisError(WeftError, ValueError):
    """Rules for logical axes, or axis names, are malformed or contradict each other."""


class TopologyError(WeftError, ValueError):
    """A topology does not exist, has no compiler here, or its devices do not fit a shape."""


class ShardingWarning(WeftError, UserWarning):
    """A requested layout over the mesh cannot be kept."""
