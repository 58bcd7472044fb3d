"""Public names for mixtures of experts.

The layers (`moe_layer`, `moe_drop_free`), routing (`gating`) and upcycling of dense models
(`moe_conversion`).
"""

from weft.hierarchy.gating import (
    AdaptiveLoadBalanceLoss,
    BaseGating,
    GateNoise,
    ScoreFn,
    Top2Gating,
    TopKBiasGating,
    TopKDropFreeGating,
    TopKFn,
    TopKGating,
    approx_max_k,
    sigmoid,
)
from weft.hierarchy.moe_conversion import convert_dense_to_moe_parameters
from weft.hierarchy.moe_drop_free import (
    ApproximateTokenDropFreeMoE,
    GMMBackend,
    TransformerFeedForwardDropFreeMoE,
    set_interpret_in_moe_config_recursively,
)
from weft.hierarchy.moe_layer import TransformerFeedForwardMoE, get_outer_batch_from_mesh

__all__ = [
    "AdaptiveLoadBalanceLoss",
    "ApproximateTokenDropFreeMoE",
    "BaseGating",
    "GMMBackend",
    "GateNoise",
    "ScoreFn",
    "Top2Gating",
    "TopKBiasGating",
    "TopKDropFreeGating",
    "TopKFn",
    "TopKGating",
    "TransformerFeedForwardDropFreeMoE",
    "TransformerFeedForwardMoE",
    "approx_max_k",
    "convert_dense_to_moe_parameters",
    "get_outer_batch_from_mesh",
    "set_interpret_in_moe_config_recursively",
    "sigmoid",
]
