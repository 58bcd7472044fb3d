"""Bridge between Linen and NNX, with state and axis metadata.

`ToNNX` wraps a Linen module, `to_linen` wraps an NNX module, and the bridge's `Module` is an NNX
module written like a Linen one. The code is in `weft.interop` and loads on demand; nothing in
`weft.nnx` imports this module.
"""

from __future__ import annotations

from weft.interop.bridge.functional import Functional, functional
from weft.interop.bridge.guests import linen_in_bridge_mdl, nnx_in_bridge_mdl
from weft.interop.bridge.modules import Module, compact
from weft.interop.bridge.scopes import AttrPriority, Scope, current_context, current_module
from weft.interop.bridge.to_linen import ToLinen, to_linen
from weft.interop.bridge.to_nnx import ToNNX, lazy_init
from weft.interop.bridge.variables import NNXMeta, to_linen_var, to_nnx_var, with_partitioning

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
