"""JAX transformations of functions of scopes.

A lifted function takes a scope, or a pytree of scopes, before its other arguments. Filters such as
`variables` and `rngs` select collections and PRNG streams; unselected ones cannot be used inside.
`weft.lifting` contains the implementation.
"""

from weft.core.lift.autodiff import custom_jvp, custom_vjp, grad, jvp, value_and_grad, vjp
from weft.core.lift.branches import cond, switch
from weft.core.lift.common import broadcast
from weft.core.lift.compiled import checkify, checkpoint, eval_shape, jit, named_call, remat
from weft.core.lift.loops import fori_loop, remat_scan, scan, while_loop
from weft.core.lift.mapped import pmap, shard_map, vmap
from weft.core.lift.state import fold_rngs, map_variables, swap_collection, tree_map_rngs
from weft.core.pack import pack

__all__ = [
    # mapped functions
    "vmap",
    "pmap",
    "shard_map",
    # loops and branches
    "scan",
    "remat_scan",
    "while_loop",
    "fori_loop",
    "cond",
    "switch",
    "broadcast",
    # derivatives
    "grad",
    "value_and_grad",
    "vjp",
    "jvp",
    "custom_vjp",
    "custom_jvp",
    # execution
    "jit",
    "remat",
    "checkpoint",
    "eval_shape",
    "checkify",
    "named_call",
    # the state itself
    "map_variables",
    "swap_collection",
    "fold_rngs",
    "tree_map_rngs",
    "pack",
]
