from weft.lifting.autodiff import (
    custom_jvp as custom_jvp, custom_vjp as custom_vjp, grad as grad, jvp as jvp, remat as remat,
    value_and_grad as value_and_grad, vjp as vjp,
)
from weft.lifting.branches import cond as cond, switch as switch
from weft.lifting.jit import checkify as checkify, eval_shape as eval_shape, jit as jit
from weft.lifting.kind import Kind as Kind
from weft.lifting.mapping import map_state as map_state, pmap as pmap, shard_map as shard_map, vmap as vmap
from weft.lifting.roles import CARRY as CARRY, DIFF as DIFF, FORK as FORK, Roles as Roles
from weft.lifting.scan import fori_loop as fori_loop, scan as scan, while_loop as while_loop
