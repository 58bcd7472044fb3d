"""Checkpoints: a run's state on the disk, from which an interrupted run continues exactly."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
