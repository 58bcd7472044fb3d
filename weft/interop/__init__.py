"""Layers of one library in models of another: Linen, NNX, the hierarchy, Flax, Equinox and Haiku.

`as_linen`, `as_nnx` and `as_hierarchy` take a layer of any of these libraries, through one `Model`
per library (`weft.interop.models`). Libraries are imported when their layers are used.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
