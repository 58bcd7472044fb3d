"""Configs: trees of named, typed values that objects are created from.

A `Configurable` class declares its parameters in a nested `Config`; functions and classes of other
libraries get configs from their signatures. After edits, `instantiate()` creates the object. Does
not import JAX.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
