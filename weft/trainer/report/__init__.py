"""The report of a run: a page with its results that opens without a server."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
