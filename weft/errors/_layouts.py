"""The errors about axis metadata and layouts."""

from weft.errors._base import WeftError


class AxisMetadataError(WeftError, ValueError):
    """The metadata of a variable does not fit the axes of its value.

    Attributes:
        path: whose metadata it is, as far as that is known; whoever knows more prepends it.
    """

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = self.args[0]
        return f"the axis metadata of {self.path!r}: {message}" if self.path else message


class PartitionNameError(AxisMetadataError):
    """An axis that is to be removed has another name than the one it is to be removed under."""


class PartitioningUnspecifiedError(PartitionNameError):
    """An axis that has a name is to be removed, and no name was given."""


class LogicalAxisError(WeftError, ValueError):
    """Rules for logical axes, or the names that they are for, are not in form or do not agree."""


class TopologyError(WeftError, ValueError):
    """There is no such topology, it cannot be compiled for, or its devices do not fit a shape."""


class ShardingWarning(WeftError, UserWarning):
    """A layout over the mesh was asked for and cannot be kept."""
