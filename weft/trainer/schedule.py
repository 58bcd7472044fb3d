"""Schedules: scalars that depend on the training step, such as learning rates and decay rates.

A schedule is a number, a function from a step to a number, or a config of either; `as_schedule_fn`
converts all of them to functions, which are pure and take the step as a number or traced array.
Optimizers count steps from 1; only the averages `ema` and `param_ema` count from 0.

In a trainer's config, a schedule's `max_step` that is not set is the trainer's.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft import config, errors
from weft.typing import Tensor

ScheduleFn = Callable[
    [Any], Any
]  # from a step to a value, both numbers or scalar arrays
Schedule = float | Tensor | ScheduleFn | config.InstantiableConfig


def as_schedule_fn(s: Schedule | None) -> ScheduleFn:
    """Converts a number, function, config of either, or None (constant 1) to a function.

    Raises a ScheduleError for other values.

    >>> as_schedule_fn(0.1)(7)
    0.1
    """
    value: Any = config.maybe_instantiate(s)
    if value is None:
        value = 1.0
    if callable(value):
        return value
    is_number = isinstance(
        value, int | float | np.generic | np.ndarray | jax.Array
    )
    if not is_number or np.ndim(value) != 0:
        raise errors.ScheduleError(
            "a schedule is a number, a function from step to number, or a config of one; got "
            f"{value!r} of type {type(value).__name__}."
        )
    return lambda step: value


def polynomial(
    *,
    begin_step: int = 0,
    begin_value: float = 0,
    end_step: int = 1,
    end_value: float = 0,
    power: float = 1,
) -> ScheduleFn:
    """Interpolates from `begin_value` to `end_value` along a polynomial, constant before and after.

    Between, it is `begin_value + (end_value - begin_value) * t**power`; t grows from 0 to 1.

    Raises ScheduleError if `begin_step >= end_step`.

    >>> float(polynomial(begin_value=1, end_step=4, end_value=3)(2))
    2.0
    """
    fraction = _fraction_between("polynomial", begin_step, end_step)

    return lambda step: (
        begin_value + (end_value - begin_value) * fraction(step) ** power
    )


def exponential(
    *,
    begin_step: int = 0,
    begin_value: float = 0,
    end_step: int = 1,
    end_value: float = 0,
) -> ScheduleFn:
    """Interpolates from `begin_value` to `end_value` exponentially, constant before and after.

    Between the two steps the value changes by a constant factor per step.

    Raises ScheduleError if `begin_step >= end_step`, or if a value is not positive.

    >>> round(float(exponential(begin_value=1, end_step=4, end_value=0.01)(2)), 6)
    0.1
    """
    if begin_value <= 0 or end_value <= 0:
        raise errors.ScheduleError(
            "exponential multiplies by a constant factor per step, so both values must be "
            f"positive; got begin_value={begin_value} and end_value={end_value}."
        )
    fraction = _fraction_between("exponential", begin_step, end_step)
    log_begin, log_end = math.log(begin_value), math.log(end_value)

    return lambda step: jnp.exp(
        log_begin + (log_end - log_begin) * fraction(step)
    )


def _fraction_between(name: str, begin_step: int, end_step: int) -> ScheduleFn:
    if begin_step >= end_step:
        raise errors.ScheduleError(
            f"{name} moves between two different steps; got begin_step={begin_step}, which is not "
            f"below end_step={end_step}."
        )
    return lambda step: jnp.clip(
        (step - begin_step) / (end_step - begin_step), 0.0, 1.0
    )


def inverse_sqrt(step: Tensor, warmup_steps: int = 1) -> Tensor:
    """Computes `1 / sqrt(max(step, warmup_steps))`; itself a function of the step.

    >>> float(inverse_sqrt(16, warmup_steps=4))
    0.25
    """
    return jax.lax.rsqrt(jnp.maximum(step, warmup_steps).astype(jnp.float32))


def stepwise(sub: Sequence[Schedule], start_step: Sequence[int]) -> ScheduleFn:
    """Concatenates schedules; those after the first begin at `start_step` and count from 0.

    Raises ScheduleError if the lengths do not match or the starts are not in order.

    >>> [float(stepwise([1.0, 0.5, 0.25], [10, 20])(step)) for step in (9, 10, 20)]
    [1.0, 0.5, 0.25]
    """
    _check_boundaries("stepwise", "start_step", len(sub), start_step)
    if list(start_step) != sorted(start_step):
        raise errors.ScheduleError(
            f"stepwise needs start_step in order; got {list(start_step)}."
        )
    return optax.join_schedules(
        [as_schedule_fn(s) for s in sub], list(start_step)
    )


def segment_wise(
    segments: Sequence[Schedule], *, segment_steps: Sequence[int]
) -> ScheduleFn:
    """Concatenates schedules that count from 1, given the numbers of steps of all but the last.

    Unlike with `stepwise`, a schedule of n steps includes the last of them, `schedule(n)`. No
    schedule covers step 0, whose value is 0.

    Raises ScheduleError if the number of lengths does not match or one is negative.

    >>> warm = segment_wise([polynomial(end_step=4, end_value=1), 0.5], segment_steps=[4])
    >>> [float(warm(step)) for step in (0, 1, 2, 4, 5)]
    [0.0, 0.25, 0.5, 1.0, 0.5]
    """
    schedule_from_0 = _segments(segments, segment_steps)
    return lambda step: jnp.where(step > 0, schedule_from_0(step), 0)


def _segments(
    segments: Sequence[Schedule], segment_steps: Sequence[int]
) -> ScheduleFn:
    """Returns `segment_wise(...)` whose first schedule covers step 0, too, as warm-ups do."""
    _check_boundaries(
        "segment_wise", "segment_steps", len(segments), segment_steps
    )
    if any(steps < 0 for steps in segment_steps):
        raise errors.ScheduleError(
            f"segment_wise needs lengths of at least 0; got segment_steps={list(segment_steps)}."
        )
    first_schedule, *later_schedules = map(as_schedule_fn, segments)
    ends = list(itertools.accumulate(segment_steps))

    def fn(step):
        value = first_schedule(step)
        for end, schedule in zip(ends, later_schedules, strict=True):
            value = jnp.where(step <= end, value, schedule(step - end))
        return value

    return fn


def _check_boundaries(
    name: str, argument: str, num_schedules: int, boundaries: Sequence[int]
) -> None:
    if num_schedules != len(boundaries) + 1:
        raise errors.ScheduleError(
            f"{name} needs one entry of {argument} between each two schedules; got {num_schedules} "
            f"schedules and {len(boundaries)} entries, expected {max(num_schedules - 1, 0)}."
        )


def adafactor(
    scale: float = 1.0,
    *,
    warmup_steps: int = 10_000,
    decay_power: float = -0.5,
    step_offset: int = 0,
) -> ScheduleFn:
    """Returns a linear warm-up, then `scale * step**decay_power`; both meet at `warmup_steps`.

    `step_offset` is added to the step, for the steps of an earlier run.
    Source: [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235) (the default power).
    Raises ScheduleError if `warmup_steps < 1`.

    >>> [round(float(adafactor(warmup_steps=4)(step)), 6) for step in (0, 2, 4, 16)]
    [0.0, 0.25, 0.5, 0.25]
    """
    _check_positive("adafactor", warmup_steps)
    peak = scale * warmup_steps**decay_power

    def fn(step):
        step = step + step_offset
        decayed = (
            scale
            * jnp.maximum(step, warmup_steps).astype(jnp.float32) ** decay_power
        )
        return jnp.where(
            step < warmup_steps, peak * step / warmup_steps, decayed
        )

    return fn


def adafactor_decay_rate(c: float = 0.8, step_offset: int = 0) -> ScheduleFn:
    """Returns Adafactor's second-moment decay: `1 - t**-c` with `t = max(step - step_offset, 1)`.

    Source: [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235), section 7.2.

    >>> round(float(adafactor_decay_rate(c=1.0)(4)), 6)
    0.75
    """
    return lambda step: 1.0 - jnp.maximum(step - step_offset, 1.0) ** -c


def decay_bias_correction(decay: float) -> ScheduleFn:
    """Returns a decay that makes an exponential moving average unbiased without a final division.

    The value is `decay * (1 - decay**(t-1)) / (1 - decay**t)` at step t: 0 at step 1, `decay` in
    the limit. Source: [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235), section 7.1.

    >>> round(float(decay_bias_correction(0.5)(2)), 6)
    0.333333
    """

    def fn(step):
        t = jnp.maximum(step, 1.0)
        return decay * (1 - decay ** (t - 1)) / (1 - decay**t)

    return fn


def ema_schedule(
    decay: float = 0.9999, *, warmup_steps: int = 1, step_offset: int = 0
) -> ScheduleFn:
    """Returns a moving average's decay that yields the plain mean during the warm-up.

    With `t = max(step - step_offset, 0)` the value is `t / (t + 1)` while `t < warmup_steps`, then
    `decay`. Raises ScheduleError if `warmup_steps < 1`: an average starts at the first value.

    >>> [round(float(ema_schedule(0.9, warmup_steps=3)(step)), 4) for step in range(4)]
    [0.0, 0.5, 0.6667, 0.9]
    """
    _check_positive("ema_schedule", warmup_steps)

    def fn(step):
        t = jnp.maximum(step - step_offset, 0)
        return jnp.where(t < warmup_steps, t / (t + 1), decay)

    return fn


def _check_positive(name: str, warmup_steps: int) -> None:
    if warmup_steps < 1:
        raise errors.ScheduleError(
            f"{name} needs warmup_steps of at least 1; got {warmup_steps}."
        )


def check_learning_rate(name: str, value: object) -> None:
    """Raises ScheduleError for a number below 0, with which steps would increase the loss."""
    if isinstance(value, int | float) and value < 0:
        raise errors.ScheduleError(
            f"{name}={value:g} is negative: each step would increase the loss. Expected 0 or more."
        )


def constant_with_linear_warmup(
    peak_lr: float, *, warmup_steps: int = 500, begin_value: float = 0.0
) -> ScheduleFn:
    """Warms up linearly from `begin_value` to `peak_lr`, unless `warmup_steps=0`; then constant.

    >>> [float(constant_with_linear_warmup(1.0, warmup_steps=4)(step)) for step in (0, 1, 4, 100)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return _with_linear_warmup(
        [peak_lr], [], warmup_steps, begin_value, peak_lr
    )


def linear_schedule_with_warmup(
    peak_lr: float,
    *,
    max_step: int,
    warmup_steps: int | float,
    begin_value: float = 0.0,
    end_value: float = 0.0,
) -> ScheduleFn:
    """Warms up linearly to `peak_lr`, then decays linearly to `end_value` at `max_step`.

    The warm-up starts at `begin_value`; `warmup_steps=0` disables it, and a number below 1 is a
    share of `max_step`. Raises ScheduleError if `max_step` is not above `warmup_steps`.

    >>> schedule = linear_schedule_with_warmup(1.0, max_step=8, warmup_steps=4)
    >>> [float(schedule(step)) for step in (2, 4, 6, 8)]
    [0.5, 1.0, 0.5, 0.0]
    """
    warmup_steps = _whole_steps(warmup_steps, max_step)
    decay_steps = _steps_between(
        "linear_schedule_with_warmup", "warmup_steps", warmup_steps, max_step
    )
    decay = polynomial(
        begin_value=peak_lr, end_step=decay_steps, end_value=end_value
    )
    return _with_linear_warmup([decay], [], warmup_steps, begin_value, peak_lr)


def cosine_with_linear_warmup(
    peak_lr: float,
    *,
    max_step: int,
    warmup_steps: int | float = 500,
    begin_value: float = 0.0,
    alpha: float = 0.0,
    decay_begin_step: int | None = None,
) -> ScheduleFn:
    """Warms up linearly to `peak_lr`, then decays by a cosine to `alpha * peak_lr` at `max_step`.

    For the warm-up see `linear_schedule_with_warmup`. The value is `peak_lr` until
    `decay_begin_step`, by default, and if it is within the warm-up, the end of the warm-up. Raises
    ScheduleError if `max_step` is not above the step at which the cosine begins.
    Source of the decay: [Loshchilov and Hutter, 2017](https://arxiv.org/abs/1608.03983).

    >>> schedule = cosine_with_linear_warmup(1.0, max_step=8, warmup_steps=4, alpha=0.5)
    >>> [round(float(schedule(step)), 4) for step in (2, 4, 6, 8)]
    [0.5, 1.0, 0.75, 0.5]
    """
    warmup_steps = _whole_steps(warmup_steps, max_step)
    begin = max(warmup_steps, decay_begin_step or 0)
    decay_steps = _steps_between(
        "cosine_with_linear_warmup",
        "the beginning of the decay",
        begin,
        max_step,
    )
    decay = optax.cosine_decay_schedule(peak_lr, decay_steps, alpha)
    return _with_linear_warmup(
        [peak_lr, decay],
        [begin - warmup_steps],
        warmup_steps,
        begin_value,
        peak_lr,
    )


def warmup_stable_decay(
    peak_lr: float,
    *,
    max_step: int,
    decay_begin_step: int,
    warmup_steps: int | float = 500,
    begin_value: float = 0.0,
    alpha: float = 0.0,
) -> ScheduleFn:
    """Warms up linearly to `peak_lr`, keeps it, then decays linearly to `alpha * peak_lr`.

    For the warm-up see `linear_schedule_with_warmup`. The decay lasts from `decay_begin_step` to
    `max_step`. Raises ScheduleError if not `warmup_steps <= decay_begin_step < max_step`.
    Source: [Hägele et al., 2024](https://arxiv.org/abs/2405.18392) (a constant rate with a
    cooldown).

    >>> schedule = warmup_stable_decay(1.0, max_step=10, decay_begin_step=8, warmup_steps=4)
    >>> [float(schedule(step)) for step in (2, 4, 8, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup_steps = _whole_steps(warmup_steps, max_step)
    if decay_begin_step < warmup_steps:
        raise errors.ScheduleError(
            "warmup_stable_decay needs decay_begin_step at or after the warm-up; got "
            f"decay_begin_step={decay_begin_step} and warmup_steps={warmup_steps}."
        )
    decay_steps = _steps_between(
        "warmup_stable_decay", "decay_begin_step", decay_begin_step, max_step
    )
    decay = polynomial(
        begin_value=peak_lr, end_step=decay_steps, end_value=alpha * peak_lr
    )
    stable_steps = decay_begin_step - warmup_steps
    return _with_linear_warmup(
        [peak_lr, decay], [stable_steps], warmup_steps, begin_value, peak_lr
    )


def _whole_steps(warmup_steps: int | float, max_step: int) -> int:
    if 0 < warmup_steps < 1:  # a share
        return round(warmup_steps * max_step)
    return int(warmup_steps)


def _steps_between(
    name: str, begin_name: str, begin: int, max_step: int
) -> int:
    if max_step <= begin:
        raise errors.ScheduleError(
            f"{name} needs max_step above {begin_name} ({begin}); got max_step={max_step}"
        )
    return max_step - begin


def _with_linear_warmup(
    segments: list[Schedule],
    segment_steps: list[int],
    warmup_steps: int,
    begin_value: float,
    peak_lr: float,
) -> ScheduleFn:
    check_learning_rate("peak_lr", peak_lr)
    if warmup_steps == 0:
        return _segments(segments, segment_steps)
    warmup = polynomial(
        begin_value=begin_value, end_step=warmup_steps, end_value=peak_lr
    )
    return _segments([warmup, *segments], [warmup_steps, *segment_steps])
