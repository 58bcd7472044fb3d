"""Base of all errors, suggestions for misspelled names, and errors of packages without models."""

import sys as _sys
import warnings as _warnings
from collections.abc import Hashable as _Hashable
from collections.abc import Iterable as _Iterable


class WeftError(Exception):
    """Base of the errors that Weft raises on purpose.

    Errors keep their message and attributes when pickled or copied, whatever constructors take.

    Attributes:
        exit_code: exit code of a command with this error: 2 for bad input, 1 for `RunFailedError`.
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        # Python would call the constructor with `args`, which holds the finished message.
        return _rebuild, (type(self), self.args), self.__dict__.copy()

    def __str__(self) -> str:
        # That of a KeyError would be the repr of the message, which hides its line breaks.
        if len(self.args) == 1:
            return str(self.args[0])
        return super().__str__()


def _rebuild(cls: type[WeftError], args: tuple[object, ...]) -> WeftError:
    """Creates an error without calling Weft's constructors; only the builtin's is called."""
    error = cls.__new__(cls, *args)
    for base in cls.__mro__:
        if not issubclass(base, WeftError):
            base.__init__(error, *args)
            break
    return error


# Packages between the use and the warning; the last two import names.
_NOT_OF_USERS = ("weft", "jax", "importlib", "pkgutil")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns at the user's line that led to here."""
    frame = _sys._getframe()
    module = __name__
    while module.partition(".")[0] in _NOT_OF_USERS and frame.f_back:
        frame = frame.f_back
        module = frame.f_globals.get("__name__") or "<string>"
    _warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module,
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_deprecated(use: str, advice: str) -> None:
    """Warns of a use that Flax deprecates, at the user's line that led to it."""
    warn_user(f"{use} is deprecated, as in Flax: {advice}.", DeprecationWarning)


def describe_error(error: BaseException) -> str:
    """Returns the name of an error's class, and its text if it has one.

    >>> describe_error(OSError("no space")), describe_error(KeyboardInterrupt())
    ('OSError: no space', 'KeyboardInterrupt')
    """
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name


def similar_names(
    name: _Hashable, candidates: _Iterable[_Hashable]
) -> list[str]:
    """Returns the candidates that are similar to `name`, the nearest first.

    >>> similar_names("lerning_rate", ["learning_rate", "weight_decay", "b1"])
    ['learning_rate']
    """
    # Local: only needed after a misspelling.
    from difflib import SequenceMatcher

    def similarity(candidate: str) -> float:
        wrong, right = str(name).lower(), candidate.lower()
        ratio = SequenceMatcher(None, wrong, right).ratio()
        is_contained = wrong in right or right in wrong
        if is_contained and min(len(wrong), len(right)) > 2:
            return max(ratio, 0.65)
        return ratio

    ranked: set[tuple[float, str]] = set()
    for candidate in map(str, candidates):
        score = similarity(candidate)
        if score >= 0.6:
            ranked.add((-score, candidate))
    return [candidate for _, candidate in sorted(ranked)]


def did_you_mean(name: _Hashable, candidates: _Iterable[_Hashable]) -> str:
    """Returns the last sentence of an error about an unknown name, or a key that is not a name."""
    names = sorted(map(str, candidates))
    nearest = similar_names(name, names)[:3]
    if nearest:
        return f"Did you mean {' or '.join(map(repr, nearest))}?"
    if not names:
        return "There are none."
    if len(names) > 12:
        names = [*names[:12], "…"]
    return f"There are: {', '.join(names)}."


class AsFlaxError(WeftError, ImportError):
    """Weft cannot take the place of Flax in this process."""


class LeftOutError(WeftError, ImportError):
    """A name of AXLearn has no counterpart in Weft."""


class ArgumentShapeError(WeftError, ValueError):
    """An array has a shape that does not fit the function's other arguments."""


class ArgumentValueError(WeftError, ValueError):
    """An argument has a value that the function does not accept."""


class UnknownActivationError(ArgumentValueError):
    """No activation function has that name."""


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


class RoleKindError(TransformArgumentError, TypeError):
    """A transformation was given roles of another kind than it takes."""


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


class AxisMetadataError(WeftError, ValueError):
    """The metadata of a variable does not fit the axes of its value.

    Attributes:
        path: path of the variable, as far as it is known; callers prepend to it.
    """

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = self.args[0]
        if not self.path:
            return message
        return f"the axis metadata of {self.path!r}: {message}"


class PartitionNameError(AxisMetadataError):
    """An axis to be removed has another name than the given one."""


class PartitioningUnspecifiedError(PartitionNameError):
    """A transformation adds or removes an axis of a value with names, and gave no name for it."""


class LogicalAxisError(WeftError, ValueError):
    """Rules for logical axes, or axis names, are malformed or contradict each other."""


class TopologyError(WeftError, ValueError):
    """A topology does not exist, has no compiler here, or its devices do not fit a shape."""


class ShardingWarning(WeftError, UserWarning):
    """A requested layout over the mesh cannot be kept."""


