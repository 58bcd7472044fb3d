"""Scopes: trees of variables that cross the transformations of JAX."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
