"""Configs: trees of named, typed values that objects are created from.

A `Configurable` class declares its parameters in a nested `Config`; functions and classes of other
libraries get configs from their signatures. `instantiate()` creates the object. JAX is not needed.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
