"""Stateless layer math: pure functions of arrays, shared by all ways of writing a model.

Statistics and softmaxes are computed in float32; results have the dtype of the inputs.
"""

from weft.functional.activation import ACTIVATIONS, ActivationFn, get_activation_fn
from weft.functional.attention import (
    attention_context,
    attention_logits,
    attention_probs,
    cap_logits,
    dot_product_attention,
)
from weft.functional.attention_mask import (
    NEG_INF,
    MaskFn,
    and_masks,
    bool_to_bias,
    causal_mask,
    evaluate_mask,
    left_right_window_mask,
    or_masks,
    segment_mask,
    sliding_window_causal_mask,
    truncated_key_mask,
)
from weft.functional.attention_variants import (
    per_dim_scale,
    relative_to_absolute,
    sigmoid_attention_probs,
    xl_attention_logits,
)
from weft.functional.batch_axes import over_batch_axes
from weft.functional.conv import conv, conv_local, conv_transpose
from weft.functional.conv_padding import Padding, pad_conv, pad_conv_transpose
from weft.functional.conv_shape import (
    NAMED_PADDINGS,
    ConvPadding,
    compute_conv_paddings,
    compute_conv_transpose_paddings,
    conv_dilate_window,
    conv_explicit_padding,
    conv_output_shape,
    conv_padding_of_length,
    conv_transpose_explicit_padding,
    conv_transpose_output_shape,
    per_axis,
)
from weft.functional.dropout import (
    drop_tokens,
    dropout,
    get_dropout_mask,
    get_stochastic_depth_linear_rate,
    stochastic_depth,
)
from weft.functional.dtypes import canonicalize_dtype, promote_dtype
from weft.functional.embedding import (
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    as_ids,
    attend,
    lookup,
    rotary_frequencies,
    rotary_sincos,
    sincos,
    sinusoidal_positions,
)
from weft.functional.initializers import draw, fan_sizes
from weft.functional.linear import dense, dense_general, project, project_weight_axes, spread
from weft.functional.llama_rope import llama3_frequencies
from weft.functional.loss import (
    absolute_error,
    binary_cross_entropy,
    categorical_hinge_loss,
    contrastive_logits,
    contrastive_loss,
    cross_entropy,
    huber_error,
    kl_divergence,
    sigmoid_cross_entropy,
    squared_error,
    weighted_mean,
)
from weft.functional.loss_detection import focal_loss, generalized_iou
from weft.functional.loss_embedding import (
    activation_flops,
    elementwise_similarity,
    nearest_neighbor_entropy_loss,
    with_cosine_margin,
)
from weft.functional.loss_ranking import pairwise_loss, rank_pairs
from weft.functional.norm import (
    batch_norm,
    group_norm,
    l2_normalize,
    layer_norm,
    normalize_sum,
    number_of_groups,
    rms_norm,
)
from weft.functional.pooling import avg_pool, max_pool, min_pool, pool
from weft.functional.ranks import same_ndim, to_ndim
from weft.functional.sampling import (
    LogitsToLogitsFn,
    chain,
    sample_token,
    scale_by,
    top_k_logits,
    top_p_logits,
)
from weft.functional.sizes import check_sizes
from weft.functional.statistics import (
    compute_mean_square_with_segment_ids,
    moments,
    segment_mean,
    update_running_average,
)
from weft.functional.yarn import yarn_frequencies, yarn_magnitude

__all__ = [
    # batch axes
    "over_batch_axes",
    # dtypes
    "canonicalize_dtype",
    "promote_dtype",
    "same_ndim",
    "to_ndim",
    "check_sizes",
    # linear
    "dense",
    "dense_general",
    "project",
    "project_weight_axes",
    "spread",
    # activation
    "get_activation_fn",
    "ActivationFn",
    "ACTIVATIONS",
    # attention
    "dot_product_attention",
    "attention_logits",
    "cap_logits",
    "attention_probs",
    "attention_context",
    "sigmoid_attention_probs",
    "per_dim_scale",
    "relative_to_absolute",
    "xl_attention_logits",
    # attention masks
    "MaskFn",
    "NEG_INF",
    "causal_mask",
    "sliding_window_causal_mask",
    "left_right_window_mask",
    "truncated_key_mask",
    "and_masks",
    "or_masks",
    "evaluate_mask",
    "segment_mask",
    "bool_to_bias",
    # dropout
    "dropout",
    "get_dropout_mask",
    "stochastic_depth",
    "get_stochastic_depth_linear_rate",
    "drop_tokens",
    # embedding
    "lookup",
    "as_ids",
    "attend",
    "sinusoidal_positions",
    "rotary_sincos",
    "rotary_frequencies",
    "sincos",
    "apply_rotary",
    "llama3_frequencies",
    "yarn_frequencies",
    "yarn_magnitude",
    "alibi_slopes",
    "alibi_bias",
    # convolution
    "conv",
    "conv_local",
    "conv_transpose",
    "Padding",
    "pad_conv",
    "pad_conv_transpose",
    "ConvPadding",
    "NAMED_PADDINGS",
    "per_axis",
    "conv_dilate_window",
    "conv_explicit_padding",
    "conv_padding_of_length",
    "conv_output_shape",
    "conv_transpose_explicit_padding",
    "conv_transpose_output_shape",
    "compute_conv_paddings",
    "compute_conv_transpose_paddings",
    # pooling
    "max_pool",
    "min_pool",
    "avg_pool",
    "pool",
    # normalisation
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "l2_normalize",
    "normalize_sum",
    "number_of_groups",
    # statistics
    "moments",
    "segment_mean",
    "compute_mean_square_with_segment_ids",
    "update_running_average",
    # initializers (those of jax.nn.initializers too: weft.functional.initializers)
    "draw",
    "fan_sizes",
    # loss
    "cross_entropy",
    "binary_cross_entropy",
    "sigmoid_cross_entropy",
    "categorical_hinge_loss",
    "squared_error",
    "absolute_error",
    "huber_error",
    "kl_divergence",
    "weighted_mean",
    "contrastive_logits",
    "contrastive_loss",
    "focal_loss",
    "generalized_iou",
    "elementwise_similarity",
    "nearest_neighbor_entropy_loss",
    "activation_flops",
    "with_cosine_margin",
    "pairwise_loss",
    "rank_pairs",
    # sampling
    "LogitsToLogitsFn",
    "scale_by",
    "top_k_logits",
    "top_p_logits",
    "chain",
    "sample_token",
]
