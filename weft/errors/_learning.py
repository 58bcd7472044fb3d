"""The errors about what goes with objects in training: optimizers, averages and metrics."""

from weft.errors._objects import ObjectError


class OptimizerCallError(ObjectError, TypeError):
    """An optimizer was made or called without something that it needs."""


class GradientStructureError(ObjectError, ValueError):
    """Gradients do not fit the parameters that an optimizer moves."""


class OptimizerStateError(ObjectError, ValueError):
    """The state of an optimizer does not fit the parameters, or what its transformation gives."""


class OptimizerWarning(ObjectError, UserWarning):
    """An optimizer has nothing to move."""


class AverageLeafError(ObjectError, TypeError):
    """Something was to be averaged that is no variable."""


class AverageStructureError(ObjectError, ValueError):
    """Values do not fit the averages that they are to go into."""


class MetricArgumentError(ObjectError, TypeError):
    """A metric was made or updated with arguments that it cannot take."""


class MetricValueError(ObjectError, ValueError):
    """Arrays that a metric was given do not fit together."""


class MetricMethodError(ObjectError, NotImplementedError):
    """A kind of metric does not say how it is made, updated, reset or computed."""
