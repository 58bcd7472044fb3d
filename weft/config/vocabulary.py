"""Functions and classes that config texts may name.

Texts are untrusted, so each entry was reviewed individually: `tests/config/test_effects.py` calls
it with all kinds of arguments that a text can contain, and checks that it writes no files, starts
no processes, opens no connections and reads no pickles. Modules are never listed as a whole. An
entry belongs to one of four tables:

- `VALUES`: harmless to call with any arguments, so they may be values, be bound by
  `functools.partial`, and be configured.
- `TARGETS`: may only be configured (`config_for_function`, `config_for_class`), since they read
  files that the text names, as data.
- `RECORDS`: classes whose fields a text fills without a constructor, and number types.
- `ENUMS`: classes whose members may be named.

Not listed: functions that apply an argument to others (`map`, `jit`, `partial_eval`,
`inject_hyperparams`), and functions that write files, load code or objects, start processes or open
connections.

Configurable classes need no entry; their `_needs_allow` restricts texts.
"""

import types


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(
        f"{module}.{name}" for module, names in table.items() for name in names.split()
    )


BUILTINS: types.MappingProxyType[str, type] = types.MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            *(bool, int, float, complex, str, bytes),
            *(list, tuple, dict, set, frozenset, object),
        )
    }
)

VALUES = _names(
    {
        "jax.checkpoint_policies": "checkpoint_dots checkpoint_dots_with_no_batch_dims "
        "dots_saveable dots_with_no_batch_dims_saveable everything_saveable nothing_saveable "
        "offload_dot_with_no_batch_dims save_and_offload_only_these_names save_any_names_but_these "
        "save_anything_except_these_names save_only_these_names",
        "jax.lax": "approx_max_k approx_min_k conv_general_dilated dot dot_general erf logistic "
        "rsqrt stop_gradient top_k",
        "jax.nn": "celu dot_product_attention elu gelu glu hard_sigmoid hard_silu hard_swish "
        "hard_tanh identity leaky_relu log_sigmoid log_softmax logsumexp mish one_hot relu relu6 "
        "selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus "
        "standardize swish tanh",
        "jax.nn.initializers": "constant delta_orthogonal glorot_normal glorot_uniform he_normal "
        "he_uniform kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones "
        "orthogonal truncated_normal uniform variance_scaling xavier_normal xavier_uniform zeros",
        "jax.numpy": "abs absolute add arctan ceil clip cos cosh divide dot exp exp2 expm1 floor "
        "log log10 log1p log2 logaddexp matmul max maximum mean min minimum mod multiply negative "
        "ones ones_like power prod reciprocal round sign sin sinh sqrt square std subtract sum tan "
        "tanh var where zeros zeros_like "
        "bfloat16 bool bool_ complex64 complex128 float16 float32 float64 float8_e4m3 "
        "float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz int2 int4 "
        "int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64",
        "numpy": "bool bool_ complex64 complex128 float16 float32 float64 int8 int16 int32 int64 "
        "uint8 uint16 uint32 uint64",
        "optax": "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan "
        "adaptive_grad_clip add_decayed_weights add_noise amsgrad apply_every apply_if_finite "
        "centralize chain clip clip_by_block_rms clip_by_global_norm constant_schedule "
        "cosine_decay_schedule cosine_onecycle_schedule ema exponential_decay fromage identity "
        "join_schedules keep_params_nonnegative lamb lars linear_onecycle_schedule "
        "linear_schedule lion nadam nadamw noisy_sgd normalize_by_update_norm novograd "
        "optimistic_adam optimistic_gradient_descent piecewise_constant_schedule "
        "piecewise_interpolate_schedule polynomial_schedule radam rmsprop rprop scale "
        "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad "
        "scale_by_belief scale_by_factored_rms scale_by_learning_rate scale_by_lion "
        "scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rprop scale_by_rss "
        "scale_by_schedule scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio "
        "scale_by_yogi set_to_zero sgd sgdr_schedule sign_sgd signum sm3 trace "
        "warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule "
        "yogi zero_nans",
        "weft.functional.activation": "exact_gelu linear quick_gelu squared_relu",
        "weft.functional.attention_mask": "causal_mask left_right_window_mask "
        "sliding_window_causal_mask",
        "weft.functional.attention_variants": "sigmoid_attention_probs",
        "weft.functional.initializers": "ones_init zeros_init",
        "weft.functional.sampling": "scale_by top_k_logits top_p_logits",
        "weft.hierarchy.attention_bias": "BoolAttentionBias BoolTensorAttentionBias "
        "CausalAttentionBias CompositeAttentionBias LeftRightWindowAttentionBias "
        "MaskFnAttentionBias SegmentIdAttentionBias SlidingWindowAttentionBias "
        "TensorAttentionBias ZeroAttentionBias",
        "weft.hierarchy.base_layer": "no_remat",
        "weft.hierarchy.feed_forward": "_scale_dim",
        "weft.hierarchy.gating": "approx_max_k sigmoid",
        "weft.hierarchy.metric_summaries": "MaxSummary MetricSummary MinSummary SumSummary "
        "WeightedSummary",
        "weft.hierarchy.moe_layer": "get_outer_batch_from_mesh",
        "weft.hierarchy.multihead_attention": "compute_gqa_context compute_gqa_logits "
        "sigmoid_with_biases softmax_with_biases",
        "weft.hierarchy.param_init": "constant_initializer gaussian_initializer truncated_normal "
        "uniform",
        "weft.hierarchy.pipeline": "transpose_from_pipeline_stage_outputs "
        "transpose_to_pipeline_stage_inputs",
        "weft.hierarchy.remat": "save_and_offload_these_names_regex",
        "weft.hierarchy.repeat": "_drop_by_regex",
        "weft.hierarchy.scale_qk": "constant_scale_fn pow_scale_fn",
        "weft.hierarchy.stack": "update_data_with_skip_connection",
        "weft.input.base": "partition_by_path_rank",
        "weft.input.tokenizer": "ByteTokenizer",
        "weft.linen.activation": "PReLU",
        "weft.linen.attention": "MultiHeadAttention MultiHeadDotProductAttention SelfAttention",
        "weft.linen.batch_norm": "BatchNorm",
        "weft.linen.cells": "GRUCell MGUCell SimpleCell",
        "weft.linen.containers": "Sequential",
        "weft.linen.conv": "Conv ConvLocal",
        "weft.linen.conv_transpose": "ConvTranspose",
        "weft.linen.embed": "Embed",
        "weft.linen.linear": "Dense DenseGeneral Einsum",
        "weft.linen.lstm": "ConvLSTMCell LSTMCell OptimizedLSTMCell",
        "weft.linen.normalization": "GroupNorm InstanceNorm LayerNorm RMSNorm",
        "weft.linen.rnn": "Bidirectional RNN",
        "weft.linen.stochastic": "Dropout",
        "weft.linen.weight_norms": "SpectralNorm WeightNorm",
        "weft.nnx.containers": "Dict List Sequential",
        "weft.nnx.nn.activations": "PReLU",
        "weft.nnx.nn.attention": "MultiHeadAttention",
        "weft.nnx.nn.batch_norm": "BatchNorm",
        "weft.nnx.nn.cells": "GRUCell SimpleCell",
        "weft.nnx.nn.conv": "Conv",
        "weft.nnx.nn.conv_transpose": "ConvTranspose",
        "weft.nnx.nn.einsum": "Einsum",
        "weft.nnx.nn.embed": "Embed",
        "weft.nnx.nn.linear": "Linear LinearGeneral",
        "weft.nnx.nn.lora": "LoRA LoRALinear",
        "weft.nnx.nn.lstm": "LSTMCell OptimizedLSTMCell",
        "weft.nnx.nn.normalization": "GroupNorm InstanceNorm LayerNorm RMSNorm",
        "weft.nnx.nn.recurrent": "Bidirectional RNN",
        "weft.nnx.nn.stochastic": "Dropout",
        "weft.nnx.nn.weight_norms": "SpectralNorm WeightNorm",
        "weft.nnx.rngs": "Rngs",
        "weft.recipes.digits": "Classifier",
        "weft.recipes.lm_nnx": "Block LanguageModel",
        "weft.trainer.checkpoint_policy": "every_n_steps_and_last_policy every_n_steps_policy",
        "weft.trainer.checkpointer": "_drop_learner_optimizer",
        "weft.trainer.eval_policy": "every_n_steps_policy",
        "weft.trainer.gradient_accumulation": "with_minibatch_steps",
        "weft.trainer.learning_rate_finder": "exponential_sweep",
        "weft.trainer.mesh": "over_slices",
        "weft.trainer.optimizer_adastar": "adastar_optimizer",
        "weft.trainer.optimizer_base": "chain identity named_chain",
        "weft.trainer.optimizer_clipping": "clip_by_block_rms clip_by_global_norm",
        "weft.trainer.optimizer_ema": "ema param_ema",
        "weft.trainer.optimizer_factored": "scale_by_factored_rms",
        "weft.trainer.optimizer_offload": "offload_optimizer",
        "weft.trainer.optimizer_scaling": "add_decayed_weights decoupled_scale_and_decay "
        "l2_regularizer per_param_scale_by_path per_param_scale_by_rms scale "
        "scale_by_param_block_rms scale_by_schedule scale_by_trust_ratio scale_from_learning_rate "
        "scale_update_per_param",
        "weft.trainer.optimizer_skipping": "drop_norm_by_grad_norm_ema "
        "drop_norm_by_grad_norm_stddev skip_and_clip_by_global_norm",
        "weft.trainer.optimizers": "adafactor_optimizer adam_optimizer adamw_decoupled_optimizer "
        "adamw_optimizer lion_optimizer scale_by_lion sgd_optimizer",
        "weft.trainer.schedule": "adafactor adafactor_decay_rate constant_with_linear_warmup "
        "cosine_with_linear_warmup decay_bias_correction ema_schedule exponential inverse_sqrt "
        "linear_schedule_with_warmup polynomial segment_wise stepwise warmup_stable_decay",
        "weft.trainer.train_dtype": "per_param_train_dtype_by_path",
    }
)

