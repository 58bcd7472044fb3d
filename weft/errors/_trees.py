from weft.errors._base import WeftError


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

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class CursorIndexError(CursorError, IndexError):
    """An index of a cursor is out of range."""


class CursorAttributeError(CursorError, AttributeError):
    """A cursor has no attribute of that name."""


class CursorTypeError(CursorError, TypeError):
    """The value of a cursor cannot be indexed, iterated over or changed."""


class CursorFindError(CursorError, LookupError):
    """`Cursor.find` found nothing, or more than one match."""

    def __init__(self, cursor: object = None, cursor2: object = None, among: str = ""):
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
