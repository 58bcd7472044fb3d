"""Metrics of predictions: immutable states that batches are added to, for `weft.fit` and loops."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
