from weft.core import lift as lift, nn as nn
from weft.core.filters import DenyList as DenyList, in_filter as in_filter
from weft.core.frozen_dict import (
    copy as copy, freeze as freeze, FrozenDict as FrozenDict, pop as pop,
    pretty_repr as pretty_repr, unfreeze as unfreeze,
)
from weft.core.lift import (
    broadcast as broadcast, custom_vjp as custom_vjp, jit as jit, jvp as jvp, remat as remat,
    remat_scan as remat_scan, scan as scan, vjp as vjp, vmap as vmap, while_loop as while_loop,
)
from weft.core.meta import (
    AxisMetadata as AxisMetadata, map_axis_meta as map_axis_meta, unbox as unbox,
)
from weft.core.scope import (
    apply as apply, bind as bind, init as init, lazy_init as lazy_init, Scope as Scope,
)
from weft.core.tracing import check_trace_level as check_trace_level, current_trace as current_trace
