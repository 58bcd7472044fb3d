"""Scopes: trees of variables that cross the transformations of JAX."""

from typing import TYPE_CHECKING

from weft._on_demand import on_demand

if TYPE_CHECKING:
    from weft.core import lift, nn
    from weft.core.filters import DenyList, in_filter
    from weft.core.frozen_dict import FrozenDict, copy, freeze, pop, pretty_repr, unfreeze
    from weft.core.lift import (
        broadcast,
        custom_vjp,
        jit,
        jvp,
        remat,
        remat_scan,
        scan,
        vjp,
        vmap,
        while_loop,
    )
    from weft.core.meta import AxisMetadata, map_axis_meta, unbox
    from weft.core.scope import Scope, apply, bind, init, lazy_init
    from weft.core.tracing import check_trace_level, current_trace

__all__ = [
    # scopes
    "Scope",
    "init",
    "apply",
    "lazy_init",
    "bind",
    "DenyList",
    "in_filter",
    # lifted transformations; all of them are in weft.core.lift
    "vmap",
    "scan",
    "broadcast",
    "remat_scan",
    "while_loop",
    "remat",
    "jit",
    "vjp",
    "jvp",
    "custom_vjp",
    # axis metadata
    "AxisMetadata",
    "map_axis_meta",
    "unbox",
    # layers, and all lifted transformations
    "nn",
    "lift",
    # frozen dicts
    "FrozenDict",
    "freeze",
    "unfreeze",
    "copy",
    "pop",
    "pretty_repr",
    # JAX traces
    "check_trace_level",
    "current_trace",
]

__getattr__, __dir__ = on_demand(
    __name__,
    {
        "filters": ("DenyList", "in_filter"),
        "frozen_dict": ("FrozenDict", "copy", "freeze", "pop", "pretty_repr", "unfreeze"),
        "lift": (
            *("broadcast", "custom_vjp", "jit", "jvp", "remat", "remat_scan", "scan", "vjp"),
            *("vmap", "while_loop"),
        ),
        "meta": ("AxisMetadata", "map_axis_meta", "unbox"),
        "nn": (),
        "scope": ("Scope", "apply", "bind", "init", "lazy_init"),
        "tracing": ("check_trace_level", "current_trace"),
        "variable": (),
    },
)
