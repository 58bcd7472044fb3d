from weft.errors._base import WeftError


class ArgumentShapeError(WeftError, ValueError):
    """An array has a shape that does not fit the function's other arguments."""


class ArgumentValueError(WeftError, ValueError):
    """An argument has a value that the function does not accept."""


class UnknownActivationError(ArgumentValueError):
    """No activation function has that name."""
