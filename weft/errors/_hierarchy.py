"""The errors of the module hierarchy."""

from weft.errors._base import WeftError
from weft.errors._configs import ConfigError


class ChildNameConflictError(WeftError, ValueError):
    """A module already has a child, attribute or shared module of that name."""


class ModuleNameError(WeftError, ValueError):
    """A name of a module or a context that cannot be part of a path."""


class ContextTransformError(WeftError, RuntimeError):
    """An output was added, or a key drawn, inside of a JAX transformation that hands none on."""


class LoopOutputError(WeftError, ValueError):
    """A module adds an output in a loop that has no place for one of each iteration."""


class OutputConflictError(WeftError, ValueError):
    """A summary, state update, module output or child context was added twice under one name."""


class InvalidDescendantError(WeftError, ValueError):
    """A module was reached from a context that is neither above it nor shares it."""


class NoContextError(WeftError, RuntimeError):
    """Something that belongs to an invocation was asked for outside of one."""


class ContextStackError(WeftError, ValueError):
    """The thread's stack of contexts is not as an operation on it needs it."""


class MissingStateError(WeftError, KeyError):
    """A module's state holds no entry of that name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class MissingPrngKeyError(WeftError, ValueError):
    """Randomness was asked for in an invocation that was given no PRNG key."""


class ChildConfigError(WeftError, TypeError):
    """A child was given as something that is not the config of a module."""


class LayerConfigError(ConfigError, ValueError):
    """Fields of a layer's config, each right by itself, do not fit together."""


class ParameterSpecError(WeftError, ValueError):
    """A parameter's specification, its partitioning and its value do not fit together."""


class ParameterInitError(WeftError, ValueError):
    """No initializer fits a parameter, or the one it has cannot draw it."""


class MetricsError(WeftError, ValueError):
    """The losses and metrics of a model do not fit together, or find nothing to measure."""
