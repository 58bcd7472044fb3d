"""Linen: dataclass modules whose variables live on scopes.

A module describes a layer; `init` makes its variables and `apply` uses them. Transformations take
module classes, methods and functions of modules; layers declare parameters and leave the
mathematics to `weft.functional`.
"""

from weft.core.lift import broadcast
from weft.core.meta import PARTITION_NAME, Partitioned, with_partitioning
from weft.linen.autodiff import custom_jvp, custom_vjp, grad, jvp, value_and_grad, vjp
from weft.linen.calls import apply, init, init_with_output, merge_param, share_scope
from weft.linen.control_flow import cond, fori_loop, switch, while_loop
from weft.linen.methods import compact, compact_name_scope, nowrap
from weft.linen.module import Module
from weft.linen.running import (
    disable_named_call,
    enable_named_call,
    intercept_methods,
    override_named_call,
)
from weft.linen.summary import tabulate
from weft.linen.transforms import (
    add_metadata_axis,
    checkpoint,
    fold_rngs,
    jit,
    map_variables,
    named_call,
    pmap,
    remat,
    remat_scan,
    scan,
    shard_map,
    vmap,
)
