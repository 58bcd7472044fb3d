from weft.errors._objects import ObjectError


class OptimizerCallError(ObjectError, TypeError):
    """An optimizer was created or called without a required argument."""


class GradientStructureError(ObjectError, ValueError):
    """Gradients do not match the parameters of an optimizer."""


class OptimizerStateError(ObjectError, ValueError):
    """Optimizer state does not match the parameters, or its transformation's state."""


class OptimizerWarning(ObjectError, UserWarning):
    """An optimizer has no parameters to update."""


class AverageLeafError(ObjectError, TypeError):
    """Something that is not a variable cannot be averaged."""


class AverageStructureError(ObjectError, ValueError):
    """Values do not match the structure of their averages."""


class MetricArgumentError(ObjectError, TypeError):
    """A metric was created or updated with invalid arguments."""


class MetricValueError(ObjectError, ValueError):
    """The arrays given to a metric do not fit together."""


class MetricMethodError(ObjectError, NotImplementedError):
    """A metric class does not define how it is created, updated, reset or computed."""
