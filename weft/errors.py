"""Every error that Weft raises on purpose.

All of them derive from `WeftError`, and from the builtin a caller would expect (`ValueError`,
`TypeError`, ...). A message names what was wrong, where, what was expected and the smallest change
that mends it.
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


class ConfigTextError(ConfigError, ValueError):
    """A text is not written as a config is."""


class ConfigReferenceError(ConfigTextError):
    """A text speaks of a class or function that is not there, or that it may not speak of."""


class ConfigOverrideError(ConfigError, ValueError):
    """An override is not of the form `path=value`."""


class UnknownConfigError(ConfigError, KeyError):
    """A module has no trainer config of that name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


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


class LayerConfigError(ConfigError, ValueError):
    """Fields of a layer's config, each right by itself, do not fit together."""


class ParameterSpecError(WeftError, ValueError):
    """A parameter's specification, its partitioning and its value do not fit together."""


class ParameterInitError(WeftError, ValueError):
    """No initializer fits a parameter, or the one it has cannot draw it."""


class MetricsError(WeftError, ValueError):
    """The losses and metrics of a model do not fit together, or find nothing to measure."""


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


class TransformArgumentError(LiftingError, ValueError):
    """A transformation was given an argument that it cannot honour."""


class VariableAxisError(LiftingError, ValueError):
    """A variable came out of a transformation in another way than its collection's axis says."""


# Nested dicts, structs and what is saved of them.


class StructDefinitionError(WeftError, TypeError):
    """`struct.dataclass` was given something that is no class."""


class AbstractPyTreeNodeError(WeftError, NotImplementedError):
    """`struct.PyTreeNode` itself was to be instantiated."""


class FrozenDictMutationError(WeftError, ValueError, AttributeError):
    """A FrozenDict was to be changed."""


class NestedDictError(WeftError, TypeError):
    """A function of nested dicts was given something else."""


class FlatDictError(WeftError, ValueError):
    """The paths of a flat dict collide, or cannot be joined or split."""


class TraversalError(WeftError, ValueError):
    """A traversal cannot go into a value, or was given too few or too many values."""


class SerializationError(WeftError):
    """Base of the errors about state dicts and their bytes."""


class SerializationHandlerError(SerializationError, ValueError):
    """A type already has a rule for its state dict."""


class StateDictKeyError(SerializationError, ValueError):
    """Keys of a dict are equal once they are strings."""


class StateDictMismatchError(SerializationError, ValueError):
    """A state dict and the target that it is to be restored to have different structures."""


class UnserializableValueError(SerializationError, TypeError):
    """A value has no form as bytes."""


class DamagedBytesError(SerializationError, ValueError):
    """Bytes are not as `msgpack_serialize` writes them."""


class BranchStructureError(LiftingError, TypeError):
    """The branches of a cond or switch return different structures, shapes or dtypes."""


class CarryStructureError(LiftingError, TypeError):
    """A loop's carry changed its structure, shape or dtype in the body."""


# Axis metadata and layouts.


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


class ShardingWarning(WeftError, UserWarning):
    """A layout over the mesh was asked for and cannot be kept."""


# Scopes.


class ScopeError(WeftError):
    """Base of the errors about scopes and what they hold."""


class InvalidFilterError(ScopeError, TypeError):
    """Something that is no filter was given where collections or PRNG streams are named."""

    def __init__(self, filter_like: object, why: str = ""):
        super().__init__(
            f"{filter_like!r} cannot be used as a filter here"
            + (f": {why}" if why else "")
            + "; expected True, False, a name, a collection of names or a DenyList."
        )


class InvalidScopeError(ScopeError, RuntimeError):
    """A scope was used after its end."""

    def __init__(self, scope_name: str):
        super().__init__(
            f"the scope {scope_name!r} is used after its end; a scope is for the call it was made "
            "for: call `init` or `apply` again, and keep variables instead of scopes."
        )


class JaxTransformError(ScopeError, RuntimeError):
    """A scope was changed inside of a JAX transformation that it does not cross."""

    def __init__(self, what: str = "A scope is used", where: str = "/"):
        super().__init__(
            f"{what} in {where!r} inside of a JAX transformation that the scope does not cross, so "
            "a tracer would leak into it; use the lifted transformation of the same name "
            "(weft.core.lift) instead of the one of JAX."
        )


class InvalidRngError(ScopeError, ValueError):
    """A PRNG stream is missing, or a key is no key."""

    def __init__(self, msg: str):
        super().__init__(msg)


class NameInUseError(ScopeError, ValueError):
    """A name in a scope or a module is given a second time."""

    def __init__(self, key_type: str, value: str, module_name: str):
        super().__init__(
            f"the name {value!r} is used twice in {module_name!r}, the second time in "
            f"{key_type!r}; choose another name, or push the scope with reuse=True to share what "
            "it holds."
        )


class ScopeCollectionNotFound(ScopeError, LookupError):
    """A variable is asked for in a collection that has none."""

    def __init__(self, col_name: str, var_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"the scope {scope_path!r} was asked for {var_name!r} of the collection {col_name!r}, "
            "which is empty; "
            + (hint or "give it to `apply`, or make the collection mutable and give an init_fn.")
        )


class ScopeParamNotFoundError(ScopeError, LookupError):
    """A parameter is missing in a scope that has others."""

    def __init__(self, param_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"no parameter {param_name!r} in the scope {scope_path!r}{hint}; give it to `apply`, "
            "or run `init` again if the model has changed."
        )


class ScopeVariableNotFoundError(ScopeError, LookupError):
    """A variable is missing in a collection that has others."""

    def __init__(self, name: str, col: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"no variable {name!r} of the collection {col!r} in the scope {scope_path!r}{hint}; "
            "give it to `apply`, or make the collection mutable and give an init_fn."
        )


