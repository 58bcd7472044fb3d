"""Optimizers for configs: `config_for_function(adamw_optimizer).set(learning_rate=3e-4)`.

Each is a chain of the transformations in the files named optimizer_*, which can all be imported
from here; the mathematics comes from optax where it exists there. A learner also accepts a plain
optax optimizer: `config_for_function(optax.adamw).set(learning_rate=3e-4)`.
"""

from typing import Any

import jax.numpy as jnp
import optax

from weft.errors import OptimizerArgumentError
from weft.trainer.optimizer_adastar import adastar_optimizer
from weft.trainer.optimizer_base import (
    NestedOptParam,
    OptParam,
    OptStateSpec,
    PartitionedGradientTransformation,
    TransformInitFn,
    TransformPartitionSpecFn,
    TransformUpdateFn,
    adam_partition,
    as_partitioned,
    chain,
    copy_partition,
    identity,
    named_chain,
    opt_param_values,
    trace_partition,
    with_partition_fn,
)
from weft.trainer.optimizer_clipping import clip_by_block_rms, clip_by_global_norm
from weft.trainer.optimizer_ema import (
    EmaState,
    ParamEmaState,
    ema,
    param_ema,
    replace_with_updates,
)
from weft.trainer.optimizer_factored import scale_by_factored_rms
from weft.trainer.optimizer_offload import offload_optimizer
from weft.trainer.optimizer_scaling import (
    AddDecayedWeightsState,
    PerParamScale,
    add_decayed_weights,
    decoupled_scale_and_decay,
    l2_regularizer,
    per_param_scale_by_path,
    per_param_scale_by_rms,
    scale,
    scale_by_param_block_rms,
    scale_by_schedule,
    scale_by_trust_ratio,
    scale_from_learning_rate,
    scale_update_per_param,
)
from weft.trainer.optimizer_skipping import (
    DropNormThresholdFn,
    SkipClipState,
    drop_norm_by_grad_norm_ema,
    drop_norm_by_grad_norm_stddev,
    skip_and_clip_by_global_norm,
)
from weft.trainer.schedule import Schedule
from weft.typing import DType

ScaleByLionState = optax.ScaleByLionState

__all__ = [
    # Interfaces.
    "NestedOptParam",
    "OptParam",
    "OptStateSpec",
    "PartitionedGradientTransformation",
    "TransformInitFn",
    "TransformPartitionSpecFn",
    "TransformUpdateFn",
    "adam_partition",
    "copy_partition",
    "opt_param_values",
    "trace_partition",
    "with_partition_fn",
    # Whole optimizers.
    "adafactor_optimizer",
    "adam_optimizer",
    "adamw_decoupled_optimizer",
    "adamw_optimizer",
    "adastar_optimizer",
    "lion_optimizer",
    "sgd_optimizer",
    # Wrappers and composition.
    "chain",
    "named_chain",
    "offload_optimizer",
    "skip_and_clip_by_global_norm",
    "DropNormThresholdFn",
    "SkipClipState",
    "drop_norm_by_grad_norm_ema",
    "drop_norm_by_grad_norm_stddev",
    # Parts.
    "AddDecayedWeightsState",
    "EmaState",
    "ParamEmaState",
    "ScaleByLionState",
    "add_decayed_weights",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "ema",
    "l2_regularizer",
    "param_ema",
    "per_param_scale_by_path",
    "per_param_scale_by_rms",
    "replace_with_updates",
    "scale",
    "scale_by_lion",
    "scale_by_param_block_rms",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "scale_from_learning_rate",
    "scale_update_per_param",
]


