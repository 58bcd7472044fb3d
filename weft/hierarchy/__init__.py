"""Layers as nodes of a tree of modules, each made from a config; see `weft.hierarchy.layers`."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
