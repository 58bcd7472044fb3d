"""Reports of runs for people: displays, the status page, pages with charts."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
