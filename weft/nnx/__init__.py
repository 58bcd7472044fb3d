"""NNX: objects whose variables are held by reference, and transformations that preserve references.

A module is a Python object with variables and modules as attributes. To JAX it is a pytree; the
transformations here, with the signatures of JAX's, propagate changes of a module to the caller.

Outside transformations, `graph` arguments are ignored: references are always kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.nnx import metrics
from weft.nnx.capturing import capture
from weft.nnx.checks import check_pytree
from weft.nnx.containers import Dict, List, Sequential
from weft.nnx.contexts import (
    MergeContext,
    SplitContext,
    UpdateContext,
    current_update_context,
    merge_context,
    split_context,
    update_context,
)
from weft.nnx.display import display
from weft.nnx.ema import EMA
from weft.nnx.filters import (
    All,
    Any,
    Everything,
    Not,
    Nothing,
    OfType,
    PathContains,
    PathIn,
    WithTag,
)
from weft.nnx.graph import (
    GraphDef,
    find_duplicates,
    iter_children,
    iter_graph,
    iter_module_children,
    recursive_map,
)
from weft.nnx.graph_state import GraphState
from weft.nnx.holding import vars_as, with_vars
from weft.nnx.initial_metadata import VariableMetadata, with_metadata
from weft.nnx.kinds import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)
from weft.nnx.metrics import Metric, MultiMetric
from weft.nnx.module import Module, iter_modules, view, view_info, with_attributes
from weft.nnx.nn import initializers
from weft.nnx.nn.activations import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
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
from weft.nnx.nn.attention import (
    MultiHeadAttention,
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
)
from weft.nnx.nn.batch_norm import BatchNorm
from weft.nnx.nn.cells import GRUCell, RNNCellBase, SimpleCell
from weft.nnx.nn.conv import Conv
from weft.nnx.nn.conv_transpose import ConvTranspose
from weft.nnx.nn.einsum import Einsum
from weft.nnx.nn.embed import Embed
from weft.nnx.nn.linear import Linear, LinearGeneral
from weft.nnx.nn.lora import LoRA, LoRALinear, LoRAParam
from weft.nnx.nn.lstm import LSTMCell, OptimizedLSTMCell
from weft.nnx.nn.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from weft.nnx.nn.pooling import avg_pool, max_pool, min_pool, pool
from weft.nnx.nn.recurrent import RNN, Bidirectional
from weft.nnx.nn.stochastic import Dropout
from weft.nnx.nn.weight_norms import SpectralNorm, WeightNorm
from weft.nnx.node_states import NodeStates, from_tree, to_tree
from weft.nnx.optimizer import ModelAndOptimizer, OptArray, Optimizer, OptState, OptVariable
from weft.nnx.prefixes import prefix
from weft.nnx.pytree import (
    Data,
    Pytree,
    Static,
    data,
    dataclass,
    has_data,
    is_data,
    register_data_type,
    static,
)
from weft.nnx.references import var_defaults
from weft.nnx.rngs import (
    RngCount,
    RngKey,
    Rngs,
    RngState,
    RngStream,
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from weft.nnx.splitting import (
    as_abstract,
    as_pure,
    call,
    clone,
    flatten,
    graphdef,
    map,
    merge,
    pure,
    set_metadata,
    split,
    state,
    unflatten,
    unpack,
    variables,
)
from weft.nnx.spmd import (
    PARTITION_NAME,
    abstract_with_sharding,
    get_abstract_model,
    get_named_sharding,
    get_partition_spec,
    logical_axis_rules,
    use_eager_sharding,
    using_eager_sharding,
    with_partitioning,
)
from weft.nnx.state import (
    FlatState,
    State,
    filter_state,
    from_flat_state,
    map_state,
    merge_state,
    replace_by_pure_dict,
    restore_int_paths,
    split_state,
    to_flat_state,
    to_pure_dict,
)
from weft.nnx.summary import tabulate
from weft.nnx.train_state import TrainState
from weft.nnx.transforms.abstract import checkify, eval_shape, make_jaxpr
from weft.nnx.transforms.autodiff import grad, jvp, value_and_grad, vjp
from weft.nnx.transforms.branches import cond, switch
from weft.nnx.transforms.custom_rules import custom_jvp, custom_vjp
from weft.nnx.transforms.jit import JitWrapped, cached_partial, jit, jit_partial
from weft.nnx.transforms.loops import fori_loop, while_loop
from weft.nnx.transforms.mapping import pmap, shard_map, vmap
from weft.nnx.transforms.metadata import transform_metadata
from weft.nnx.transforms.modes import set_graph_mode, set_graph_updates
from weft.nnx.transforms.remat import remat
from weft.nnx.transforms.scan import scan
from weft.nnx.transforms.symbols import Carry, DiffState, StateAxes, StateSharding
from weft.nnx.updating import pop, update
from weft.nnx.variables import Variable

__all__ = [
    # objects
    "Module",
    "iter_modules",
    "with_attributes",
    "view",
    "view_info",
    "Data",
    "Static",
    "data",
    "static",
    "register_data_type",
    "is_data",
    "has_data",
    "dataclass",
    "Pytree",
    "List",
    "Dict",
    "Sequential",
    "check_pytree",
    # variables
    "Variable",
    "register_variable_name",
    "variable_type_from_name",
    "variable_name_from_type",
    "Param",
    "BatchStat",
    "Cache",
    "Intermediate",
    "Perturbation",
    "VariableMetadata",
    "with_metadata",
    "var_defaults",
    "vars_as",
    "with_vars",
    # PRNG streams
    "RngState",
    "RngKey",
    "RngCount",
    "RngStream",
    "Rngs",
    "restore_rngs",
    "split_rngs",
    "fork_rngs",
    "reseed",
    "with_rngs",
    # graphs, descriptions and states
    "GraphDef",
    "iter_graph",
    "iter_children",
    "iter_module_children",
    "find_duplicates",
    "recursive_map",
    "GraphState",
    "split",
    "merge",
    "unpack",
    "state",
    "variables",
    "graphdef",
    "clone",
    "call",
    "map",
    "pure",
    "as_pure",
    "flatten",
    "unflatten",
    "as_abstract",
    "set_metadata",
    "update",
    "pop",
    "State",
    "FlatState",
    "to_flat_state",
    "from_flat_state",
    "split_state",
    "filter_state",
    "merge_state",
    "map_state",
    "to_pure_dict",
    "replace_by_pure_dict",
    "restore_int_paths",
    "SplitContext",
    "MergeContext",
    "UpdateContext",
    "update_context",
    "current_update_context",
    "split_context",
    "merge_context",
    "NodeStates",
    "to_tree",
    "from_tree",
    "prefix",
    "OfType",
    "WithTag",
    "PathIn",
    "PathContains",
    "Everything",
    "Nothing",
    "Any",
    "All",
    "Not",
    # transformations
    "eval_shape",
    "make_jaxpr",
    "checkify",
    "value_and_grad",
    "grad",
    "vjp",
    "jvp",
    "cond",
    "switch",
    "custom_vjp",
    "custom_jvp",
    "JitWrapped",
    "jit",
    "jit_partial",
    "cached_partial",
    "while_loop",
    "fori_loop",
    "vmap",
    "pmap",
    "shard_map",
    "transform_metadata",
    "set_graph_mode",
    "set_graph_updates",
    "remat",
    "scan",
    "Carry",
    "StateAxes",
    "StateSharding",
    "DiffState",
    # layers
    "PReLU",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
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
    "MultiHeadAttention",
    "combine_masks",
    "dot_product_attention",
    "make_attention_mask",
    "make_causal_mask",
    "BatchNorm",
    "GRUCell",
    "RNNCellBase",
    "SimpleCell",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Embed",
    "Linear",
    "LinearGeneral",
    "LoRA",
    "LoRALinear",
    "LoRAParam",
    "LSTMCell",
    "OptimizedLSTMCell",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "avg_pool",
    "max_pool",
    "min_pool",
    "pool",
    "RNN",
    "Bidirectional",
    "Dropout",
    "SpectralNorm",
    "WeightNorm",
    # optimizers and metrics
    "OptState",
    "OptArray",
    "OptVariable",
    "Optimizer",
    "ModelAndOptimizer",
    "EMA",
    "Metric",
    "MultiMetric",
    "TrainState",
    # layouts over devices
    "PARTITION_NAME",
    "abstract_with_sharding",
    "get_abstract_model",
    "get_named_sharding",
    "get_partition_spec",
    "logical_axis_rules",
    "use_eager_sharding",
    "using_eager_sharding",
    "with_partitioning",
    # tables and text
    "tabulate",
    "capture",
    "display",
    # submodules
    "initializers",
    "metrics",
    "traversals",
]


if TYPE_CHECKING:
    import weft.nnx.traversals as traversals


def __getattr__(name: str) -> object:
    # Loaded on demand: the bridge imports all of Weft's interfaces, and traversals are rarely used.
    if name == "bridge":
        import weft.nnx.bridge as bridge

        return bridge
    if name == "traversals":
        import weft.nnx.traversals as traversals

        return traversals
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
