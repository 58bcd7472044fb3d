"""Attention and transformers in one namespace; each family has its own file.

From the inside out: projections (`qkv_linear`, `rope`), scales (`scale_qk`), biases
(`attention_bias`, `attention_logit_bias`), caches (`kv_cache`), attention (`multihead_attention`,
`multihead_attention_xl`), residual branches (`residual`), the feed-forward layer (`feed_forward`),
layers (`transformer`), stacks (`stack`, `pipelined_stack`), rematerialization (`remat`) and
sharding (`attention_sharding`).
"""

from weft.functional import relative_to_absolute as rel_pos_to_abs_pos
from weft.hierarchy.attention_bias import (
    NEG_INF,
    BaseAttentionBias,
    CausalAttentionBias,
    CompositeAttentionBias,
    MaskFnAttentionBias,
    SegmentIdAttentionBias,
    SlidingWindowAttentionBias,
    TensorAttentionBias,
    ZeroAttentionBias,
    as_attention_bias,
    causal_mask,
    make_causal_biases,
    make_segment_mask,
    make_sliding_window_causal_biases,
    sliding_window_causal_mask,
)
from weft.hierarchy.attention_logit_bias import (
    ALiBiAttentionLogitBiasLayer,
    AttentionLogitBiasLayer,
    CausalAttentionLogitBiasLayer,
    FullAttentionLogitBiasLayer,
    SymmetricALiBiAttentionLogitBiasLayer,
    alibi_get_slopes,
    apply_attention_logit_biases,
    compute_padding_biases,
)
from weft.hierarchy.attention_sharding import (
    set_attention_partition_specs,
    set_double_shard_weights_config,
    set_feed_forward_partition_specs,
)
from weft.hierarchy.feed_forward import TransformerFeedForwardLayer, scaled_hidden_dim
from weft.hierarchy.kv_cache import BaseKVCache, KVCache, KVState
from weft.hierarchy.multihead_attention import (
    ForwardMode,
    GroupedQueryAttention,
    MultiheadAttention,
    SigmoidAttention,
    compute_gqa_context,
    compute_gqa_logits,
    sigmoid_with_biases,
    softmax_with_biases,
)
from weft.hierarchy.multihead_attention_xl import (
    MultiheadAttentionXL,
    MultiheadRelativePositionLinear,
    xl_attention_logits,
)
from weft.hierarchy.pipelined_stack import PipelinedTransformerLayer
from weft.hierarchy.positional import (
    LearnedPositionalEmbedding,
    SinusoidalPositionalEmbedding,
    sinusoidal_positional_embeddings,
)
from weft.hierarchy.qkv_linear import (
    BaseMultiheadLinear,
    BaseQKVLinear,
    FusedGroupedQKVLinear,
    FusedQKVLinear,
    GroupedQKVLinear,
    MultiheadInputLinear,
    MultiheadOutputLinear,
    QKVLinear,
    QLinear,
)
from weft.hierarchy.remat import (
    RematRegexSavePatterns,
    build_remat_spec,
    save_and_offload_these_names_regex,
)
from weft.hierarchy.residual import NormPosition, ResidualLayer
from weft.hierarchy.rope import (
    Llama3SinusoidalPositionalEmbedding,
    RoFormerQKVLinear,
    RoFormerSinusoidalPositionalEmbedding,
    YaRNSinusoidalPositionalEmbedding,
    apply_rotary_position_embeddings,
)
from weft.hierarchy.scale_qk import (
    BaseScaleQK,
    PerDimScale,
    ScaleFn,
    ScaleKey,
    ScaleQuery,
    constant_scale_fn,
    pow_scale_fn,
)
from weft.hierarchy.stack import (
    BaseStackedTransformerLayer,
    RepeatedTransformerLayer,
    StackedTransformerLayer,
    UpdateDataFn,
    update_data_with_skip_connection,
)
from weft.hierarchy.transformer import (
    BaseTransformerLayer,
    BottleNeckAdapterTransformerLayer,
    ParallelTransformerLayer,
    TransformerAttentionLayer,
    TransformerLayer,
)

__all__ = [
    # Attention.
    "ForwardMode",
    "GroupedQueryAttention",
    "MultiheadAttention",
    "MultiheadAttentionXL",
    "MultiheadRelativePositionLinear",
    "SigmoidAttention",
    "compute_gqa_context",
    "compute_gqa_logits",
    "rel_pos_to_abs_pos",
    "sigmoid_with_biases",
    "softmax_with_biases",
    "xl_attention_logits",
    # Projections.
    "BaseMultiheadLinear",
    "BaseQKVLinear",
    "FusedGroupedQKVLinear",
    "FusedQKVLinear",
    "GroupedQKVLinear",
    "MultiheadInputLinear",
    "MultiheadOutputLinear",
    "QKVLinear",
    "QLinear",
    "RoFormerQKVLinear",
    # Scales.
    "BaseScaleQK",
    "PerDimScale",
    "ScaleFn",
    "ScaleKey",
    "ScaleQuery",
    "constant_scale_fn",
    "pow_scale_fn",
    # Positions.
    "LearnedPositionalEmbedding",
    "Llama3SinusoidalPositionalEmbedding",
    "RoFormerSinusoidalPositionalEmbedding",
    "SinusoidalPositionalEmbedding",
    "YaRNSinusoidalPositionalEmbedding",
    "apply_rotary_position_embeddings",
    "sinusoidal_positional_embeddings",
    # Masks and biases.
    "NEG_INF",
    "BaseAttentionBias",
    "CausalAttentionBias",
    "CompositeAttentionBias",
    "MaskFnAttentionBias",
    "SegmentIdAttentionBias",
    "SlidingWindowAttentionBias",
    "TensorAttentionBias",
    "ZeroAttentionBias",
    "apply_attention_logit_biases",
    "as_attention_bias",
    "causal_mask",
    "compute_padding_biases",
    "make_causal_biases",
    "make_segment_mask",
    "make_sliding_window_causal_biases",
    "sliding_window_causal_mask",
    # Layers that make biases.
    "ALiBiAttentionLogitBiasLayer",
    "AttentionLogitBiasLayer",
    "CausalAttentionLogitBiasLayer",
    "FullAttentionLogitBiasLayer",
    "SymmetricALiBiAttentionLogitBiasLayer",
    "alibi_get_slopes",
    # Decoding.
    "BaseKVCache",
    "KVCache",
    "KVState",
    # Transformer layers.
    "BaseTransformerLayer",
    "BottleNeckAdapterTransformerLayer",
    "NormPosition",
    "ParallelTransformerLayer",
    "ResidualLayer",
    "TransformerAttentionLayer",
    "TransformerFeedForwardLayer",
    "TransformerLayer",
    "scaled_hidden_dim",
    # Stacks.
    "BaseStackedTransformerLayer",
    "PipelinedTransformerLayer",
    "RepeatedTransformerLayer",
    "StackedTransformerLayer",
    "UpdateDataFn",
    "update_data_with_skip_connection",
    # Rematerialization and sharding.
    "RematRegexSavePatterns",
    "build_remat_spec",
    "save_and_offload_these_names_regex",
    "set_attention_partition_specs",
    "set_double_shard_weights_config",
    "set_feed_forward_partition_specs",
]
