from weft.interop.bridge import (
    AttrPriority as AttrPriority, compact as compact, current_context as current_context,
    current_module as current_module, linen_in_bridge_mdl as linen_in_bridge_mdl, Module as Module,
    nnx_in_bridge_mdl as nnx_in_bridge_mdl, Scope as Scope,
)
from weft.interop.nnx import lazy_init as lazy_init, ToNNX as ToNNX
from weft.interop.nnx_functional import (
    Functional as Functional, functional as functional, to_linen as to_linen, ToLinen as ToLinen,
)
from weft.interop.variables import (
    NNXMeta as NNXMeta, to_linen_var as to_linen_var, to_nnx_var as to_nnx_var,
    with_partitioning as with_partitioning,
)
