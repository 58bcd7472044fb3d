from weft.functional.attention import relative_to_absolute as rel_pos_to_abs_pos
from weft.functional.attention_mask import (
    causal_mask as causal_mask, NEG_INF as NEG_INF,
    sliding_window_causal_mask as sliding_window_causal_mask,
)
from weft.functional.embedding import sinusoidal_positions as sinusoidal_positional_embeddings
from weft.hierarchy.attention.bias import (
    alibi_get_slopes as alibi_get_slopes,
    ALiBiAttentionLogitBiasLayer as ALiBiAttentionLogitBiasLayer,
    apply_attention_logit_biases as apply_attention_logit_biases,
    as_attention_bias as as_attention_bias, AttentionLogitBiasLayer as AttentionLogitBiasLayer,
    BaseAttentionBias as BaseAttentionBias, BiasAndResidual as BiasAndResidual,
    BoolAttentionBias as BoolAttentionBias, BoolTensorAttentionBias as BoolTensorAttentionBias,
    CausalAttentionBias as CausalAttentionBias,
    CausalAttentionLogitBiasLayer as CausalAttentionLogitBiasLayer,
    CompositeAttentionBias as CompositeAttentionBias,
    compute_padding_biases as compute_padding_biases,
    FullAttentionLogitBiasLayer as FullAttentionLogitBiasLayer,
    LeftRightWindowAttentionBias as LeftRightWindowAttentionBias,
    make_causal_biases as make_causal_biases, make_segment_mask as make_segment_mask,
    make_sliding_window_causal_biases as make_sliding_window_causal_biases,
    MaskFnAttentionBias as MaskFnAttentionBias, SegmentIdAttentionBias as SegmentIdAttentionBias,
    RelativePositionAttentionLogitBiasLayer as RelativePositionAttentionLogitBiasLayer,
    SlidingWindowAttentionBias as SlidingWindowAttentionBias,
    SymmetricALiBiAttentionLogitBiasLayer as SymmetricALiBiAttentionLogitBiasLayer,
    TensorAttentionBias as TensorAttentionBias, ZeroAttentionBias as ZeroAttentionBias,
)
from weft.hierarchy.attention.feed_forward import (
    NormPosition as NormPosition, ResidualLayer as ResidualLayer,
    scaled_hidden_dim as scaled_hidden_dim,
    TransformerFeedForwardLayer as TransformerFeedForwardLayer,
)
from weft.hierarchy.attention.kv_cache import (
    BaseKVCache as BaseKVCache, KVCache as KVCache, KVPages as KVPages, KVState as KVState,
    KVRing as KVRing, PagedKVCache as PagedKVCache, RingKVCache as RingKVCache,
    SlidingWindowKVCache as SlidingWindowKVCache,
)
from weft.hierarchy.attention.multihead_attention import (
    compute_gqa_context as compute_gqa_context, compute_gqa_logits as compute_gqa_logits,
    ForwardMode as ForwardMode, GroupedQueryAttention as GroupedQueryAttention,
    MultiheadAttention as MultiheadAttention, MultiheadAttentionXL as MultiheadAttentionXL,
    MultiheadRelativePositionLinear as MultiheadRelativePositionLinear,
    sigmoid_with_biases as sigmoid_with_biases, SigmoidAttention as SigmoidAttention,
    softmax_with_biases as softmax_with_biases, xl_attention_logits as xl_attention_logits,
)
from weft.hierarchy.attention.qkv_linear import (
    BaseMultiheadLinear as BaseMultiheadLinear, BaseQKVLinear as BaseQKVLinear,
    BaseScaleQK as BaseScaleQK, constant_scale_fn as constant_scale_fn,
    FusedGroupedQKVLinear as FusedGroupedQKVLinear, FusedQKVLinear as FusedQKVLinear,
    GroupedQKVLinear as GroupedQKVLinear, MultiheadInputLinear as MultiheadInputLinear,
    MultiheadOutputLinear as MultiheadOutputLinear, PerDimScale as PerDimScale,
    pow_scale_fn as pow_scale_fn, QKVLinear as QKVLinear, QLinear as QLinear, ScaleFn as ScaleFn,
    ScaleKey as ScaleKey, ScaleQuery as ScaleQuery,
)
from weft.hierarchy.attention.rope import (
    DynamicNTKSinusoidalPositionalEmbedding as DynamicNTKSinusoidalPositionalEmbedding,
    apply_rotary_position_embeddings as apply_rotary_position_embeddings,
    Llama3SinusoidalPositionalEmbedding as Llama3SinusoidalPositionalEmbedding,
    LongRoPESinusoidalPositionalEmbedding as LongRoPESinusoidalPositionalEmbedding,
    RoFormerQKVLinear as RoFormerQKVLinear,
    RoFormerSinusoidalPositionalEmbedding as RoFormerSinusoidalPositionalEmbedding,
    YaRNSinusoidalPositionalEmbedding as YaRNSinusoidalPositionalEmbedding,
)
from weft.hierarchy.attention.stack import (
    BaseStackedTransformerLayer as BaseStackedTransformerLayer,
    build_remat_spec as build_remat_spec, PipelinedTransformerLayer as PipelinedTransformerLayer,
    RematRegexSavePatterns as RematRegexSavePatterns,
    RepeatedTransformerLayer as RepeatedTransformerLayer,
    save_and_offload_these_names_regex as save_and_offload_these_names_regex,
    StackedTransformerLayer as StackedTransformerLayer,
    update_data_with_skip_connection as update_data_with_skip_connection,
    UpdateDataFn as UpdateDataFn,
)
from weft.hierarchy.attention.transformer import (
    BaseTransformerLayer as BaseTransformerLayer,
    BottleNeckAdapterTransformerLayer as BottleNeckAdapterTransformerLayer,
    ParallelTransformerLayer as ParallelTransformerLayer,
    TransformerAttentionLayer as TransformerAttentionLayer, TransformerLayer as TransformerLayer,
)
from weft.hierarchy.config_setters import (
    set_attention_partition_specs as set_attention_partition_specs,
    set_double_shard_weights_config as set_double_shard_weights_config,
    set_feed_forward_partition_specs as set_feed_forward_partition_specs,
)
from weft.hierarchy.layers.embedding import (
    LearnedPositionalEmbedding as LearnedPositionalEmbedding,
    SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding,
)
