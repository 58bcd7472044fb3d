"""Layers of one library in models of another: Linen, NNX, the hierarchy, Flax, Equinox and Haiku.

`as_linen`, `as_nnx` and `as_hierarchy` take a layer of any of these libraries, through one `Model`
per library (`weft.interop.models`). Libraries are imported when their layers are used.
"""

from weft.interop.hierarchy import InHierarchy, as_hierarchy
from weft.interop.linen import InLinen, as_linen
from weft.interop.models import Model
from weft.interop.nnx import InNNX, as_nnx
from weft.interop.recognition import model_of

__all__ = [
    "as_linen",
    "as_nnx",
    "as_hierarchy",
    "Model",
    "model_of",
    "InLinen",
    "InNNX",
    "InHierarchy",
]
