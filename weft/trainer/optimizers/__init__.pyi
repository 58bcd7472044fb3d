from weft.trainer.optimizers.algorithms import (
    adafactor_optimizer as adafactor_optimizer, adam_optimizer as adam_optimizer,
    adamw_decoupled_optimizer as adamw_decoupled_optimizer, adamw_optimizer as adamw_optimizer,
    adastar_optimizer as adastar_optimizer, lion_optimizer as lion_optimizer,
    offload_optimizer as offload_optimizer, scale_by_lion as scale_by_lion,
    ScaleByLionState as ScaleByLionState, sgd_optimizer as sgd_optimizer,
)
from weft.trainer.optimizers.base import (
    adam_partition as adam_partition, chain as chain, copy_partition as copy_partition,
    named_chain as named_chain, NestedOptParam as NestedOptParam,
    opt_param_values as opt_param_values, OptParam as OptParam, OptStateSpec as OptStateSpec,
    PartitionedGradientTransformation as PartitionedGradientTransformation,
    PartitionedGradientTransformationExtraArgs as PartitionedGradientTransformationExtraArgs,
    trace_partition as trace_partition, TransformInitFn as TransformInitFn,
    TransformPartitionSpecFn as TransformPartitionSpecFn, TransformUpdateFn as TransformUpdateFn,
    with_partition_fn as with_partition_fn,
)
from weft.trainer.optimizers.clipping import (
    clip_by_block_rms as clip_by_block_rms, clip_by_global_norm as clip_by_global_norm,
    drop_norm_by_grad_norm_ema as drop_norm_by_grad_norm_ema,
    drop_norm_by_grad_norm_stddev as drop_norm_by_grad_norm_stddev,
    DropNormThresholdFn as DropNormThresholdFn,
    skip_and_clip_by_global_norm as skip_and_clip_by_global_norm, SkipClipState as SkipClipState,
)
from weft.trainer.optimizers.transformations import (
    add_decayed_weights as add_decayed_weights, AddDecayedWeightsState as AddDecayedWeightsState,
    decoupled_scale_and_decay as decoupled_scale_and_decay, ema as ema, EmaState as EmaState,
    l2_regularizer as l2_regularizer, param_ema as param_ema, ParamEmaState as ParamEmaState,
    per_param_scale_by_path as per_param_scale_by_path,
    per_param_scale_by_rms as per_param_scale_by_rms, PerParamScale as PerParamScale,
    replace_with_updates as replace_with_updates, scale as scale,
    scale_by_factored_rms as scale_by_factored_rms,
    scale_by_param_block_rms as scale_by_param_block_rms, scale_by_schedule as scale_by_schedule,
    scale_by_trust_ratio as scale_by_trust_ratio,
    scale_from_learning_rate as scale_from_learning_rate,
    scale_update_per_param as scale_update_per_param,
)
