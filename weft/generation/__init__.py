"""Generation of text: sampling with caches, many sequences at once, stop strings, streaming."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
