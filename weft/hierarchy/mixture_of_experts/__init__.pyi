from weft.hierarchy.mixture_of_experts.feed_forward import (
    ApproximateTokenDropFreeMoE as ApproximateTokenDropFreeMoE,
    convert_dense_to_moe_parameters as convert_dense_to_moe_parameters,
    get_outer_batch_from_mesh as get_outer_batch_from_mesh, GMMBackend as GMMBackend,
    set_interpret_in_moe_config_recursively as set_interpret_in_moe_config_recursively,
    TransformerFeedForwardDropFreeMoE as TransformerFeedForwardDropFreeMoE,
    TransformerFeedForwardMoE as TransformerFeedForwardMoE,
)
from weft.hierarchy.mixture_of_experts.gating import (
    AdaptiveLoadBalanceLoss as AdaptiveLoadBalanceLoss, approx_max_k as approx_max_k,
    BaseGating as BaseGating, GateNoise as GateNoise, ScoreFn as ScoreFn, sigmoid as sigmoid,
    Top2Gating as Top2Gating, TopKBiasGating as TopKBiasGating,
    TopKDropFreeGating as TopKDropFreeGating, TopKFn as TopKFn, TopKGating as TopKGating,
)
