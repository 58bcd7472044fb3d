"""Every error that Weft raises on purpose.

All of them derive from `WeftError`, and from the builtin a caller would expect (`ValueError`, `TypeError`, ...).
A message names what was wrong, where, what was expected and the smallest change that mends it.
"""


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""


# Configs.


class ConfigError(WeftError):
    """Base of the errors about configs."""


class UnknownFieldError(ConfigError, AttributeError):
    """A config, or something on a path into it, has no field of that name."""


class FrozenConfigError(ConfigError, RuntimeError):
    """The config of an object that exists already was to be changed."""


class InvalidConfigClassError(ConfigError, TypeError):
    """A config class does not derive from the config class that it has to extend."""


class InvalidConfigNameError(ConfigError, ValueError):
    """A config field cannot have that name."""


class InvalidConfigValueError(ConfigError, TypeError):
    """A config field cannot hold that value."""


class ConfigTypeError(InvalidConfigValueError):
    """A value does not fit the type that its config field declares."""


class MissingConfigClassDecoratorError(ConfigError, TypeError):
    """A config class was used that `@config_class` does not stand above."""


class NonConfigFieldError(ConfigError, ValueError):
    """A config class defines something that is not a field, such as a method."""


class RequiredFieldMissingError(ConfigError, ValueError):
    """A field was still REQUIRED when its config was instantiated."""


# The module hierarchy.


class ChildNameConflictError(WeftError, ValueError):
    """A module already has a child, attribute or shared module of that name."""


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


class ParameterSpecError(WeftError, ValueError):
    """A parameter's specification, its partitioning and its value do not fit together."""


class ParameterInitError(WeftError, ValueError):
    """No initializer fits a parameter, or the one it has cannot draw it."""


# The mathematics of layers.


class ArgumentShapeError(WeftError, ValueError):
    """An array has a shape that does not fit the function's other arguments."""


class ArgumentValueError(WeftError, ValueError):
    """An argument has a value that the function has no meaning for."""


class UnknownActivationError(ArgumentValueError):
    """No activation function has that name."""


# Crossing JAX transformations.


class LiftingError(WeftError):
    """Base of the errors about state that crosses a JAX transformation."""


class ForkError(LiftingError, ValueError):
    """State that cannot be split was given the role FORK."""


class AxisSizeError(LiftingError, ValueError):
    """The sizes of the mapped axes disagree, or none tells the size."""


class RoleError(LiftingError, ValueError):
    """A group of state was given a role that the transformation does not have."""


class CarryStructureError(LiftingError, TypeError):
    """A loop's carry changed its structure, shape or dtype in the body."""


# Input.


class EmptyCorpusError(WeftError, ValueError):
    """A corpus, or one of its parts, has no text."""


class CorpusReadError(WeftError, OSError):
    """A file of a corpus cannot be read, or two of them share a name."""


class BatchShardingError(WeftError, ValueError):
    """An input batch cannot be laid over the mesh."""


class NoMeshError(WeftError, RuntimeError):
    """A mesh is needed and none is set."""


class InputReadError(WeftError, RuntimeError):
    """A source of input failed; the message names the file and the record, or the place in the iteration."""


class InputDatasetError(WeftError, ValueError):
    """A dataset is of the wrong kind or size for what it is asked to do."""


class InputDispatchError(WeftError, ValueError):
    """The sizes and indices by which processes share a batch do not fit together."""
