"""JAX transformations of functions that use stateful objects, for any kind of state.

`kind` transfers state through a transformation, and `roles` defines the handling of each part
of it. Each transformation is a function of a `Kind`, which implements the transfer for one sort of
carrier (a context, a scope, an object).
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