TARGETS = _names(
    {
        "grain": "ReadOptions",
        "weft.input.corpus": "folder_corpus stdlib_corpus",
        "weft.input.fake": "fake_classification_source fake_classification_source_instruct_lm "
        "fake_glue_source fake_grain_source fake_serialized_json_source fake_source "
        "fake_speech_source fake_text2text_source fake_text_source",
        "weft.input.files": "json_lines_dataset parquet_dataset text_dataset",
        "weft.input.text": "lm_documents_source lm_text_source",
        "weft.input.text_tokenizers": "HuggingFaceTokenizer SentencePieceTokenizer",
        "weft.recipes.digits": "digits_source",
    }
)

RECORDS = _names(
    {
        # Numbers, `ml_dtypes.bfloat16(1.5)`. Some strings make them crash the process, so they are
        # not values. The dtype is numpy.dtype('bfloat16') or jax.numpy.bfloat16.
        "ml_dtypes": "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
        "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4 uint2 uint4",
        "weft.hierarchy.base_layer": "RematSpec",
        "weft.hierarchy.modality_embedding": "ModalityVocabInfo",
        "weft.hierarchy.param_init": "FanAxes",
        "weft.hierarchy.parameter_spec": "FactorizationSpec ParameterSpec TensorSpec",
        "weft.input.base": "PathAndRank",
        "weft.trainer.mesh": "HybridMeshShape",
    }
)

ENUMS = _names(
    {
        "jax.lax": "DotAlgorithmPreset Precision",
        "jax.sharding": "AxisType",
        "weft.core.logical": "RulesFallback",
        "weft.hierarchy.embedding": "Embedding.Scale",
        "weft.hierarchy.gating": "GateNoise",
        "weft.hierarchy.moe_drop_free": "GMMBackend",
        "weft.hierarchy.multihead_attention": "ForwardMode",
        "weft.hierarchy.multihead_attention_xl": "MultiheadAttentionXL.ScalePosition",
        "weft.hierarchy.normalization": "NormType",
        "weft.hierarchy.remat": "RematRegexSavePatterns",
        "weft.hierarchy.residual": "NormPosition",
        "weft.linen.module": "_Current",
        "weft.trainer.builder_base": "Builder.StateType",
        "weft.trainer.checkpoint_index": "CheckpointValidationType",
        "weft.trainer.inference": "DataPartitionType",
        "weft.trainer.learner": "UpdateType",
        "weft.trainer.state_converters": "MergeStateSelection",
    }
)
