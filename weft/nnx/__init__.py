"""NNX: objects whose variables are held by reference, and transformations that preserve references.

A module is a Python object with variables and modules as attributes. To JAX it is a pytree; the
transformations here, with the signatures of JAX's, propagate changes of a module to the caller.

Outside transformations, `graph` arguments are ignored: references are always kept.
In transformations, `graph` and `graph_updates` override `set_graph_mode` and `set_graph_updates`.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)

# Lists and dicts in attributes of any object become `List` and `Dict`.
import weft.nnx.containers  # noqa: E402, F401
