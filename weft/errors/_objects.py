"""The errors about objects that transformations take: variables, modules, their state."""

from weft.errors._base import WeftError


class ObjectError(WeftError):
    """Base of the errors about objects that transformations take."""


class TraceContextError(ObjectError, RuntimeError):
    """An object was changed inside of a transformation that it did not go through."""

    def __init__(self, what: str, transformation: str = "a JAX transformation", known: str = ""):
        super().__init__(
            f"a {what} is changed inside of {transformation}, but was made outside of it, "
            "so a tracer would leak; give it to the transformed function as an argument, and "
            "return what has changed." + (f" It {known}." if known else "")
        )


class ImmutableVariableError(ObjectError, RuntimeError):
    """A variable was written to that is declared to keep its value."""

    def __init__(self, message: str):
        super().__init__(
            f"a {message} is written to, but it has the metadata mutable=False; keep its value, or "
            "say variable.set_metadata(mutable=True) first."
        )


class VariableOperationError(ObjectError, NotImplementedError):
    """An operation that a variable does not have."""


class VariableAttributeError(ObjectError, AttributeError):
    """A variable's value has no such attribute, or an attribute of a variable was to be set."""


class VariableMetadataError(ObjectError, KeyError):
    """A variable has no such metadata."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class VariableArgumentError(ObjectError, TypeError):
    """A method of a variable was given what it cannot take."""


class VariableTypeError(ObjectError, ValueError):
    """The class of a variable is not what it has to be, or is not known by a name."""


class VariableShapeError(ObjectError, ValueError):
    """A value does not have the shape that its variable keeps."""


class ObjectArgumentError(ObjectError, TypeError):
    """A function about objects was given what it cannot take."""


class AttributeMarkError(ObjectError, ValueError):
    """An attribute's value does not fit to what was said of it, that it is data or static."""


class StateFilterError(ObjectError, ValueError):
    """Filters do not say of each part of a state to which group it belongs."""


class StatePathError(ObjectError, KeyError, ValueError):
    """A state has nothing at a path."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class GraphStructureError(ObjectError, ValueError):
    """A graph of objects and a state or a description do not fit."""


class ModuleAttributeNotFoundError(ObjectError, ValueError):
    """An attribute was to be set that no module has."""


class LayerCallError(ObjectError, TypeError):
    """What stands among the layers of a Sequential cannot be called."""


class RngStreamNotFoundError(ObjectError, AttributeError, KeyError):
    """There is no PRNG stream of a name, and no default."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InconsistentAliasError(ObjectError, ValueError):
    """An object is at two places of a call, for which different things were said."""


class SharedObjectError(ObjectError, ValueError):
    """An object is at two places of a call that takes objects as plain pytrees."""


class CapturedObjectError(ObjectError, ValueError):
    """An object from outside of a transformed function is among what it returns."""


class LoopStructureError(ObjectError, ValueError):
    """The body of a loop changed more of an object than the values of variables."""


class CompiledCallError(ObjectError, TypeError):
    """A function that was compiled ahead of time is called with other objects or arguments."""


class BranchObjectsError(ObjectError, TypeError):
    """Branches change the references or static attributes of an object in different ways."""
