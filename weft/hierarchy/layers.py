"""Common layers in one namespace; each family has its own file.

See `weft.hierarchy.attention` for attention and transformers.
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
from weft.hierarchy.classification import (
    BaseClassificationHead,
    BaseClassificationMetric,
    BinaryClassificationMetric,
    CategoricalHingeLossMetric,
    ClassificationMetric,
)
from weft.hierarchy.config_setters import (
    set_bias_recursively,
    set_dropout_rate_recursively,
    set_layer_norm_eps_recursively,
    set_norm_recursively,
)
from weft.hierarchy.convolution import (
    Conv1D,
    Conv2D,
    Conv2DTranspose,
    Conv2DWith1DPadding,
    Conv3D,
    ConvPaddingType,
)
from weft.hierarchy.dropout import Dropout, DropToken, StochasticDepth
from weft.hierarchy.embedding import Embedding, SeparableSpaceTimePositionalEmbedding
from weft.hierarchy.linear import Linear, MultiLinear, UnitNormLinear, VariationalNoise
from weft.hierarchy.modality_embedding import ModalityEmbedding, ModalityVocabInfo
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
from weft.hierarchy.pooling import MaxPool2D, SqueezeExcitation
from weft.hierarchy.shared import RedirectToSharedModule
from weft.hierarchy.text_embedding import BaseEmbedding, TransformerTextEmbeddings

__all__ = [
    # Linear maps.
    "Linear",
    "MultiLinear",
    "UnitNormLinear",
    "VariationalNoise",
    # Convolutions; all of them are in weft.hierarchy.convolution.
    "Conv1D",
    "Conv2D",
    "Conv2DTranspose",
    "Conv2DWith1DPadding",
    "Conv3D",
    "ConvPaddingType",
    "MaxPool2D",
    "SqueezeExcitation",
    # Embeddings.
    "BaseEmbedding",
    "Embedding",
    "ModalityEmbedding",
    "ModalityVocabInfo",
    "SeparableSpaceTimePositionalEmbedding",
    "TransformerTextEmbeddings",
    # Normalization.
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
    # Dropout.
    "DropToken",
    "Dropout",
    "StochasticDepth",
    "dropout",
    "get_dropout_mask",
    "get_stochastic_depth_linear_rate",
    # Setters for all layers of a config.
    "set_bias_recursively",
    "set_dropout_rate_recursively",
    "set_layer_norm_eps_recursively",
    "set_norm_recursively",
    # Classification.
    "BaseClassificationHead",
    "BaseClassificationMetric",
    "BinaryClassificationMetric",
    "CategoricalHingeLossMetric",
    "ClassificationMetric",
    # Replacement of layers.
    "RedirectToSharedModule",
    # Setters.
    # Activations.
    "get_activation_fn",
]
