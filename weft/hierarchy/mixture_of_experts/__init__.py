"""Mixtures of experts: layers (`feed_forward`) and choice of experts (`gating`)."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
