"""Search for what went wrong: steps with undefined numbers, lookups out of range."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
