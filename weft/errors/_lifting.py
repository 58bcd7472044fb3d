"""The errors of lifted transformations."""

from weft.errors._base import WeftError


class LiftingError(WeftError):
    """Base of the errors about state that crosses a JAX transformation."""


class ForkError(LiftingError, ValueError):
    """State that cannot be split was given the role FORK."""


class AxisSizeError(LiftingError, ValueError):
    """The sizes of the mapped axes disagree, or none tells the size."""


class RoleError(LiftingError, ValueError):
    """A group of state was given a role that the transformation does not have."""


class TransformArgumentError(LiftingError, ValueError):
    """A transformation was given an argument that it cannot honour."""


class CallMismatchError(TransformArgumentError, TypeError):
    """What a transformed function is given or returns does not fit what was said of it."""


class TransformOptionError(TransformArgumentError, NotImplementedError):
    """An option of a transformation that JAX has no longer."""


class VariableAxisError(LiftingError, ValueError):
    """A variable came out of a transformation in another way than its collection's axis says."""


class BranchStructureError(LiftingError, TypeError):
    """The branches of a cond or switch return different structures, shapes or dtypes."""


class CarryStructureError(LiftingError, TypeError):
    """A loop's carry changed its structure, shape or dtype in the body."""
