"""Common layers by family; see `weft.hierarchy.attention` for attention and transformers."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
