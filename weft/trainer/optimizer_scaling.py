"""Transformations that scale updates by a number, a schedule or a per-parameter scale, and decay.

A per-parameter scale is a function from the tree of parameters to a tree of factors.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft.config import maybe_instantiate
from weft.trainer.optimizer_base import (
    COUNT_SPEC,
    NestedOptParam,
    OptParam,
    PartitionedGradientTransformation,
    identity,
    opt_param_values,
    report,
    stateless,
    tree_paths,
)
from weft.trainer.schedule import Schedule, ScheduleFn, as_schedule_fn
from weft.typing import Nested, NestedTensor, Tensor
from weft.vdict import map_blocks

PerParamScale = Callable[[NestedOptParam], Nested[Any]]

logger = logging.getLogger(__name__)


def scale(step_size: float) -> PartitionedGradientTransformation:
    """Multiplies updates by a number."""
    return stateless(lambda updates, params: jax.tree.map(lambda u: u * step_size, updates))


def scale_by_schedule(
    step_size_fn: Schedule, *, name: str | None = None
) -> PartitionedGradientTransformation:
    """Multiplies updates by a schedule's value at the number of steps done.

    Reports "schedule_step" and "schedule_scale", with the prefix `name` to distinguish two
    schedules.
    """
    schedule_fn = as_schedule_fn(step_size_fn)
    prefix = "" if name is None else f"{name}/"

    def update_fn(
        updates: NestedTensor, state: optax.ScaleByScheduleState, params: NestedOptParam
    ) -> tuple[NestedTensor, optax.ScaleByScheduleState]:
        step_size = schedule_fn(state.count)
        report(f"{prefix}schedule_step", state.count)
        report(f"{prefix}schedule_scale", step_size)
        updates = jax.tree.map(lambda u: u * step_size, updates)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return PartitionedGradientTransformation(
        init=lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)),
        update=update_fn,
        partition=lambda param_specs: optax.ScaleByScheduleState(COUNT_SPEC),
    )


def scale_from_learning_rate(learning_rate: Schedule, *, flip_sign: bool = True) -> ScheduleFn:
    """Adapts a learning rate for `scale_by_schedule`; reports its value and "lr_schedule_step".

    The returned schedule is negated for gradient descent unless `flip_sign` is False.
    """
    learning_rate_fn = as_schedule_fn(learning_rate)

    def fn(step: Tensor) -> Tensor:
        value = learning_rate_fn(step)
        report("lr_schedule_step", step)
        report("learning_rate", value)
        return -value if flip_sign else value

    return fn


def per_param_scale_by_path(
    *,
    scale_by_path: Sequence[tuple[str, float]],
    description: str,
    default_scale: float = 1.0,
) -> PerParamScale:
    """Returns scales by regular expressions on parameters' paths.

    Args:
      scale_by_path: pairs of a pattern, which must match the whole path, such as
        "decoder/emb/weight", and a scale; the first match counts.
      description: purpose of the scale, logged with the parameters whose scale differs.
      default_scale: scale without a match.

    >>> no_bias_decay = per_param_scale_by_path(
    ...     scale_by_path=[(".*/bias", 0.0)], description="weight decay"
    ... )
    >>> no_bias_decay({"linear": {"weight": 1.0, "bias": 2.0}})
    {'linear': {'bias': 0.0, 'weight': 1.0}}
    """

    def scale_of(path: str) -> float:
        for pattern, scale in scale_by_path:
            if re.fullmatch(pattern, path):
                logger.info("%s of %s: %s", description, path, scale)
                return scale
        return default_scale

    return lambda params: jax.tree.map(scale_of, tree_paths(params))


def per_param_scale_by_rms(*, min_scale: float = 1e-4) -> PerParamScale:
    """Returns scales by the root mean square of each parameter, at least `min_scale`."""

    def scale_of(param: OptParam) -> Tensor:
        return optax.safe_root_mean_squares(param.value, min_scale)

    return lambda params: jax.tree.map(scale_of, params)


def scale_update_per_param(per_param_scale: PerParamScale) -> PartitionedGradientTransformation:
    """Multiplies each update by the scale of its parameter; accepts the function or its config."""
    scale_fn = maybe_instantiate(per_param_scale)
    return stateless(
        lambda updates, params: jax.tree.map(lambda u, s: u * s, updates, scale_fn(params))
    )


def scale_by_param_block_rms(min_scale: float = 1e-3) -> PartitionedGradientTransformation:
    """Multiplies each update by its parameter's root mean square, per layer of a stack.

    The factor is at least `min_scale`, which lets parameters that are zero change.
    """

    def scaled(update: Tensor, value: Tensor) -> Tensor:
        return update * optax.safe_root_mean_squares(value, min_scale)

    return stateless(lambda updates, params: map_blocks(scaled, updates, opt_param_values(params)))


def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> PartitionedGradientTransformation:
    """Multiplies each update by the ratio of its parameter's norm to its own, per layer of a stack.

    Source: You et al., https://arxiv.org/abs/1904.00962; see `optax.scale_by_trust_ratio`.

    Args:
      min_norm: lower bound of both norms.
      trust_coefficient: factor of the ratio.
      eps: added to the norm of the update.
    """
    base = optax.scale_by_trust_ratio(min_norm, trust_coefficient, eps)

    def scaled(update: Tensor, value: Tensor) -> Any:
        return base.update(update, optax.EmptyState(), value)[0]

    return stateless(lambda updates, params: map_blocks(scaled, updates, opt_param_values(params)))


# Decay.


class AddDecayedWeightsState(NamedTuple):
    """State of `add_decayed_weights`: the number of steps done, or None without a schedule."""

    count: Any


def decay_scales(params: NestedOptParam, per_param_scale: PerParamScale | None) -> Nested[Any]:
    """Returns the decay factors of the layers, else of `per_param_scale`, else 1."""
    if per_param_scale is None:
        return jax.tree.map(_layer_scale, params)
    return jax.tree.map(_layer_scale, params, per_param_scale(params))


def _layer_scale(param: OptParam, otherwise: Any = 1.0) -> Any:
    return otherwise if param.weight_decay_scale is None else param.weight_decay_scale


def add_decayed_weights(
    weight_decay: float,
    *,
    learning_rate_exponent: float | None = None,
    learning_rate: Schedule | None = None,
    per_param_scale: PerParamScale | None = None,
) -> PartitionedGradientTransformation:
    """Adds to each update its parameter times the weight decay.

    Args:
      learning_rate_exponent: if given, multiplies the decay by this power of the learning rate.
      learning_rate: schedule of the learning rate.
      per_param_scale: function, or a config of one, that returns factors for parameters whose layer
        sets no `weight_decay_scale`.
    """
    scale_fn = maybe_instantiate(per_param_scale)
    learning_rate_fn = as_schedule_fn(learning_rate)
    counts = learning_rate_exponent is not None

    def update_fn(
        updates: NestedTensor, state: AddDecayedWeightsState, params: NestedOptParam
    ) -> tuple[NestedTensor, AddDecayedWeightsState]:
        rate = weight_decay
        if learning_rate_exponent is not None:
            rate = rate * learning_rate_fn(state.count) ** learning_rate_exponent
            state = AddDecayedWeightsState(optax.safe_increment(state.count))
        return _with_decay(updates, params, rate, scale_fn), state

    return PartitionedGradientTransformation(
        init=lambda params: AddDecayedWeightsState(jnp.zeros((), jnp.int32) if counts else None),
        update=update_fn,
        partition=lambda param_specs: AddDecayedWeightsState(COUNT_SPEC if counts else None),
    )


def l2_regularizer(
    regularizer_weight: float | None = 0.0, per_param_scale: PerParamScale | None = None
) -> PartitionedGradientTransformation:
    """Adds to each gradient that of an L2 penalty, `regularizer_weight` times the parameter.

    `regularizer_weight` is the weight of half the squared norm, with 0 or None for no penalty, and
    `per_param_scale` is as for `add_decayed_weights`.
    """
    if not regularizer_weight:
        return identity()
    scale_fn = maybe_instantiate(per_param_scale)
    return stateless(
        lambda updates, params: _with_decay(updates, params, regularizer_weight, scale_fn)
    )


def _with_decay(
    updates: NestedTensor, params: NestedOptParam, rate: Any, scale_fn: PerParamScale | None
) -> NestedTensor:
    if isinstance(rate, int | float) and rate == 0:
        return updates
    return jax.tree.map(
        lambda update, param, scale: update + rate * scale * param.value,
        updates,
        params,
        decay_scales(params, scale_fn),
    )


def decoupled_scale_and_decay(
    learning_rate: Schedule,
    weight_decay: float,
    weight_decay_per_param_scale: PerParamScale | None,
    update_schedule: Schedule,
) -> tuple[PartitionedGradientTransformation, ...]:
    """Returns parts of `-update_schedule * (learning_rate * update + weight_decay * parameter)`.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, where weight decay does not
    depend on the learning rate, but both depend on the schedule.
    """
    return (
        scale_by_schedule(
            scale_from_learning_rate(learning_rate, flip_sign=False), name="learning_rate"
        ),
        add_decayed_weights(weight_decay, per_param_scale=weight_decay_per_param_scale),
        scale_by_schedule(update_schedule),
        scale(-1.0),
    )
