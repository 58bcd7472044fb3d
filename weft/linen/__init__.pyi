from jax.nn import (
    celu as celu, elu as elu, gelu as gelu, glu as glu, hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu, hard_swish as hard_swish, hard_tanh as hard_tanh,
    leaky_relu as leaky_relu, log_sigmoid as log_sigmoid, log_softmax as log_softmax,
    logsumexp as logsumexp, standardize as normalize, one_hot as one_hot, relu as relu,
    relu6 as relu6, selu as selu, sigmoid as sigmoid, silu as silu, soft_sign as soft_sign,
    softmax as softmax, softplus as softplus, standardize as standardize, swish as swish,
    tanh as tanh,
)
from weft.core.filters import DenyList as DenyList
from weft.core.frozen_dict import FrozenDict as FrozenDict
from weft.core.lift import broadcast as broadcast
from weft.core.meta import (
    get_partition_spec as get_partition_spec, get_sharding as get_sharding,
    PARTITION_NAME as PARTITION_NAME, Partitioned as Partitioned, unbox as unbox,
    with_partitioning as with_partitioning,
)
from weft.core.scope import Variable as Variable
from weft.functional import arrays as dtypes, initializers as initializers
from weft.functional.attention_mask import (
    combine_masks as combine_masks, make_attention_mask as make_attention_mask,
    make_causal_mask as make_causal_mask,
)
from weft.functional.initializers import (
    ones as ones, ones_init as ones_init, zeros as zeros, zeros_init as zeros_init,
)
from weft.functional.window_pooling import (
    avg_pool as avg_pool, max_pool as max_pool, min_pool as min_pool, pool as pool,
)
from weft.linen import partitioning as partitioning, partitioning as spmd
from weft.linen.apply import (
    apply as apply, init as init, init_with_output as init_with_output, merge_param as merge_param,
    share_scope as share_scope,
)
from weft.linen.attention import (
    dot_product_attention as dot_product_attention,
    dot_product_attention_weights as dot_product_attention_weights,
    MultiHeadAttention as MultiHeadAttention,
    MultiHeadDotProductAttention as MultiHeadDotProductAttention, SelfAttention as SelfAttention,
)
from weft.linen.autodiff import (
    custom_jvp as custom_jvp, custom_vjp as custom_vjp, grad as grad, jvp as jvp,
    value_and_grad as value_and_grad, vjp as vjp,
)
from weft.linen.transforms import (
    cond as cond, fori_loop as fori_loop, switch as switch, while_loop as while_loop,
)
from weft.linen.conv import Conv as Conv, ConvLocal as ConvLocal, ConvTranspose as ConvTranspose
from weft.linen.layers import (
    BatchApply as BatchApply, Dropout as Dropout, PReLU as PReLU, Sequential as Sequential,
)
from weft.linen.fp8_ops import (
    Fp8DirectDotGeneralOp as Fp8DirectDotGeneralOp, Fp8DotGeneral as Fp8DotGeneral,
    Fp8DotGeneralOp as Fp8DotGeneralOp, Fp8Einsum as Fp8Einsum,
    NANOOFp8DotGeneralOp as NANOOFp8DotGeneralOp,
)
from weft.linen.linear import (
    Dense as Dense, DenseGeneral as DenseGeneral, Einsum as Einsum, Embed as Embed,
)
from weft.linen.methods import (
    compact as compact, compact_name_scope as compact_name_scope, nowrap as nowrap,
)
from weft.linen.module import Module as Module
from weft.linen.normalization import (
    BatchNorm as BatchNorm, GroupNorm as GroupNorm, InstanceNorm as InstanceNorm,
    LayerNorm as LayerNorm, RMSNorm as RMSNorm, SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)
from weft.linen.partitioning import (
    get_logical_axis_rules as get_logical_axis_rules, logical_axis_rules as logical_axis_rules,
    logical_to_mesh as logical_to_mesh, logical_to_mesh_axes as logical_to_mesh_axes,
    logical_to_mesh_sharding as logical_to_mesh_sharding,
    LogicallyPartitioned as LogicallyPartitioned, set_logical_axis_rules as set_logical_axis_rules,
    with_logical_constraint as with_logical_constraint,
    with_logical_partitioning as with_logical_partitioning,
)
from weft.linen.recurrent import (
    Bidirectional as Bidirectional, ConvLSTMCell as ConvLSTMCell, GRUCell as GRUCell,
    LSTMCell as LSTMCell, MGUCell as MGUCell, OptimizedLSTMCell as OptimizedLSTMCell, RNN as RNN,
    RNNCellBase as RNNCellBase, SimpleCell as SimpleCell,
)
from weft.linen.state import (
    disable_named_call as disable_named_call, enable_named_call as enable_named_call,
    intercept_methods as intercept_methods, override_named_call as override_named_call,
)
from weft.linen.summary import tabulate as tabulate
from weft.linen.transforms import (
    add_metadata_axis as add_metadata_axis, checkify as checkify, checkpoint as checkpoint,
    fold_rngs as fold_rngs, jit as jit, map_variables as map_variables, named_call as named_call,
    pmap as pmap, remat as remat, remat_scan as remat_scan, scan as scan, shard_map as shard_map,
    vmap as vmap,
)
