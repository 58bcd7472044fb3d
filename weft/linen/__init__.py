"""Linen: dataclass modules whose variables are stored in scopes.

`init` creates a module's variables and `apply` uses them. Transformations accept module classes,
methods and functions of modules. Layers declare parameters and compute with `weft.functional`.
"""

from weft.core.filters import DenyList
from weft.core.frozen_dict import FrozenDict
from weft.core.lift import broadcast
from weft.core.meta import (
    PARTITION_NAME,
    Partitioned,
    get_partition_spec,
    get_sharding,
    unbox,
    with_partitioning,
)
from weft.core.variable import Variable
from weft.linen import dtypes, initializers, partitioning, spmd
from weft.linen.activation import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    normalize,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from weft.linen.attention import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    SelfAttention,
    combine_masks,
    dot_product_attention,
    dot_product_attention_weights,
    make_attention_mask,
    make_causal_mask,
)
from weft.linen.autodiff import custom_jvp, custom_vjp, grad, jvp, value_and_grad, vjp
from weft.linen.batch_norm import BatchNorm
from weft.linen.calls import apply, init, init_with_output, merge_param, share_scope
from weft.linen.cells import GRUCell, MGUCell, RNNCellBase, SimpleCell
from weft.linen.containers import BatchApply, Sequential
from weft.linen.control_flow import cond, fori_loop, switch, while_loop
from weft.linen.conv import Conv, ConvLocal
from weft.linen.conv_transpose import ConvTranspose
from weft.linen.embed import Embed
from weft.linen.initializers import ones, ones_init, zeros, zeros_init
from weft.linen.linear import Dense, DenseGeneral, Einsum
from weft.linen.lstm import ConvLSTMCell, LSTMCell, OptimizedLSTMCell
from weft.linen.methods import compact, compact_name_scope, nowrap
from weft.linen.module import Module
from weft.linen.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from weft.linen.pooling import avg_pool, max_pool, min_pool, pool
from weft.linen.rnn import RNN, Bidirectional
from weft.linen.running import (
    disable_named_call,
    enable_named_call,
    intercept_methods,
    override_named_call,
)
from weft.linen.spmd import (
    LogicallyPartitioned,
    get_logical_axis_rules,
    logical_axis_rules,
    logical_to_mesh,
    logical_to_mesh_axes,
    logical_to_mesh_sharding,
    set_logical_axis_rules,
    with_logical_constraint,
    with_logical_partitioning,
)
from weft.linen.stochastic import Dropout
from weft.linen.summary import tabulate
from weft.linen.transforms import (
    add_metadata_axis,
    checkify,
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
from weft.linen.weight_norms import SpectralNorm, WeightNorm

__all__ = [
    # modules
    "Module",
    "compact",
    "compact_name_scope",
    "nowrap",
    "apply",
    "init",
    "init_with_output",
    "share_scope",
    "merge_param",
    "intercept_methods",
    "enable_named_call",
    "disable_named_call",
    "override_named_call",
    "tabulate",
    # transformations of classes, methods and functions
    "vmap",
    "pmap",
    "shard_map",
    "scan",
    "remat_scan",
    "remat",
    "checkify",
    "checkpoint",
    "jit",
    "fold_rngs",
    "map_variables",
    "add_metadata_axis",
    "named_call",
    # transformations that are called with a module
    "cond",
    "switch",
    "while_loop",
    "fori_loop",
    "grad",
    "value_and_grad",
    "vjp",
    "jvp",
    "custom_vjp",
    "custom_jvp",
    # linear maps and embeddings
    "Dense",
    "DenseGeneral",
    "Einsum",
    "Embed",
    # convolutions and pooling
    "Conv",
    "ConvLocal",
    "ConvTranspose",
    "avg_pool",
    "max_pool",
    "min_pool",
    "pool",
    # norms
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "SpectralNorm",
    "WeightNorm",
    # attention
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "SelfAttention",
    "combine_masks",
    "dot_product_attention",
    "dot_product_attention_weights",
    "make_attention_mask",
    "make_causal_mask",
    # recurrence
    "ConvLSTMCell",
    "LSTMCell",
    "OptimizedLSTMCell",
    "GRUCell",
    "MGUCell",
    "RNNCellBase",
    "SimpleCell",
    "RNN",
    "Bidirectional",
    # randomness
    "Dropout",
    # containers
    "BatchApply",
    "Sequential",
    # activations
    "PReLU",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "normalize",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
    # sharding
    "LogicallyPartitioned",
    "get_logical_axis_rules",
    "logical_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "logical_to_mesh_sharding",
    "set_logical_axis_rules",
    "with_logical_constraint",
    "with_logical_partitioning",
    # scopes, variables and filters
    "DenyList",
    "FrozenDict",
    "broadcast",
    "Variable",
    # metadata
    "PARTITION_NAME",
    "Partitioned",
    "get_partition_spec",
    "get_sharding",
    "unbox",
    "with_partitioning",
    # initializers
    "initializers",
    "ones",
    "ones_init",
    "zeros",
    "zeros_init",
    # modules of functions
    "dtypes",
    "partitioning",
    "spmd",
]
