"""Layers as functions of a `Scope`, which create parameters and call `weft.functional`."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
