"""Trainer, learner, optimizers, evaluation, checkpoints and summaries."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
