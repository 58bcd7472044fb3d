"""Bridge between Linen and NNX, with state and axis metadata.

`ToNNX` wraps a Linen module, `to_linen` wraps an NNX module, and the bridge's `Module` is an NNX
module written like a Linen one. The code is in `weft.interop` and loads on demand; nothing in
`weft.nnx` imports this module.
"""

from __future__ import annotations

from weft.interop.bridge import (
    AttrPriority,
    Module,
    Scope,
    compact,
    current_context,
    current_module,
    linen_in_bridge_mdl,
    nnx_in_bridge_mdl,
)
from weft.interop.nnx import ToNNX, lazy_init
from weft.interop.nnx_functional import Functional, ToLinen, functional, to_linen
from weft.interop.variables import NNXMeta, to_linen_var, to_nnx_var, with_partitioning

__all__ = [
    # wrappers
    "ToNNX",
    "lazy_init",
    "ToLinen",
    "to_linen",
    "NNXMeta",
    "to_linen_var",
    "to_nnx_var",
    "with_partitioning",
    # Linen-style modules
    "Module",
    "compact",
    "Scope",
    "AttrPriority",
    "current_context",
    "current_module",
    "nnx_in_bridge_mdl",
    "linen_in_bridge_mdl",
    # pure functions
    "Functional",
    "functional",
]
