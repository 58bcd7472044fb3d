"""Linen in NNX and NNX in Linen, with their state and the metadata of their axes.

`ToNNX` is an NNX module around one of Linen, `to_linen` makes a Linen module around one of NNX, and
a `Module` of the bridge is an NNX module that is written as one of Linen. All of it stands in
`weft.interop`, above both; this module is loaded when it is asked for, and nothing in `weft.nnx`
imports it.
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
    # modules in the manner of Linen
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
