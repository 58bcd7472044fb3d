from weft.functional.activation import (
    ActivationFn as ActivationFn, ACTIVATIONS as ACTIVATIONS,
    get_activation_fn as get_activation_fn,
)
from weft.functional.arrays import (
    canonicalize_dtype as canonicalize_dtype, cast_floats as cast_floats,
    check_sizes as check_sizes, over_batch_axes as over_batch_axes, promote_dtype as promote_dtype,
    same_ndim as same_ndim, stochastic_round as stochastic_round, to_ndim as to_ndim,
)
from weft.functional.attention import (
    attention_context as attention_context, attention_logits as attention_logits,
    attention_probs as attention_probs, cap_logits as cap_logits,
    dot_product_attention as dot_product_attention, per_dim_scale as per_dim_scale,
    relative_to_absolute as relative_to_absolute,
    sigmoid_attention_probs as sigmoid_attention_probs, xl_attention_logits as xl_attention_logits,
)
from weft.functional.attention_mask import (
    and_masks as and_masks, AttentionMask as AttentionMask, bool_to_bias as bool_to_bias,
    causal_mask as causal_mask,
    evaluate_mask as evaluate_mask, left_right_window_mask as left_right_window_mask,
    MaskFn as MaskFn, NEG_INF as NEG_INF, or_masks as or_masks, segment_mask as segment_mask,
    sliding_window_causal_mask as sliding_window_causal_mask,
    truncated_key_mask as truncated_key_mask,
)
from weft.functional.context_parallelism import (
    all_to_all_attention as all_to_all_attention, ContextParallelism as ContextParallelism,
    ring_attention as ring_attention,
)
from weft.functional.conv import (
    avg_pool as avg_pool, conv as conv, conv_local as conv_local, conv_transpose as conv_transpose,
    max_pool as max_pool, min_pool as min_pool, pool as pool,
)
from weft.functional.conv_shape import (
    compute_conv_paddings as compute_conv_paddings,
    compute_conv_transpose_paddings as compute_conv_transpose_paddings,
    conv_dilate_window as conv_dilate_window, conv_explicit_padding as conv_explicit_padding,
    conv_output_shape as conv_output_shape,
    conv_transpose_explicit_padding as conv_transpose_explicit_padding,
    conv_transpose_output_shape as conv_transpose_output_shape, ConvPadding as ConvPadding,
    lax_conv_padding as lax_conv_padding, NAMED_PADDINGS as NAMED_PADDINGS, pad_conv as pad_conv,
    pad_conv_transpose as pad_conv_transpose, Padding as Padding, per_axis as per_axis,
)
from weft.functional.dropout import (
    drop_tokens as drop_tokens, dropout as dropout, get_dropout_mask as get_dropout_mask,
    get_stochastic_depth_linear_rate as get_stochastic_depth_linear_rate,
    stochastic_depth as stochastic_depth,
)
from weft.functional.embedding import (
    alibi_bias as alibi_bias, alibi_slopes as alibi_slopes, apply_rotary as apply_rotary,
    as_ids as as_ids, attend as attend, code_shares as code_shares,
    codebook_entries as codebook_entries, compute_code_coverage as compute_code_coverage,
    compute_code_pplx as compute_code_pplx, llama3_frequencies as llama3_frequencies,
    lookup as lookup, nearest_codes as nearest_codes,
    relative_position_buckets as relative_position_buckets, rotary_frequencies as rotary_frequencies,
    rotary_sincos as rotary_sincos, sincos as sincos, sinusoidal_positions as sinusoidal_positions,
    yarn_frequencies as yarn_frequencies, yarn_magnitude as yarn_magnitude,
)
from weft.functional.fused_attention import AttentionImplementation as AttentionImplementation
from weft.functional.grouped_matmul import grouped_matmul as grouped_matmul
from weft.functional.initializers import draw as draw, fan_sizes as fan_sizes
from weft.functional.int8_weight import (
    int8_lookup as int8_lookup, int8_product as int8_product, int8_weight as int8_weight,
    Int8Weight as Int8Weight,
)
from weft.functional.linear import (
    broadcast_bias as broadcast_bias, default_dot_general as default_dot_general, dense as dense,
    dense_general as dense_general, project as project, project_weight_axes as project_weight_axes,
)
from weft.functional.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from weft.functional.loss import (
    absolute_error as absolute_error, activation_flops as activation_flops,
    binary_cross_entropy as binary_cross_entropy, categorical_hinge_loss as categorical_hinge_loss,
    contrastive_logits as contrastive_logits, contrastive_loss as contrastive_loss,
    cross_entropy as cross_entropy, elementwise_similarity as elementwise_similarity,
    focal_loss as focal_loss, generalized_iou as generalized_iou, huber_error as huber_error,
    kl_divergence as kl_divergence, nearest_neighbor_entropy_loss as nearest_neighbor_entropy_loss,
    pairwise_loss as pairwise_loss, rank_pairs as rank_pairs,
    sigmoid_cross_entropy as sigmoid_cross_entropy, squared_error as squared_error,
    weighted_mean as weighted_mean, with_cosine_margin as with_cosine_margin,
)
from weft.functional.metrics import (
    accuracy_at_k as accuracy_at_k, average_precision_at_k as average_precision_at_k,
    average_rank as average_rank, confusion_matrix as confusion_matrix,
    matthews_corrcoef as matthews_corrcoef, ndcg_at_k as ndcg_at_k,
    pearson_correlation as pearson_correlation,
    precision_recall_f_score as precision_recall_f_score, roc_auc_score as roc_auc_score,
    spearman_correlation as spearman_correlation,
)
from weft.functional.norm import (
    batch_norm as batch_norm, centered_rms_norm as centered_rms_norm, group_norm as group_norm,
    l2_normalize as l2_normalize, layer_norm as layer_norm, normalize_sum as normalize_sum,
    number_of_groups as number_of_groups, rms_norm as rms_norm,
)
from weft.functional.preferences import (
    answer_log_probs as answer_log_probs, dpo_loss as dpo_loss,
    group_advantages as group_advantages, grpo_loss as grpo_loss, ipo_loss as ipo_loss,
    preference_margins as preference_margins, reference_divergences as reference_divergences,
)
from weft.functional.quantized_product import (
    fp8_dot_general as fp8_dot_general, int8_dot_general as int8_dot_general,
)
from weft.functional.quantized_weight import (
    can_quantize as can_quantize, dequantize_weight as dequantize_weight,
    dequantized_shape as dequantized_shape, quantize_weight as quantize_weight,
    QuantizedWeight as QuantizedWeight, WEIGHT_FORMATS as WEIGHT_FORMATS,
    WeightFormat as WeightFormat,
)
from weft.functional.sampling import (
    chain as chain, draw_tokens as draw_tokens, EXCLUDED_LOGIT as EXCLUDED_LOGIT,
    LogitsToLogitsFn as LogitsToLogitsFn, min_p_logits as min_p_logits,
    penalize_repetition as penalize_repetition, sample_token as sample_token, scale_by as scale_by, top_k_logits as top_k_logits,
    top_p_logits as top_p_logits,
)
from weft.functional.statistics import (
    compute_mean_square_with_segment_ids as compute_mean_square_with_segment_ids,
    moments as moments, segment_mean as segment_mean,
    update_running_average as update_running_average,
)
