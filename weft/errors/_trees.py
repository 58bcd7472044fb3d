"""The errors about nested dicts, structs, and what is saved of them."""

from weft.errors._base import WeftError


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
