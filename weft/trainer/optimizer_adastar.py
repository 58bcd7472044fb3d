"""Adastar: a generalization of AdamW and of Adafactor without factored moments.

Per parameter, with optional moving averages:

    m = average(gradient)                       v = average(gradient² + eps_square)
    raw = m / (sqrt(v) + eps)                   clipped to a root mean square, per layer
    u = average(raw)                            then transformed by adam_update_transformation
    update = -update_schedule(step) * (learning_rate * u + weight_decay * parameter)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft.trainer.optimizer_base import (
    NestedOptParam,
    PartitionedGradientTransformation,
    chain,
    mirrored_partition,
)
from weft.trainer.optimizer_clipping import clip_by_block_rms
from weft.trainer.optimizer_scaling import PerParamScale, decoupled_scale_and_decay
from weft.trainer.schedule import Schedule
from weft.typing import NestedTensor


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
    adam_update_transformation: Any = None,
    weight_decay: float = 0,
    weight_decay_per_param_scale: PerParamScale | None = None,
    update_schedule: Schedule,
    verbosity: int = 0,
) -> PartitionedGradientTransformation:
    """Creates an Adastar optimizer, as described in this module's docstring.

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

    def norms(name: str) -> str | None:
        return name if verbosity >= 1 else None

    transformations = [
        _scale_by_averages(
            (gradient_ema_decay, gradient_ema_debias),
            (gradient_square_ema_decay, gradient_square_ema_debias),
            (update_ema_decay, update_ema_debias),
            eps=eps,
            eps_square=eps_square,
            clip=clip_by_block_rms(
                raw_update_clipping_threshold, summary_suffix=norms("raw_update_norm")
            ),
        ),
        clip_by_block_rms(None, summary_suffix=norms("smoothed_update_norm")),
    ]
    if adam_update_transformation is not None:
        transformations.append(adam_update_transformation)
    return chain(
        *transformations,
        *decoupled_scale_and_decay(
            learning_rate, weight_decay, weight_decay_per_param_scale, update_schedule
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
    clip: PartitionedGradientTransformation,
) -> PartitionedGradientTransformation:
    def init_fn(params: NestedOptParam) -> AdastarState:
        def zeros(average: _Average) -> Any:
            if average[0] is None:
                return None
            return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

        averages = map(zeros, (gradient_average, square_average, update_average))
        return AdastarState(jnp.zeros((), jnp.int32), *averages)

    def update_fn(
        updates: NestedTensor, state: AdastarState, params: NestedOptParam
    ) -> tuple[NestedTensor, AdastarState]:
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)) + eps_square, updates)
        gradient, gradient_ema = _averaged(updates, state.gradient_ema, gradient_average, count)
        square, square_ema = _averaged(squares, state.gradient_square_ema, square_average, count)
        raw = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), gradient, square)
        raw, _ = clip.update(raw, optax.EmptyState(), params)
        smoothed, update_ema = _averaged(raw, state.update_ema, update_average, count)
        return smoothed, AdastarState(count, gradient_ema, square_ema, update_ema)

    return PartitionedGradientTransformation(init_fn, update_fn, mirrored_partition(init_fn))


def _averaged(x: NestedTensor, ema: Any, average: _Average, count: Any) -> tuple[Any, Any]:
    """Returns the average to use and the one to keep."""
    decay, debias = average
    if decay is None:
        return x, None
    ema = jax.tree.map(lambda new, kept: (1 - decay) * new + decay * kept, x, ema)
    correction = 1 - decay**count if debias else 1.0
    return jax.tree.map(lambda kept: kept / correction, ema), ema
