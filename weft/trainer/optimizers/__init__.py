"""Optimizers as triples of pure functions, and the transformations that they are composed of."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
