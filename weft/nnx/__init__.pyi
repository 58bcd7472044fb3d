from jax.nn import (
    celu as celu, elu as elu, gelu as gelu, glu as glu, hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu, hard_swish as hard_swish, hard_tanh as hard_tanh, identity as identity,
    leaky_relu as leaky_relu, log_sigmoid as log_sigmoid, log_softmax as log_softmax,
    logsumexp as logsumexp, one_hot as one_hot, relu as relu, relu6 as relu6, selu as selu,
    sigmoid as sigmoid, silu as silu, soft_sign as soft_sign, softmax as softmax,
    softplus as softplus, standardize as standardize, swish as swish, tanh as tanh,
)
from weft.functional import initializers as initializers
from weft.functional.attention_mask import (
    combine_masks as combine_masks, make_attention_mask as make_attention_mask,
    make_causal_mask as make_causal_mask,
)
from weft.functional.window_pooling import (
    avg_pool as avg_pool, max_pool as max_pool, min_pool as min_pool, pool as pool,
)
from weft import traverse_util as traversals
from weft.nnx import bridge as bridge, metrics as metrics
from weft.nnx.capture import capture as capture
from weft.nnx.containers import Dict as Dict, List as List, Sequential as Sequential
from weft.nnx.contexts import (
    current_update_context as current_update_context, from_tree as from_tree,
    merge_context as merge_context, MergeContext as MergeContext, NodeStates as NodeStates,
    prefix as prefix, split_context as split_context, SplitContext as SplitContext,
    to_tree as to_tree, update_context as update_context, UpdateContext as UpdateContext,
)
from weft.nnx.display import display as display
from weft.nnx.filters import (
    All as All, Any as Any, Everything as Everything, Not as Not, Nothing as Nothing,
    OfType as OfType, PathContains as PathContains, PathIn as PathIn, WithTag as WithTag,
)
from weft.nnx.graph import (
    call as call, find_duplicates as find_duplicates,
    GraphDef as GraphDef, recursive_map as recursive_map,
)
from weft.nnx.metrics import Metric as Metric, MultiMetric as MultiMetric
from weft.nnx.module import (
    iter_modules as iter_modules, Module as Module, view as view, view_info as view_info,
    with_attributes as with_attributes,
)
from weft.nnx.nn.attention import (
    dot_product_attention as dot_product_attention, MultiHeadAttention as MultiHeadAttention,
)
from weft.nnx.nn.conv import Conv as Conv, ConvTranspose as ConvTranspose
from weft.nnx.nn.elementwise import Dropout as Dropout, PReLU as PReLU
from weft.nnx.nn.linear import (
    Einsum as Einsum, Embed as Embed, Linear as Linear, LinearGeneral as LinearGeneral,
)
from weft.nnx.nn.lora import LoRA as LoRA, LoRALinear as LoRALinear, LoRAParam as LoRAParam
from weft.nnx.nn.normalization import (
    BatchNorm as BatchNorm, GroupNorm as GroupNorm, InstanceNorm as InstanceNorm,
    LayerNorm as LayerNorm, RMSNorm as RMSNorm, SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)
from weft.nnx.nn.recurrent import (
    Bidirectional as Bidirectional, GRUCell as GRUCell, LSTMCell as LSTMCell,
    OptimizedLSTMCell as OptimizedLSTMCell, RNN as RNN, RNNCellBase as RNNCellBase,
    SimpleCell as SimpleCell,
)
from weft.nnx.optimizer import (
    EMA as EMA, ModelAndOptimizer as ModelAndOptimizer, OptArray as OptArray, Optimizer as Optimizer,
    OptState as OptState, OptVariable as OptVariable, TrainState as TrainState,
)
from weft.nnx.pytree import (
    check_pytree as check_pytree, Data as Data, data as data, dataclass as dataclass,
    has_data as has_data, is_data as is_data,
    iter_children as iter_children, iter_graph as iter_graph,
    iter_module_children as iter_module_children, Object as Object, Pytree as Pytree,
    register_data_type as register_data_type, Static as Static, static as static,
)
from weft.nnx.refs import var_defaults as var_defaults
from weft.nnx.rngs import (
    fork_rngs as fork_rngs, reseed as reseed, restore_rngs as restore_rngs, RngCount as RngCount,
    RngKey as RngKey, Rngs as Rngs, RngState as RngState, RngStream as RngStream,
    split_rngs as split_rngs, with_rngs as with_rngs,
)
from weft.nnx.settings import (
    set_graph_mode as set_graph_mode, set_graph_updates as set_graph_updates,
)
from weft.nnx.split_merge import (
    as_abstract as as_abstract, as_pure as as_pure, clone as clone, flatten as flatten,
    graphdef as graphdef, GraphState as GraphState, map as map, merge as merge, pure as pure,
    PureState as PureState, set_metadata as set_metadata, split as split, state as state,
    unflatten as unflatten, unpack as unpack, variables as variables, vars_as as vars_as,
    with_vars as with_vars,
)
from weft.nnx.spmd import (
    abstract_with_sharding as abstract_with_sharding, get_abstract_model as get_abstract_model,
    get_named_sharding as get_named_sharding, get_partition_spec as get_partition_spec,
    logical_axis_rules as logical_axis_rules, PARTITION_NAME as PARTITION_NAME,
    use_eager_sharding as use_eager_sharding, using_eager_sharding as using_eager_sharding,
    with_partitioning as with_partitioning,
)
from weft.nnx.state import (
    filter_state as filter_state, FlatState as FlatState, from_flat_state as from_flat_state,
    map_state as map_state, merge_state as merge_state,
    replace_by_pure_dict as replace_by_pure_dict, restore_int_paths as restore_int_paths,
    split_state as split_state, State as State, to_flat_state as to_flat_state,
    to_pure_dict as to_pure_dict,
)
from weft.nnx.summary import tabulate as tabulate
from weft.nnx.transforms.autodiff import (
    grad as grad, jvp as jvp, remat as remat, value_and_grad as value_and_grad, vjp as vjp,
)
from weft.nnx.transforms.control_flow import (
    cond as cond, fori_loop as fori_loop, scan as scan, switch as switch, while_loop as while_loop,
)
from weft.nnx.transforms.custom_rules import custom_jvp as custom_jvp, custom_vjp as custom_vjp
from weft.nnx.transforms.jit import (
    cached_partial as cached_partial, checkify as checkify, eval_shape as eval_shape, jit as jit,
    jit_partial as jit_partial, JitWrapped as JitWrapped, make_jaxpr as make_jaxpr,
)
from weft.nnx.transforms.mapping import (
    pmap as pmap, shard_map as shard_map, transform_metadata as transform_metadata, vmap as vmap,
)
from weft.nnx.transforms.state_roles import (
    Carry as Carry, DiffState as DiffState, StateAxes as StateAxes, StateSharding as StateSharding,
)
from weft.nnx.update import pop as pop, update as update
from weft.nnx.variables import (
    BatchStat as BatchStat, Cache as Cache, Intermediate as Intermediate, Param as Param,
    Perturbation as Perturbation, register_variable_name as register_variable_name,
    Variable as Variable, variable_name_from_type as variable_name_from_type,
    variable_type_from_name as variable_type_from_name, VariableMetadata as VariableMetadata,
    with_metadata as with_metadata,
)
