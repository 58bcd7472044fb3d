from weft.functional.activation import get_activation_fn as get_activation_fn
from weft.functional.dropout import (
    dropout as dropout, get_dropout_mask as get_dropout_mask,
    get_stochastic_depth_linear_rate as get_stochastic_depth_linear_rate,
)
from weft.functional.embedding import sinusoidal_positions as sinusoidal_positional_embeddings
from weft.functional.norm import l2_normalize as l2_normalize, normalize_sum as normalize_sum
from weft.functional.statistics import (
    compute_mean_square_with_segment_ids as compute_mean_square_with_segment_ids,
)
from weft.hierarchy.base_layer import RedirectToSharedModule as RedirectToSharedModule
from weft.hierarchy.config_setters import (
    set_bias_recursively as set_bias_recursively,
    set_dropout_rate_recursively as set_dropout_rate_recursively,
    set_layer_norm_eps_recursively as set_layer_norm_eps_recursively,
    set_norm_recursively as set_norm_recursively,
)
from weft.hierarchy.convolution import (
    Conv1D as Conv1D, Conv2D as Conv2D, Conv2DTranspose as Conv2DTranspose,
    Conv2DWith1DPadding as Conv2DWith1DPadding, Conv3D as Conv3D,
    ConvPaddingType as ConvPaddingType, MaxPool2D as MaxPool2D,
    SqueezeExcitation as SqueezeExcitation,
)
from weft.hierarchy.layers.classification import (
    BaseClassificationHead as BaseClassificationHead,
    BaseClassificationMetric as BaseClassificationMetric,
    BinaryClassificationMetric as BinaryClassificationMetric,
    CategoricalHingeLossMetric as CategoricalHingeLossMetric,
    ClassificationMetric as ClassificationMetric,
)
from weft.hierarchy.layers.embedding import (
    BaseEmbedding as BaseEmbedding, Embedding as Embedding,
    LearnedPositionalEmbedding as LearnedPositionalEmbedding,
    ModalityEmbedding as ModalityEmbedding, ModalityVocabInfo as ModalityVocabInfo,
    SeparableSpaceTimePositionalEmbedding as SeparableSpaceTimePositionalEmbedding,
    SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding,
    TransformerTextEmbeddings as TransformerTextEmbeddings,
)
from weft.hierarchy.layers.linear import (
    Dropout as Dropout, DropToken as DropToken, GradientMonitor as GradientMonitor,
    Linear as Linear, MultiLinear as MultiLinear, StochasticDepth as StochasticDepth,
    UnitNormLinear as UnitNormLinear, VariationalNoise as VariationalNoise,
)
from weft.hierarchy.layers.normalization import (
    BaseNormalizationLayer as BaseNormalizationLayer, BatchNorm as BatchNorm,
    GroupNorm as GroupNorm, L2Norm as L2Norm, LayerNorm as LayerNorm,
    LayerNormStateless as LayerNormStateless, MovingAverage as MovingAverage, NormType as NormType,
    MultiheadRMSNorm as MultiheadRMSNorm,
    RMSNorm as RMSNorm, RMSNormStateless as RMSNormStateless,
)
