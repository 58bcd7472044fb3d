from weft.core.lift.autodiff import (
    custom_jvp as custom_jvp, custom_vjp as custom_vjp, grad as grad, jvp as jvp,
    value_and_grad as value_and_grad, vjp as vjp,
)
from weft.core.lift.transforms import (
    cond as cond, fori_loop as fori_loop, switch as switch, while_loop as while_loop,
)
from weft.core.lift.pack import pack as pack
from weft.core.lift.transforms import (
    broadcast as broadcast, checkify as checkify, checkpoint as checkpoint,
    eval_shape as eval_shape, fold_rngs as fold_rngs, In as In, jit as jit,
    map_variables as map_variables, named_call as named_call, Out as Out, pmap as pmap, remat as remat,
    remat_scan as remat_scan, scan as scan, shard_map as shard_map,
    swap_collection as swap_collection, tree_map_rngs as tree_map_rngs, vmap as vmap,
)
