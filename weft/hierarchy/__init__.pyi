from weft.functional.attention import relative_to_absolute as rel_pos_to_abs_pos
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
    apply_rotary_position_embeddings as apply_rotary_position_embeddings,
    DynamicNTKSinusoidalPositionalEmbedding as DynamicNTKSinusoidalPositionalEmbedding,
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
from weft.hierarchy.base_layer import (
    BaseLayer as BaseLayer, BaseModel as BaseModel, CompositeTensorStats as CompositeTensorStats,
    DefaultTensorStats as DefaultTensorStats, no_remat as no_remat,
    ParameterNoise as ParameterNoise, RedirectToSharedModule as RedirectToSharedModule,
    RematSpec as RematSpec, TensorMaxAbs as TensorMaxAbs, TensorRMSNorm as TensorRMSNorm,
    TensorStats as TensorStats,
)
from weft.hierarchy.causal_lm import (
    AuxLossMetrics as AuxLossMetrics, BaseLossMetrics as BaseLossMetrics,
    CompositeLossMetrics as CompositeLossMetrics, CompositeLossWeights as CompositeLossWeights,
    CrossEntropyLossMetrics as CrossEntropyLossMetrics, gpt_decoder_config as gpt_decoder_config,
    layer_norm_config as layer_norm_config, metrics_config as metrics_config,
    ModalityLossMetrics as ModalityLossMetrics,
    residual_initializer_cfg as residual_initializer_cfg,
    TransformerStackConfig as TransformerStackConfig,
)
from weft.hierarchy.config_setters import (
    for_each_config as for_each_config,
    set_attention_partition_specs as set_attention_partition_specs,
    set_bias_recursively as set_bias_recursively,
    set_double_shard_weights_config as set_double_shard_weights_config,
    set_dropout_rate_recursively as set_dropout_rate_recursively,
    set_feed_forward_partition_specs as set_feed_forward_partition_specs,
    set_layer_norm_eps_recursively as set_layer_norm_eps_recursively,
    set_norm_recursively as set_norm_recursively,
    set_weight_format_recursively as set_weight_format_recursively,
)
from weft.hierarchy.context import (
    child_context as child_context, clone_context_stack as clone_context_stack,
    ContextStack as ContextStack, current_context as current_context,
    install_context_stack as install_context_stack, InvocationContext as InvocationContext,
    new_output_collection as new_output_collection, OutputCollection as OutputCollection,
    set_current_context as set_current_context,
)
from weft.hierarchy.convolution import (
    BaseConv as BaseConv, BaseConvTranspose as BaseConvTranspose, Conv1D as Conv1D,
    Conv1DTranspose as Conv1DTranspose, Conv1DWithPadding as Conv1DWithPadding, Conv2D as Conv2D,
    Conv2DTranspose as Conv2DTranspose,
    Conv2DTransposeWith1DPadding as Conv2DTransposeWith1DPadding,
    Conv2DWith1DPadding as Conv2DWith1DPadding, Conv3D as Conv3D,
    Conv3DTranspose as Conv3DTranspose, ConvPaddingType as ConvPaddingType, MaxPool2D as MaxPool2D,
    SqueezeExcitation as SqueezeExcitation, StackOverTime as StackOverTime,
)
from weft.hierarchy.decoder import (
    BaseDecoder as BaseDecoder, Decoder as Decoder, DecodingLayer as DecodingLayer,
    LmHead as LmHead, log_probs_from_logits as log_probs_from_logits,
)
from weft.hierarchy.decoding import (
    add_decoding_dim as add_decoding_dim, beam_search_decode as beam_search_decode,
    BeamSearchOutputs as BeamSearchOutputs, brevity_penalty_fn as brevity_penalty_fn,
    BrevityPenaltyFn as BrevityPenaltyFn, CompositeDecodingCondition as CompositeDecodingCondition,
    compute_merge_matrix_by_prefix_ids as compute_merge_matrix_by_prefix_ids,
    DecodingState as DecodingState, flatten_decoding_dim as flatten_decoding_dim,
    infer_initial_time_step as infer_initial_time_step, PrefixMerger as PrefixMerger,
    sample_decode as sample_decode, SampleOutputs as SampleOutputs,
    StopDecodingCondition as StopDecodingCondition, StopOnMaxLength as StopOnMaxLength,
    StopOnSubsequence as StopOnSubsequence, unflatten_decoding_dim as unflatten_decoding_dim,
)
from weft.hierarchy.encoder_decoder import (
    EncoderDecoderModel as EncoderDecoderModel, SourceEncoder as SourceEncoder,
)
from weft.hierarchy.encoder_models import (
    BaseEncoderModel as BaseEncoderModel, EncoderClassifier as EncoderClassifier,
    MaskedLanguageModel as MaskedLanguageModel, MaskedLmHead as MaskedLmHead,
)
from weft.hierarchy.encoders import Encoder as Encoder, PatchEmbedding as PatchEmbedding
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
from weft.hierarchy.lora import (
    base_state as base_state, BaseLoraAdapter as BaseLoraAdapter,
    LoraDownFusedLinear as LoraDownFusedLinear, LoraDownMultiheadLinear as LoraDownMultiheadLinear,
    LoraExperts as LoraExperts,
    LoraFusedQKVAdapter as LoraFusedQKVAdapter, LoraFusedQKVLinear as LoraFusedQKVLinear,
    LoraLinear as LoraLinear, LoraLinearAdapter as LoraLinearAdapter,
    LoraMultiheadOutputAdapter as LoraMultiheadOutputAdapter,
    LoraMultiheadOutputLinear as LoraMultiheadOutputLinear, LoraUpFusedLinear as LoraUpFusedLinear,
    LoraUpGroupedLinear as LoraUpGroupedLinear, merge_adapters as merge_adapters,
    set_lora_recursively as set_lora_recursively, unmerge_adapters as unmerge_adapters,
    with_base_state as with_base_state, without_lora as without_lora,
)
from weft.hierarchy.loss import (
    asymmetric_contrastive_loss_from_features as asymmetric_contrastive_loss_from_features,
    asymmetric_contrastive_loss_from_logits as asymmetric_contrastive_loss_from_logits,
    bilinear_mean_squared_error as bilinear_mean_squared_error, flops_loss as flops_loss,
    focal_loss as focal_loss, giou_loss as giou_loss, huber_loss as huber_loss,
    kl_divergence as kl_divergence, l1_loss as l1_loss,
    large_margin_cosine_loss as large_margin_cosine_loss, mean_squared_error as mean_squared_error,
    negative_cosine_similarity_loss as negative_cosine_similarity_loss,
    ranking_pairwise_loss as ranking_pairwise_loss, ReductionMethod as ReductionMethod,
    symmetric_contrastive_loss_from_features as symmetric_contrastive_loss_from_features,
    symmetric_contrastive_loss_from_logits as symmetric_contrastive_loss_from_logits,
)
from weft.hierarchy.mesh_layout import (
    set_partition_specs_recursively as set_partition_specs_recursively,
)
from weft.hierarchy.metrics import (
    AudioSummary as AudioSummary, CallbackSummary as CallbackSummary, ImageSummary as ImageSummary,
    MaxSummary as MaxSummary, MetricAccumulator as MetricAccumulator,
    MetricSummary as MetricSummary, MinSummary as MinSummary, Summary as Summary,
    SumSummary as SumSummary, WeightedScalar as WeightedScalar, WeightedSummary as WeightedSummary,
    WeightedValue as WeightedValue,
)
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
    BaseGating as BaseGating, GateNoise as GateNoise, Top2Gating as Top2Gating,
    TopKBiasGating as TopKBiasGating, TopKDropFreeGating as TopKDropFreeGating,
    TopKGating as TopKGating,
)
from weft.hierarchy.module import (
    functional as functional, Module as Module, nowrap as nowrap, SharedModule as SharedModule,
    Summable as Summable,
)
from weft.hierarchy.param_init import (
    constant_initializer as constant_initializer, ConstantInitializer as ConstantInitializer,
    DefaultInitializer as DefaultInitializer, FanAxes as FanAxes,
    gaussian_initializer as gaussian_initializer, GaussianInitializer as GaussianInitializer,
    Initializer as Initializer, maybe_prepend_axis as maybe_prepend_axis,
    PARAM_REGEXP_BIAS as PARAM_REGEXP_BIAS, PARAM_REGEXP_SCALE as PARAM_REGEXP_SCALE,
    PARAM_REGEXP_WEIGHT as PARAM_REGEXP_WEIGHT, PerGroupInitializer as PerGroupInitializer,
    truncated_normal as truncated_normal, uniform as uniform,
    WeightInitializer as WeightInitializer,
)
from weft.hierarchy.parameter_spec import (
    FactorizationSpec as FactorizationSpec, maybe_shard as maybe_shard,
    NestedParameterSpec as NestedParameterSpec, ParameterSpec as ParameterSpec,
    TensorSpec as TensorSpec, with_leading_axis as with_leading_axis,
)
from weft.hierarchy.pipeline import (
    BaseSchedule as BaseSchedule, GPipeSchedule as GPipeSchedule,
    InterleavedSchedule as InterleavedSchedule, Pipeline as Pipeline,
    StreamSchedule as StreamSchedule,
    transpose_from_pipeline_stage_outputs as transpose_from_pipeline_stage_outputs,
    transpose_to_pipeline_stage_inputs as transpose_to_pipeline_stage_inputs,
)
from weft.hierarchy.poolings import (
    AttentionPooling as AttentionPooling, AveragePooling as AveragePooling,
    BasePoolingLayer as BasePoolingLayer, FirstNTokenPooling as FirstNTokenPooling,
    LastNTokenPooling as LastNTokenPooling, MaxPooling as MaxPooling,
    PoolingWithProjection as PoolingWithProjection,
)
from weft.hierarchy.preferences import (
    ModelWithReference as ModelWithReference, PolicyLossMetrics as PolicyLossMetrics,
    PolicyModel as PolicyModel, PreferenceLossMetrics as PreferenceLossMetrics,
    PreferenceModel as PreferenceModel, without_reference as without_reference,
)
from weft.hierarchy.quantizer import (
    BaseQuantizer as BaseQuantizer, GumbelSoftmaxVectorQuantizer as GumbelSoftmaxVectorQuantizer,
    KmeansVectorQuantizer as KmeansVectorQuantizer, RandomVectorQuantizer as RandomVectorQuantizer,
    SimilarityMetric as SimilarityMetric,
)
from weft.hierarchy.repeat import Repeat as Repeat
from weft.hierarchy.rnn import (
    BaseRNNCell as BaseRNNCell, IdentityCell as IdentityCell, LSTMCell as LSTMCell,
    RepeatedRNNLayer as RepeatedRNNLayer, StackedRNNLayer as StackedRNNLayer,
)
from weft.hierarchy.transforms import (
    propagate_repeated_output_collections as propagate_repeated_output_collections,
    scan_in_context as scan_in_context,
)