class UnknownFlagError(WeftError, LookupError):
    """`weft.configurations.config` has no flag of that name."""


class FlagWarning(WeftError, UserWarning):
    """A flag of Flax was changed that changes nothing in Weft."""


class StructDefinitionError(WeftError, TypeError):
    """The argument of `struct.dataclass` is not a class."""


class AbstractPyTreeNodeError(WeftError, NotImplementedError):
    """`struct.PyTreeNode` itself was instantiated."""


class FrozenDictMutationError(WeftError, ValueError, AttributeError):
    """A FrozenDict cannot be changed."""


class NestedDictError(WeftError, TypeError):
    """The argument of a function of nested dicts is something else."""


class FlatDictError(WeftError, ValueError):
    """The paths of a flat dict collide, or cannot be joined or split."""


class TraversalError(WeftError, ValueError):
    """A traversal cannot enter a value, or got too few or too many values."""


class SerializationError(WeftError):
    """Base of the errors of state dicts and their bytes."""


class SerializationHandlerError(SerializationError, ValueError):
    """A type already has a rule for its state dict."""


class StateDictKeyError(SerializationError, ValueError):
    """Keys of a dict are equal when converted to strings."""


class StateDictMismatchError(SerializationError, ValueError):
    """A state dict and its target have different structures."""


class UnserializableValueError(SerializationError, TypeError):
    """A value cannot be serialized to bytes."""


class DamagedBytesError(SerializationError, ValueError):
    """Bytes are not in the format of `msgpack_serialize`."""


class CursorError(WeftError):
    """Base of the errors of cursors."""


class CursorKeyError(CursorError, KeyError):
    """A cursor has no entry of that key."""


class CursorIndexError(CursorError, IndexError):
    """An index of a cursor is out of range."""


class CursorAttributeError(CursorError, AttributeError):
    """A cursor has no attribute of that name."""


class CursorTypeError(CursorError, TypeError):
    """The value of a cursor cannot be indexed, iterated over or changed."""


class CursorFindError(CursorError, LookupError):
    """`Cursor.find` found nothing, or more than one match."""

    def __init__(
        self, cursor: object = None, cursor2: object = None, among: str = ""
    ):
        if cursor is None:
            super().__init__(
                f"`cond_fn` matched nothing{among}; it is called with each path below the "
                "cursor, joined by '/', and with the value at the path."
            )
        else:
            super().__init__(
                f"`cond_fn` matched more than one value, first {cursor}, then {cursor2}; make "
                "it stricter, or use `find_all`."
            )


class TraverseTreeError(CursorError, TypeError):
    """A cursor's traversal needs exactly one function."""

    def __init__(self, update_fn: object = None, cond_fn: object = None):
        super().__init__(
            "a tree is traversed with either an `update_fn` or a `cond_fn`, but these are "
            f"{update_fn!r} and {cond_fn!r}; pass a function of a path and a value to "
            "`apply_update`, or to `find` and `find_all`."
        )


class WeightsError(WeftError):
    """Base of the errors of weights in files."""


class WeightsReadError(WeightsError, OSError):
    """A file of weights does not exist, or is damaged."""


class WeightsMismatchError(WeightsError, ValueError):
    """The tensors of a file differ from the expected ones in name, shape or dtype."""


class WeightsWriteError(WeightsError, ValueError):
    """A value cannot be written as a file of weights."""


class HuggingFaceConfigError(WeightsError, ValueError):
    """A Hugging Face model has no counterpart in Weft, or the reverse."""


class ConfigError(WeftError):
    """Base of the errors of configs."""


class UnknownFieldError(ConfigError, AttributeError):
    """A config, or a value on a path into it, has no field of that name."""


class FrozenConfigError(ConfigError, RuntimeError):
    """The config of an existing object cannot be changed."""


class InvalidConfigClassError(ConfigError, TypeError):
    """A config class does not derive from the config class that it must extend."""


class InvalidConfigNameError(ConfigError, ValueError):
    """A config field cannot have that name."""


class InvalidConfigValueError(ConfigError, TypeError):
    """A config field cannot hold that value."""


class ConfigTypeError(InvalidConfigValueError):
    """A value does not match the declared type of its config field."""


class ConfigTextError(ConfigError, ValueError):
    """A text is not a valid config."""


class UnreadableValueError(ConfigTextError):
    """Text describes a value that only the program had that wrote it."""


class ConfigReferenceError(ConfigTextError):
    """A config text names a class or function that does not exist or is not allowed."""


class ConfigModifierError(ConfigError, ValueError):
    """A config modifier finds nothing to change at its path, or changes it wrongly."""


class ConfigOverrideError(ConfigError, ValueError):
    """An override is not of the form `path=value`."""


class UnknownConfigError(ConfigError, KeyError):
    """A module has no trainer config of that name."""


class NonConfigFieldError(ConfigError, ValueError):
    """A config class defines something that is not a field, such as a method."""


class RequiredFieldMissingError(ConfigError, ValueError):
    """A field was still REQUIRED when its config was instantiated."""