class ScopeFlagNotFoundError(ScopeError, LookupError, ValueError):
    """A flag is asked for that was not given."""

    def __init__(self, key: str, scope_path: str, flags: object = ()):
        super().__init__(
            f"no flag {key!r} in the scope {scope_path!r}; there are {flags}. Give it to `init` or "
            f"`apply`: flags={{{key!r}: ...}}."
        )


class ScopeNameError(ScopeError, TypeError):
    """The name of a scope or a variable is no string."""

    def __init__(self, name: object, scope_path: str):
        super().__init__(
            f"the name {name!r} in the scope {scope_path!r} is a {type(name).__name__}; expected a "
            "string."
        )


class ScopeTreeError(ScopeError, TypeError):
    """Where a scope looks for its variables there is a value, and no dict."""

    def __init__(self, col: str, scope_path: str, value: object):
        super().__init__(
            f"the collection {col!r} has a {type(value).__name__} at {scope_path!r}, where a scope "
            "needs a dict of its variables; the variables are of another model, or a variable and "
            "a scope have one name."
        )


class ReturnedScopeError(ScopeError, TypeError):
    """A function that a transformation runs returns its scope."""

    def __init__(self, transformation: str, scope_path: str):
        super().__init__(
            f"{transformation}: the function returns the scope {scope_path!r}; a scope ends with "
            "the call it was made for, so return arrays."
        )


class ScopeParamShapeError(ScopeError, ValueError):
    """A parameter has another shape than its initializer makes."""

    def __init__(self, param_name: str, scope_path: str, value_shape: object, init_shape: object):
        super().__init__(
            f"the parameter {param_name!r} in the scope {scope_path!r} has shape {value_shape}, "
            f"but its initializer makes {init_shape}; the parameters are of another model, or the "
            "input has another size than at `init`."
        )


class ModifyScopeVariableError(ScopeError, TypeError):
    """A variable of a collection that is not mutable was written to."""

    def __init__(self, col: str, variable_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"{variable_name!r} in the scope {scope_path!r} was written to, but its collection "
            f"{col!r} is not mutable; " + (hint or f"call apply(..., mutable=[{col!r}]).")
        )


class ApplyScopeInvalidVariablesTypeError(ScopeError, TypeError):
    """The variables given to `apply` are no mapping of mappings."""

    def __init__(self, variables: object = None, col: str | None = None):
        what = "the variables are" if col is None else f"the collection {col!r} is"
        super().__init__(
            f"{what} a {type(variables).__name__}; expected a dict of collections, such as "
            '{"params": {...}}.'
        )


class ApplyScopeInvalidVariablesStructureError(ScopeError, ValueError):
    """The variables given to `apply` have a layer too many."""

    def __init__(self, variables: object):
        names = sorted(variables) if isinstance(variables, dict) else variables
        super().__init__(
            'the variables have "params" inside of "params"; the outer dict is one of collections: '
            f'give variables["params"] instead of what has the collections {names}.'
        )


class LazyInitError(ScopeError, ValueError):
    """A variable's initial value depends on an input of which only the shape was given."""

    def __init__(self, partial_val: object):
        super().__init__(
            f"lazy_init cannot compute {partial_val}: its initial value depends on the value of an "
            "input of which only shape and dtype were given; give that input as an array, or make "
            "the initializer independent of it."
        )


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
    """A source of input failed; the message names the file and record, or the place."""


class InputDatasetError(WeftError, ValueError):
    """A dataset is of the wrong kind or size for what it is asked to do."""


class InputDispatchError(WeftError, ValueError):
    """The sizes and indices by which processes share a batch do not fit together."""


# The trainer.


class MeshError(WeftError, ValueError):
    """The mesh does not fit the devices, or an array does not fit the mesh."""


class RunDirError(WeftError, ValueError):
    """The directory of a run cannot be written, or belongs to another run."""


class UndefinedLossException(WeftError, FloatingPointError):
    """The loss is NaN or infinite."""


# Optimizers.


class ScheduleError(WeftError, ValueError):
    """The steps and values of a schedule do not fit together."""


class OptimizerArgumentError(WeftError, ValueError):
    """An optimizer was given arguments that do not go together."""


class TransformationTypeError(WeftError, TypeError):
    """Something was to be used as an optimizer that is none."""


class UpdateRuleError(WeftError, ValueError):
    """The rules that say how parameters are updated do not fit the parameters or the learners."""


class UntrainableParameterError(WeftError, TypeError):
    """A parameter of a dtype without gradients was to be trained."""


class InplaceUpdateError(WeftError, ValueError):
    """An in-place update does not fit the parameters."""


# Summaries and checkpoints.


class SummaryValueError(WeftError, ValueError):
    """A summary holds a value that no writer can show."""


class MetricCalculatorError(WeftError, ValueError):
    """A metric calculator does not fit its model, its batches or the calculators beside it."""


class MissingExtraError(WeftError, ImportError):
    """A package is needed that one of Weft's extras installs."""


class CheckpointError(WeftError):
    """Base of the errors about checkpoints."""


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A checkpoint could not be saved; those before it stand."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint in a directory, or none of the step that was asked for."""


class DamagedCheckpointError(CheckpointError, RuntimeError):
    """The files of a checkpoint are not as they were written."""


class CheckpointStructureError(CheckpointError, ValueError):
    """A checkpoint and the state that it is to be restored to have different structures."""


class CheckpointStateError(CheckpointError, TypeError):
    """A state holds something that a checkpoint cannot."""


class CheckpointPolicyError(CheckpointError, ValueError):
    """A save policy asks for something that the run does not have."""


# The command line.


class CommandLineError(WeftError, ValueError):
    """The arguments of a command name something that is not there, or do not go together."""
