"""Hugging Face checkpoints as models of the hierarchy, and back; see `FAMILIES` for which."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
