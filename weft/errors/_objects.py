from weft.errors._base import WeftError


class ObjectError(WeftError):
    """Base of the errors of objects that transformations take."""


class TraceContextError(ObjectError, RuntimeError):
    """An object was changed inside a transformation that it is not an argument of."""

    def __init__(self, what: str, transformation: str = "a JAX transformation", known: str = ""):
        super().__init__(
            f"a {what} is changed inside of {transformation}, but was created outside of it, "
            "so a tracer would leak; pass it to the transformed function as an argument, and "
            "return what has changed." + (f" It {known}." if known else "")
        )


class ImmutableVariableError(ObjectError, RuntimeError):
    """An immutable variable was written to."""

    def __init__(self, message: str):
        super().__init__(
            f"a {message} is written to, but it has the metadata mutable=False; keep its "
            "value, or call variable.set_metadata(mutable=True) first."
        )


class VariableOperationError(ObjectError, NotImplementedError):
    """A variable does not support that operation."""


class VariableAttributeError(ObjectError, AttributeError):
    """A variable's value has no such attribute, or an attribute of a variable cannot be set."""


class VariableMetadataError(ObjectError, KeyError):
    """A variable has no such metadata."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class VariableArgumentError(ObjectError, TypeError):
    """A method of a variable got an invalid argument."""


class VariableTypeError(ObjectError, ValueError):
    """A variable's class is not the required one, or has no registered name."""


class VariableShapeError(ObjectError, ValueError):
    """A value does not have the shape of its variable."""


class ObjectArgumentError(ObjectError, TypeError):
    """A function of objects got an invalid argument."""


class AttributeMarkError(ObjectError, ValueError):
    """An attribute's value contradicts its annotation as data or static."""


class StateFilterError(ObjectError, ValueError):
    """Filters do not assign every part of a state to a group."""


class StatePathError(ObjectError, KeyError, ValueError):
    """A state has no value at a path."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class GraphStructureError(ObjectError, ValueError):
    """A graph of objects does not match a state or a graph definition."""


class ModuleAttributeNotFoundError(ObjectError, ValueError):
    """An attribute to be set exists in no module."""


class LayerCallError(ObjectError, TypeError):
    """An element of a Sequential is not callable."""


class RngStreamNotFoundError(ObjectError, AttributeError, KeyError):
    """There is no PRNG stream of that name, and no default stream."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InconsistentAliasError(ObjectError, ValueError):
    """An object occurs twice in a call, with different annotations."""


class SharedObjectError(ObjectError, ValueError):
    """An object occurs twice in a call that takes objects as plain pytrees."""


class CapturedObjectError(ObjectError, ValueError):
    """A transformed function returns an object from outside of it."""


class LoopStructureError(ObjectError, ValueError):
    """The body of a loop changed more of an object than the values of its variables."""


class CompiledCallError(ObjectError, TypeError):
    """A function compiled ahead of time was called with other objects or arguments."""


class BranchObjectsError(ObjectError, TypeError):
    """Branches change references or static attributes of an object differently."""
