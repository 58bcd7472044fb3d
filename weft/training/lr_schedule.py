"""Learning rates as functions of the step, with a linear warm-up; lengths are in epochs.

`optax` has more schedules. These are those of Flax's examples.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Step = int | jax.Array
Schedule = Callable[[Step], float | jax.Array]


def _with_warmup(schedule: Schedule, steps_per_epoch: int, warmup_length: float) -> Schedule:
    if warmup_length <= 0:
        return schedule
    return lambda step: schedule(step) * jnp.minimum(1.0, step / (steps_per_epoch * warmup_length))


def create_constant_learning_rate_schedule(
    base_learning_rate: float, steps_per_epoch: int, warmup_length: float = 0.0
) -> Schedule:
    """Returns a constant learning rate.

    >>> float(create_constant_learning_rate_schedule(1.0, 10, warmup_length=2.0)(5))
    0.25
    """
    return _with_warmup(lambda step: base_learning_rate, steps_per_epoch, warmup_length)


def create_stepped_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    lr_sched_steps: Sequence[Sequence[float]],
    warmup_length: float = 0.0,
) -> Schedule:
    """Returns a learning rate that changes after the first step of some epochs.

    Args:
        lr_sched_steps: pairs of an epoch, ascending, and the factor of the base rate from then on.

    >>> schedule = create_stepped_learning_rate_schedule(1.0, 10, [(3, 0.5), (5, 0.25)])
    >>> [float(schedule(step)) for step in (30, 31, 51)]
    [1.0, 0.5, 0.25]
    """
    starts = jnp.array([epoch * steps_per_epoch for epoch, _ in lr_sched_steps])
    rates = jnp.array([1.0, *(factor for _, factor in lr_sched_steps)]) * base_learning_rate
    return _with_warmup(lambda step: rates[jnp.sum(step > starts)], steps_per_epoch, warmup_length)


def create_cosine_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    halfcos_epochs: float,
    warmup_length: float = 0.0,
) -> Schedule:
    """Returns a learning rate that falls to 0 within `halfcos_epochs`, as half a cosine.

    >>> schedule = create_cosine_learning_rate_schedule(1.0, 10, halfcos_epochs=4)
    >>> [round(float(schedule(step)), 3) for step in (0, 20, 40)]
    [1.0, 0.5, 0.0]
    """

    def schedule(step: Step) -> jax.Array:
        return (
            base_learning_rate * (1 + jnp.cos(jnp.pi * step / steps_per_epoch / halfcos_epochs)) / 2
        )

    return _with_warmup(schedule, steps_per_epoch, warmup_length)
