"""Evaluation of language models: perplexity, multiple choice, exact answers, `pass@k`."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
