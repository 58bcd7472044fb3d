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


class CursorError(WeftError):
    """Base of the errors about cursors."""


class CursorKeyError(CursorError, KeyError):
    """A cursor was asked for an entry that is not there."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class CursorIndexError(CursorError, IndexError):
    """A cursor was asked for, or given, an element beyond the end."""


class CursorAttributeError(CursorError, AttributeError):
    """A cursor was asked for, or given, an attribute that is not there."""


class CursorTypeError(CursorError, TypeError):
    """A cursor points to something that cannot be indexed, iterated over or changed."""


class CursorFindError(CursorError, LookupError):
    """`Cursor.find` found nothing, or more than one thing.

    Args:
        cursor: what was found first, if anything.
        cursor2: what was found second.
        among: what was there instead.
    """

    def __init__(self, cursor: object = None, cursor2: object = None, among: str = ""):
        if cursor is None:
            super().__init__(
                f"`cond_fn` was True of nothing{among}; it is called with each path below the "
                "cursor, joined by '/', and with the value there."
            )
        else:
            super().__init__(
                f"`cond_fn` was True of more than one thing, first of {cursor}, then of {cursor2}; "
                "make it stricter, or use `find_all`."
            )


class TraverseTreeError(CursorError, TypeError):
    """A cursor needs a function to visit what is below it with.

    Args:
        update_fn: what was given to change values with.
        cond_fn: what was given to find values with.
    """

    def __init__(self, update_fn: object = None, cond_fn: object = None):
        super().__init__(
            f"a tree is visited with either an `update_fn` or a `cond_fn`, and these are "
            f"{update_fn!r} and {cond_fn!r}; give a function of a path and a value to "
            "`apply_update`, or to `find` and `find_all`."
        )