def sgd_optimizer(
    learning_rate: Schedule,
    *,
    decouple_weight_decay: bool,
    momentum: float = 0,
    weight_decay: float = 0,
    weight_decay_per_param_scale: PerParamScale | None = None,
) -> PartitionedGradientTransformation:
    """Creates an optimizer for stochastic gradient descent.

    Args:
      learning_rate: a number or a schedule.
      decouple_weight_decay: whether to add weight decay after momentum instead of before.
      momentum: decay of the trace of gradients; 0 keeps no trace.
      weight_decay: factor of the parameters; multiplied by the learning rate.
      weight_decay_per_param_scale: as for `add_decayed_weights`.

    >>> tx = sgd_optimizer(0.5, decouple_weight_decay=True)
    >>> params = {"w": OptParam(value=jnp.array(1.0))}
    >>> updates, _ = tx.update({"w": jnp.array(2.0)}, tx.init(params), params)
    >>> float(updates["w"])
    -1.0
    """
    trace = trace_partition(optax.trace(decay=momentum)) if momentum else identity()
    decay = add_decayed_weights(weight_decay, per_param_scale=weight_decay_per_param_scale)
    first = (trace, decay) if decouple_weight_decay else (decay, trace)
    return chain(*first, scale_by_schedule(scale_from_learning_rate(learning_rate)))


def adam_optimizer(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    l2_regularizer_weight: float | None = 0,
    l2_regularizer_per_param_scale: PerParamScale | None = None,
    mu_dtype: DType | None = None,
) -> PartitionedGradientTransformation:
    """Creates an Adam optimizer with an L2 penalty that passes through the moments.

    Source: Kingma and Ba, https://arxiv.org/abs/1412.6980; see `optax.scale_by_adam`.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      l2_regularizer_weight, l2_regularizer_per_param_scale: as for `l2_regularizer`.
      mu_dtype: dtype of the first moment; None for that of the parameter.
    """
    return chain(
        l2_regularizer(l2_regularizer_weight, l2_regularizer_per_param_scale),
        adam_partition(optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)),
        scale_by_schedule(scale_from_learning_rate(learning_rate)),
    )


def adamw_optimizer(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float = 0,
    weight_decay_per_param_scale: PerParamScale | None = None,
    mu_dtype: DType | None = None,
    adam_update_transformation: Any = None,
) -> PartitionedGradientTransformation:
    """Creates an Adam optimizer with weight decay that is multiplied by the learning rate.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; see `optax.scale_by_adam`.

    Args:
      learning_rate: a number or a schedule.
      b1, b2, eps, mu_dtype: as for `adam_optimizer`.
      weight_decay: factor of the parameters.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
      adam_update_transformation: transformation, or a config of one, of Adam's update before weight
        decay is added.
    """
    return chain(
        *_adam(b1, b2, eps, mu_dtype, adam_update_transformation),
        add_decayed_weights(weight_decay, per_param_scale=weight_decay_per_param_scale),
        scale_by_schedule(scale_from_learning_rate(learning_rate)),
    )


def adamw_decoupled_optimizer(
    learning_rate: float,
    *,
    b1: float,
    b2: float,
    eps: float,
    update_schedule: Schedule,
    weight_decay: float = 0,
    weight_decay_per_param_scale: PerParamScale | None = None,
    mu_dtype: DType | None = None,
    adam_update_transformation: Any = None,
) -> PartitionedGradientTransformation:
    """Creates an Adam optimizer with weight decay that does not depend on the learning rate.

    The update is `-update_schedule * (learning_rate * adam + weight_decay * parameter)`; a larger
    learning rate therefore does not require a smaller decay.

    Args:
      b1, b2, eps, mu_dtype: as for `adam_optimizer`.
      update_schedule: scales the whole update; usually between 0 and 1.
      weight_decay: factor of the parameters; much smaller than for `adamw_optimizer`.
      weight_decay_per_param_scale, adam_update_transformation: as for `adamw_optimizer`.
    """
    return chain(
        *_adam(b1, b2, eps, mu_dtype, adam_update_transformation),
        *decoupled_scale_and_decay(
            learning_rate, weight_decay, weight_decay_per_param_scale, update_schedule
        ),
    )


def _adam(
    b1: float, b2: float, eps: float, mu_dtype: DType | None, transformation: Any
) -> list[PartitionedGradientTransformation]:
    adam = adam_partition(optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype))
    return [adam] if transformation is None else [adam, as_partitioned(transformation)]


