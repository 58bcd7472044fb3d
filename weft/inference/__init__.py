"""Inference with trained models: pipelines, sampling, writers of outputs."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
