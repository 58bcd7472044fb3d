"""An optimizer of which AdamW and Adafactor without factors are special cases.

Per parameter, with moving averages that may be left out:

    m = average(gradient)                       v = average(gradient² + eps_square)
    raw = m / (sqrt(v) + eps)                   clipped to a root mean square, per layer
    u = average(raw)                            then transformed as one likes
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
    """The optimizer that this module describes.

    With `gradient_ema_debias`, `gradient_square_ema_debias` and no `update_ema_decay` it is
    `adamw_decoupled_optimizer`; with `eps=0` and no `gradient_ema_decay` it is Adafactor without
    factors, whose epsilon is `eps_square` and whose `b1` is `update_ema_decay`.

    Args:
      learning_rate: a factor of the update, but not of weight decay.
      gradient_ema_decay: decay of the average of gradients; None for the gradients themselves.
      gradient_ema_debias: whether that average is corrected for beginning at zero.
      gradient_square_ema_decay: decay of the average of squared gradients.
      gradient_square_ema_debias: whether that average is corrected.
      eps: added to the root of the average of squares.
      eps_square: added to squared gradients.
      raw_update_clipping_threshold: the largest root mean square of a raw update, for each layer of
        a stack; None not to clip.
      update_ema_decay: decay of the average of updates; None for the updates themselves.
      update_ema_debias: whether that average is corrected.
      adam_update_transformation: a transformation of updates before they are scaled, or a config.
      weight_decay: a factor of the parameters.
      weight_decay_per_param_scale: as for `add_decayed_weights`.
      update_schedule: scales the whole update, weight decay included.
      verbosity: with 1 or more, norms of updates are reported for each parameter.
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
    """The averages that an Adastar optimizer keeps.

    Attributes:
      count: the number of steps done.
      gradient_ema: of gradients; None if there is no such average, as for `update_ema`.
      gradient_square_ema: of squared gradients.
      update_ema: of updates.
    """

    count: Any
    gradient_ema: Any
    gradient_square_ema: Any
    update_ema: Any


_Average = tuple[float | None, bool]  # decay, whether to correct for the beginning at zero


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
    """The average to use, and the one to keep."""
    decay, debias = average
    if decay is None:
        return x, None
    ema = jax.tree.map(lambda new, kept: (1 - decay) * new + decay * kept, x, ema)
    correction = 1 - decay**count if debias else 1.0
    return jax.tree.map(lambda kept: kept / correction, ema), ema