def adafactor_optimizer(
    learning_rate: Schedule,
    *,
    b1: Schedule | None,
    b2: Schedule,
    multiply_by_parameter_scale: bool,
    clipping_threshold: float | None,
    dtype_momentum: DType = jnp.float32,
    weight_decay: float | None = None,
    weight_decay_scale_by_learning_rate_exponent: float | None = None,
    weight_decay_per_param_scale: PerParamScale | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    apply_scale_by_trust_ratio: bool = False,
) -> PartitionedGradientTransformation:
    """Creates an Adafactor optimizer, with factored moments and updates relative to parameters.

    Source: Shazeer and Stern, https://arxiv.org/abs/1804.04235.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of a moving average of updates; None keeps no average.
      b2: decay of the second moment; often `config_for_function(adafactor_decay_rate)`.
      multiply_by_parameter_scale: whether to multiply updates by the parameter's root mean square.
      clipping_threshold: maximum root mean square of an update; None disables clipping.
      dtype_momentum: dtype of the moving average of updates.
      weight_decay: factor of the parameters; None disables decay.
      weight_decay_scale_by_learning_rate_exponent: multiplies weight decay by this power of the
        learning rate. Required with `weight_decay`.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
      eps: added to squared gradients, and to the norm of updates for the trust ratio.
      factored: whether to factor second moments of parameters whose spec allows it.
      apply_scale_by_trust_ratio: whether to finally scale updates by the trust ratio.

    Raises:
      OptimizerArgumentError: if `weight_decay` is given without its exponent.
    """
    parts = [scale_by_factored_rms(b2, factored=factored, eps=eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    parts.append(scale_by_schedule(scale_from_learning_rate(learning_rate, flip_sign=False)))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if b1 is not None:
        parts.append(ema(b1, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay is not None:
        if weight_decay_scale_by_learning_rate_exponent is None:
            raise OptimizerArgumentError(
                f"adafactor_optimizer got weight_decay={weight_decay}, which needs "
                "weight_decay_scale_by_learning_rate_exponent: set it to 0 for decay that does not "
                "depend on the learning rate, to 1 for decay that is proportional to it."
            )
        parts.append(
            add_decayed_weights(
                weight_decay,
                learning_rate_exponent=weight_decay_scale_by_learning_rate_exponent,
                learning_rate=learning_rate,
                per_param_scale=weight_decay_per_param_scale,
            )
        )
    if apply_scale_by_trust_ratio:
        parts.append(scale_by_trust_ratio(eps=eps))
    return chain(*parts, scale(-1.0))


def scale_by_lion(
    b1: float = 0.9, b2: float = 0.99, mu_dtype: DType | None = None
) -> PartitionedGradientTransformation:
    """Replaces updates by the sign of a mean of the gradient and its moving average.

    Source: Chen et al., https://arxiv.org/abs/2302.06675; see `optax.scale_by_lion`.

    Args:
      b1: weight of the average in the mean.
      b2: decay of the average.
      mu_dtype: dtype of the average; None for that of the parameter.
    """
    return as_partitioned(optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype))


def lion_optimizer(
    learning_rate: Schedule,
    b1: float,
    b2: float,
    mu_dtype: DType | None = None,
    weight_decay: float = 0.0,
    multiply_by_parameter_scale: bool = False,
    weight_decay_per_param_scale: PerParamScale | None = None,
) -> PartitionedGradientTransformation:
    """Creates a Lion optimizer with weight decay that is multiplied by the learning rate.

    Args:
      learning_rate: a number or a schedule; about a tenth of Adam's.
      b1, b2, mu_dtype: as for `scale_by_lion`.
      weight_decay: factor of the parameters.
      multiply_by_parameter_scale: whether to multiply signs by the parameter's root mean square.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
    """
    parts = [scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)]
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    return chain(
        *parts,
        add_decayed_weights(weight_decay, per_param_scale=weight_decay_per_param_scale),
        scale_by_schedule(scale_from_learning_rate(learning_rate)),
    )
