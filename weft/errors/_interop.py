from weft.errors._base import WeftError


class InteropError(WeftError):
    """Base of the errors of layers of other libraries."""


class UnknownLayerError(InteropError, TypeError):
    """An object is not a layer of any known library."""


class MissingLibraryError(InteropError, ImportError):
    """The library of a layer is not installed."""


class LayerVariablesError(InteropError, ValueError):
    """Variables do not fit their layer."""


class LayerInputsError(InteropError, TypeError):
    """A layer's parameters depend on inputs that were not given."""


class LayerMethodError(InteropError, AttributeError):
    """A layer has no method of that name."""


class BridgeContextError(InteropError, ValueError):
    """Something that exists only while a module of the bridge runs was used outside of it."""
