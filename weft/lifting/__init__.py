"""JAX transformations of functions that use stateful objects, for any kind of state.

`crossing` transfers state through a transformation, and `roles` defines the handling of each part
of it. Each transformation is a function of a `Kind`, which implements the transfer for one sort of
carrier (a context, a scope, an object).
"""

from __future__ import annotations

from weft.lifting.abstract import checkify, eval_shape
from weft.lifting.autodiff import grad, jvp, value_and_grad, vjp
from weft.lifting.branches import cond, switch
from weft.lifting.crossing import Kind
from weft.lifting.custom_rules import custom_jvp, custom_vjp
from weft.lifting.jit import jit
from weft.lifting.loops import fori_loop, while_loop
from weft.lifting.remat import remat
from weft.lifting.roles import CARRY, DIFF, FORK, Roles
from weft.lifting.scan import scan
from weft.lifting.shard_map import pmap, shard_map
from weft.lifting.transform import transform
from weft.lifting.vmap import vmap

__all__ = [
    "CARRY",
    "DIFF",
    "FORK",
    "Kind",
    "Roles",
    "checkify",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "eval_shape",
    "fori_loop",
    "grad",
    "jit",
    "jvp",
    "pmap",
    "remat",
    "scan",
    "shard_map",
    "switch",
    "transform",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
