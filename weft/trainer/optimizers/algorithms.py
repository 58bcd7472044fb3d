"""Optimizers for configs: `config_for_function(adamw_optimizer).set(learning_rate=3e-4)`.

Each is a chain of transformations; the mathematics comes from optax where it exists there. A
learner also accepts a plain optax optimizer: `config_for_function(optax.adamw)`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft.errors import OptimizerArgumentError
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.trainer.optimizers import base, clipping, transformations
from weft.trainer.schedule import Schedule
from weft.typing import DType, NestedTensor, PyTree, Tensor

ScaleByLionState = optax.ScaleByLionState
"""State of Lion, from optax."""


def sgd_optimizer(
    learning_rate: Schedule,
    *,
    decouple_weight_decay: bool,
    momentum: float = 0,
    weight_decay: float = 0,
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
) -> base.PartitionedGradientTransformation:
    """Creates an optimizer for stochastic gradient descent.

    Args:
      decouple_weight_decay: whether to add weight decay after momentum instead of before.
      momentum: decay of the trace of gradients; 0 keeps no trace.
      weight_decay: factor of the parameters; multiplied by the learning rate.
      weight_decay_per_param_scale: as for `add_decayed_weights`.

    >>> tx = sgd_optimizer(0.5, decouple_weight_decay=True)
    >>> from weft.trainer.optimizers import OptParam
    >>> params = {"w": OptParam(value=jnp.array(1.0))}
    >>> updates, _ = tx.update({"w": jnp.array(2.0)}, tx.init(params), params)
    >>> float(updates["w"])
    -1.0
    """
    trace = base.identity()
    if momentum:
        trace = base.trace_partition(optax.trace(decay=momentum))
    decay = transformations.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale
    )
    scale = transformations.scale_by_schedule(
        transformations.scale_from_learning_rate(learning_rate)
    )
    if decouple_weight_decay:
        return base.chain(trace, decay, scale)
    return base.chain(decay, trace, scale)


def adam_optimizer(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    l2_regularizer_weight: float | None = 0,
    l2_regularizer_per_param_scale: transformations.PerParamScale | None = None,
    mu_dtype: DType | None = None,
) -> base.PartitionedGradientTransformation:
    """Creates an Adam optimizer with an L2 penalty that passes through the moments.

    Source: [Kingma and Ba, 2015](https://arxiv.org/abs/1412.6980); see `optax.scale_by_adam`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      l2_regularizer_weight, l2_regularizer_per_param_scale: as for `l2_regularizer`.
      mu_dtype: dtype of the first moment; None for that of the parameter.
    """
    return base.chain(
        transformations.l2_regularizer(
            l2_regularizer_weight, l2_regularizer_per_param_scale
        ),
        base.adam_partition(
            optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)
        ),
        transformations.scale_by_schedule(
            transformations.scale_from_learning_rate(learning_rate)
        ),
    )


def adamw_optimizer(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float = 0,
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
    mu_dtype: DType | None = None,
    adam_update_transformation: base.TransformationLike | None = None,
) -> base.PartitionedGradientTransformation:
    """Creates an Adam optimizer with weight decay that is multiplied by the learning rate.

    Source: [Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101); see
    `optax.scale_by_adam`.

    Args:
      b1, b2, eps, mu_dtype: as for `adam_optimizer`.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
      adam_update_transformation: transformation, or a config of one, of Adam's update before weight
        decay is added.
    """
    return base.chain(
        *_adam(b1, b2, eps, mu_dtype, adam_update_transformation),
        transformations.add_decayed_weights(
            weight_decay, per_param_scale=weight_decay_per_param_scale
        ),
        transformations.scale_by_schedule(
            transformations.scale_from_learning_rate(learning_rate)
        ),
    )


def adamw_decoupled_optimizer(
    learning_rate: float,
    *,
    b1: float,
    b2: float,
    eps: float,
    update_schedule: Schedule,
    weight_decay: float = 0,
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
    mu_dtype: DType | None = None,
    adam_update_transformation: base.TransformationLike | None = None,
) -> base.PartitionedGradientTransformation:
    """Creates an Adam optimizer with weight decay that does not depend on the learning rate.

    The update is `-update_schedule * (learning_rate * adam + weight_decay * parameter)`; a larger
    learning rate therefore does not require a smaller decay.

    Args:
      b1, b2, eps, mu_dtype: as for `adam_optimizer`.
      update_schedule: scales the whole update; usually between 0 and 1.
      weight_decay: factor of the parameters; much smaller than for `adamw_optimizer`.
      weight_decay_per_param_scale, adam_update_transformation: as for `adamw_optimizer`.
    """
    return base.chain(
        *_adam(b1, b2, eps, mu_dtype, adam_update_transformation),
        *transformations.decoupled_scale_and_decay(
            learning_rate,
            weight_decay,
            weight_decay_per_param_scale,
            update_schedule,
        ),
    )


def _adam(
    b1: float,
    b2: float,
    eps: float,
    mu_dtype: DType | None,
    transformation: base.TransformationLike | None,
) -> list[base.PartitionedGradientTransformation]:
    adam = base.adam_partition(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)
    )
    if transformation is None:
        return [adam]
    return [adam, base.as_partitioned(transformation)]


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
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    apply_scale_by_trust_ratio: bool = False,
) -> base.PartitionedGradientTransformation:
    """Creates an Adafactor optimizer, with factored moments and updates relative to parameters.

    Source: [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235).

    Args:
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

    Raises OptimizerArgumentError if `weight_decay` is given without its exponent.
    """
    parts = [
        transformations.scale_by_factored_rms(b2, factored=factored, eps=eps)
    ]
    if clipping_threshold is not None:
        parts.append(clipping.clip_by_block_rms(clipping_threshold))
    parts.append(
        transformations.scale_by_schedule(
            transformations.scale_from_learning_rate(
                learning_rate, flip_sign=False
            )
        )
    )
    if multiply_by_parameter_scale:
        parts.append(transformations.scale_by_param_block_rms())
    if b1 is not None:
        parts.append(
            transformations.ema(
                b1, debias=False, accumulator_dtype=dtype_momentum
            )
        )
    if weight_decay is not None:
        if weight_decay_scale_by_learning_rate_exponent is None:
            raise OptimizerArgumentError(
                f"adafactor_optimizer got weight_decay={weight_decay}, which needs "
                "weight_decay_scale_by_learning_rate_exponent: set it to 0 for decay that does not "
                "depend on the learning rate, to 1 for decay that is proportional to it."
            )
        parts.append(
            transformations.add_decayed_weights(
                weight_decay,
                learning_rate_exponent=weight_decay_scale_by_learning_rate_exponent,
                learning_rate=learning_rate,
                per_param_scale=weight_decay_per_param_scale,
            )
        )
    if apply_scale_by_trust_ratio:
        parts.append(transformations.scale_by_trust_ratio(eps=eps))
    return base.chain(*parts, transformations.scale(-1.0))


def scale_by_lion(
    b1: float = 0.9, b2: float = 0.99, mu_dtype: DType | None = None
) -> base.PartitionedGradientTransformation:
    """Replaces updates by the sign of a mean of the gradient and its moving average.

    Source: [Chen et al., 2023](https://arxiv.org/abs/2302.06675); see `optax.scale_by_lion`.

    Args:
      b1: weight of the average in the mean.
      b2: decay of the average.
      mu_dtype: dtype of the average; None for that of the parameter.
    """
    return base.as_partitioned(
        optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)
    )


def lion_optimizer(
    learning_rate: Schedule,
    b1: float,
    b2: float,
    mu_dtype: DType | None = None,
    weight_decay: float = 0.0,
    multiply_by_parameter_scale: bool = False,
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
) -> base.PartitionedGradientTransformation:
    """Creates a Lion optimizer with weight decay that is multiplied by the learning rate.

    Args:
      learning_rate: a number or a schedule; about a tenth of Adam's.
      b1, b2, mu_dtype: as for `scale_by_lion`.
      multiply_by_parameter_scale: whether to multiply signs by the parameter's root mean square.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
    """
    parts = [scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)]
    if multiply_by_parameter_scale:
        parts.append(transformations.scale_by_param_block_rms())
    return base.chain(
        *parts,
        transformations.add_decayed_weights(
            weight_decay, per_param_scale=weight_decay_per_param_scale
        ),
        transformations.scale_by_schedule(
            transformations.scale_from_learning_rate(learning_rate)
        ),
    )


def adastar_optimizer(
    learning_rate: float,
    *,
    gradient_ema_decay: float | None,
    gradient_ema_debias: bool,
    gradient_square_ema_decay: float,
    gradient_square_ema_debias: bool,
    eps: float,
    eps_square: float,
    raw_update_clipping_threshold: float | None,
    update_ema_decay: float | None,
    update_ema_debias: bool,
    adam_update_transformation: base.TransformationLike | None = None,
    weight_decay: float = 0,
    weight_decay_per_param_scale: transformations.PerParamScale | None = None,
    update_schedule: Schedule,
    verbosity: int = 0,
) -> base.PartitionedGradientTransformation:
    """Creates an Adastar optimizer, which generalizes AdamW, and Adafactor without factoring.

    Per parameter, with optional moving averages:

        m = average(gradient)                       v = average(gradient² + eps_square)
        raw = m / (sqrt(v) + eps)                   clipped to a root mean square, per layer
        u = average(raw)                            then transformed by adam_update_transformation
        update = -update_schedule(step) * (learning_rate * u + weight_decay * parameter)

    With `gradient_ema_debias`, `gradient_square_ema_debias` and no `update_ema_decay` it is
    `adamw_decoupled_optimizer`; with `eps=0` and no `gradient_ema_decay` it is Adafactor without
    factoring, with epsilon `eps_square` and `b1` `update_ema_decay`.

    Args:
      learning_rate: factor of the update, but not of weight decay.
      gradient_ema_decay: decay of the average of gradients; None uses the gradients themselves.
      gradient_ema_debias: whether to correct that average for its initial zero; the other
        `*_debias` arguments do the same for their averages.
      gradient_square_ema_decay: decay of the average of squared gradients.
      eps: added to the root of the average of squares.
      eps_square: added to squared gradients.
      raw_update_clipping_threshold: maximum root mean square of a raw update, per layer of a stack;
        None disables clipping.
      update_ema_decay: decay of the average of updates; None uses the updates themselves.
      adam_update_transformation: transformation of updates before scaling, or a config of one.
      weight_decay: factor of the parameters.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
      update_schedule: scales the whole update, weight decay included.
      verbosity: 1 or more reports norms of updates per parameter.
    """
    raw_suffix = smoothed_suffix = None
    if verbosity >= 1:
        raw_suffix = "raw_update_norm"
        smoothed_suffix = "smoothed_update_norm"
    parts: list[base.TransformationLike] = [
        _scale_by_averages(
            (gradient_ema_decay, gradient_ema_debias),
            (gradient_square_ema_decay, gradient_square_ema_debias),
            (update_ema_decay, update_ema_debias),
            eps=eps,
            eps_square=eps_square,
            clip=clipping.clip_by_block_rms(
                raw_update_clipping_threshold, summary_suffix=raw_suffix
            ),
        ),
        clipping.clip_by_block_rms(None, summary_suffix=smoothed_suffix),
    ]
    if adam_update_transformation is not None:
        parts.append(adam_update_transformation)
    return base.chain(
        *parts,
        *transformations.decoupled_scale_and_decay(
            learning_rate,
            weight_decay,
            weight_decay_per_param_scale,
            update_schedule,
        ),
    )


class AdastarState(NamedTuple):
    """State of an Adastar optimizer: the number of steps and its averages, None where not used."""

    count: Any
    gradient_ema: Any
    gradient_square_ema: Any
    update_ema: Any


_Average = tuple[float | None, bool]  # decay, whether to debias


def _scale_by_averages(
    gradient_average: _Average,
    square_average: _Average,
    update_average: _Average,
    *,
    eps: float,
    eps_square: float,
    clip: base.PartitionedGradientTransformation,
) -> base.PartitionedGradientTransformation:
    def specs_of(params: PyTree) -> AdastarState:
        specs = jax.tree.map(
            lambda param: base.spec_like(param, jnp.float32), params
        )
        averages: list[PyTree] = []
        for decay, _ in (gradient_average, square_average, update_average):
            averages.append(None if decay is None else specs)
        return AdastarState(base.COUNT_SPEC, *averages)

    def update_fn(
        updates: NestedTensor, state: AdastarState, params: base.NestedOptParam
    ) -> tuple[NestedTensor, AdastarState]:
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(
            lambda g: jnp.square(g.astype(jnp.float32)) + eps_square, updates
        )
        gradient, gradient_ema = _averaged(
            updates, state.gradient_ema, gradient_average, count
        )
        square, square_ema = _averaged(
            squares, state.gradient_square_ema, square_average, count
        )
        raw = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps), gradient, square
        )
        raw, _ = clip.update(raw, optax.EmptyState(), params)
        smoothed, update_ema = _averaged(
            raw, state.update_ema, update_average, count
        )
        return smoothed, AdastarState(
            count, gradient_ema, square_ema, update_ema
        )

    return base.starting_at_zero(update_fn, specs_of)


def _averaged(
    x: NestedTensor,
    ema: NestedTensor | None,
    average: _Average,
    count: jax.typing.ArrayLike,
) -> tuple[NestedTensor, NestedTensor | None]:
    decay, debias = average
    if decay is None:
        return x, None
    ema = jax.tree.map(
        lambda new, average: (1 - decay) * new + decay * average, x, ema
    )
    correction = 1.0
    if debias:
        correction = 1 - decay**count
    return jax.tree.map(lambda average: average / correction, ema), ema


_SPACES = {
    "device": jax.memory.Space.Device,
    "pinned_host": jax.memory.Space.Host,
}


def offload_optimizer(
    optimizer: base.TransformationLike,
    *,
    pattern: str | re.Pattern = ".*",
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> base.PartitionedGradientTransformation:
    """Keeps the state of an optimizer in another memory between steps.

    XLA decides how much of the transfer overlaps with computation.

    Args:
      pattern: matches the whole path of the leaves to move, such as "0/mu/decoder/emb/weight".
      offload_src: memory in which the optimizer computes: "device" or "pinned_host".
      offload_dst: memory that holds the state between steps, as above.

    Raises OptimizerArgumentError if a memory is unknown.
    """
    inner = base.as_partitioned(optimizer)
    to_src = _move_to("offload_src", offload_src, pattern)
    to_dst = _move_to("offload_dst", offload_dst, pattern)

    def update_fn(
        updates: NestedTensor,
        state: optax.OptState,
        params: base.NestedOptParam,
        **extra_args: Any,
    ) -> tuple[NestedTensor, optax.OptState]:
        updates, state = base.update_with(
            inner, updates, to_src(state), params, extra_args
        )
        return updates, to_dst(state)

    def partition_fn(
        param_specs: NestedParameterSpec,
    ) -> base.NestedOptStateSpec:
        specs = inner.partition(param_specs)
        return base.copy_partition(
            specs, pattern=pattern, memory_kind=offload_dst
        )

    return base.PartitionedGradientTransformationExtraArgs(
        lambda params: to_dst(inner.init(params)), update_fn, partition_fn
    )


def _move_to(
    argument: str, memory_kind: str, pattern: str | re.Pattern
) -> Callable[[Any], Any]:
    if memory_kind not in _SPACES:
        raise OptimizerArgumentError(
            f"offload_optimizer knows the memories {sorted(_SPACES)}; got "
            f"{argument}={memory_kind!r}."
        )

    def move(path: tuple[Any, ...], x: Tensor) -> Tensor:
        if not re.fullmatch(pattern, base.path_name(path)):
            return x
        return jax.device_put(x, _SPACES[memory_kind])

    return lambda state: jax.tree_util.tree_map_with_path(move, state)
