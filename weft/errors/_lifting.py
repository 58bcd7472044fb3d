from weft.errors._base import WeftError


class LiftingError(WeftError):
    """Base of the errors of state that crosses a JAX transformation."""


class ForkError(LiftingError, ValueError):
    """State that cannot be split has the role FORK."""


class AxisSizeError(LiftingError, ValueError):
    """The sizes of the mapped axes disagree, or no input determines the size."""


class RoleError(LiftingError, ValueError):
    """A group of state has a role that the transformation does not support."""


class TransformArgumentError(LiftingError, ValueError):
    """A transformation does not support an argument."""


class CallMismatchError(TransformArgumentError, TypeError):
    """The inputs or outputs of a transformed function do not match their declaration."""


class TransformOptionError(TransformArgumentError, NotImplementedError):
    """JAX no longer has that option of a transformation."""


class VariableAxisError(LiftingError, ValueError):
    """A transformation returned a variable that does not fit its collection's axis."""


class BranchStructureError(LiftingError, TypeError):
    """The branches of a cond or switch return different structures, shapes or dtypes."""


class CarryStructureError(LiftingError, TypeError):
    """A loop's body changed the structure, shape or dtype of the carry."""
