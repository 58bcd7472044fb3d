"""Stateless layer math: pure functions of arrays, shared by all ways of writing a model.

Statistics and softmaxes are computed in float32; results have the dtype of the inputs.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
