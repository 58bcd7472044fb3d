"""The errors about layers of one library in models of another."""

from weft.errors._base import WeftError


class InteropError(WeftError):
    """Base of the errors about layers of other libraries."""


class UnknownLayerError(InteropError, TypeError):
    """An object is no layer of any library that is known."""


class MissingLibraryError(InteropError, ImportError):
    """A library is not installed whose layers are to be used."""


class LayerVariablesError(InteropError, ValueError):
    """Variables do not fit the layer that they are given to."""


class LayerInputsError(InteropError, TypeError):
    """The parameters of a layer follow from inputs that were not given."""


class LayerMethodError(InteropError, AttributeError):
    """A layer has no method of a name."""


class BridgeContextError(InteropError, ValueError):
    """Something was asked for that is there only while a module of the bridge runs."""
