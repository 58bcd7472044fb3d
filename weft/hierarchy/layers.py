"""The layers that models are made of, in one place; each family has a file of its own.

Attention and what is built on it are in `weft.hierarchy.attention`.
"""

from weft.functional import (
    compute_mean_square_with_segment_ids,
    dropout,
    get_activation_fn,
    get_dropout_mask,
    get_stochastic_depth_linear_rate,
    l2_normalize,
    normalize_sum,
)
from weft.hierarchy.dropout import Dropout, DropToken, StochasticDepth
from weft.hierarchy.embedding import Embedding, SeparableSpaceTimePositionalEmbedding
from weft.hierarchy.linear import Linear, MultiLinear, UnitNormLinear, VariationalNoise
from weft.hierarchy.normalization import (
    BaseNormalizationLayer,
    BatchNorm,
    GroupNorm,
    L2Norm,
    LayerNorm,
    LayerNormStateless,
    MovingAverage,
    NormType,
    RMSNorm,
    RMSNormStateless,
)

__all__ = [
    # Linear maps.
    "Linear",
    "MultiLinear",
    "UnitNormLinear",
    "VariationalNoise",
    # Embeddings.
    "Embedding",
    "SeparableSpaceTimePositionalEmbedding",
    # Normalisation.
    "BaseNormalizationLayer",
    "BatchNorm",
    "GroupNorm",
    "L2Norm",
    "LayerNorm",
    "LayerNormStateless",
    "MovingAverage",
    "NormType",
    "RMSNorm",
    "RMSNormStateless",
    "compute_mean_square_with_segment_ids",
    "l2_normalize",
    "normalize_sum",
    # Dropping things.
    "DropToken",
    "Dropout",
    "StochasticDepth",
    "dropout",
    "get_dropout_mask",
    "get_stochastic_depth_linear_rate",
    # Activations.
    "get_activation_fn",
]
