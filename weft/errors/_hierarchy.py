from weft.errors._base import WeftError
from weft.errors._configs import ConfigError


class ChildNameConflictError(WeftError, ValueError):
    """A module already has a child, attribute or shared module of that name."""


class ModuleNameError(WeftError, ValueError):
    """The name of a module or context cannot be part of a path."""


class ContextTransformError(WeftError, RuntimeError):
    """An output was added, or a key drawn, inside a JAX transformation that does not return it."""


class LoopOutputError(WeftError, ValueError):
    """A module adds an output in a loop that does not stack outputs over its iterations."""


class OutputConflictError(WeftError, ValueError):
    """A summary, state update, module output or child context was added twice under one name."""


class InvalidDescendantError(WeftError, ValueError):
    """A module was reached from a context that is neither above it nor shares it."""


class NoContextError(WeftError, RuntimeError):
    """Something that exists only during an invocation was used outside of one."""


class ContextStackError(WeftError, ValueError):
    """The thread's stack of contexts is in an invalid state for the operation."""


class MissingStateError(WeftError, KeyError):
    """A module's state has no entry of that name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class MissingPrngKeyError(WeftError, ValueError):
    """A random operation ran in an invocation without a PRNG key."""


class ChildConfigError(WeftError, TypeError):
    """A child was not given as the config of a module."""


class LayerConfigError(ConfigError, ValueError):
    """Fields of a layer's config are valid individually, but not together."""


class ParameterSpecError(WeftError, ValueError):
    """A parameter's spec, partitioning and value contradict each other."""


class ParameterInitError(WeftError, ValueError):
    """No initializer fits a parameter, or its initializer cannot draw it."""


class MetricsError(WeftError, ValueError):
    """A model's losses and metrics do not fit together, or have nothing to measure."""
