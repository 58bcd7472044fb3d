import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import config_for_function
from weft.errors import ScheduleError
from weft.trainer import schedule

STEPS_160 = np.arange(160)  # of one size, so that each operation is compiled once
STEPS = [0, 1, 2, 3, 4, 5, 8, 10, 15, 20, 25, 100]

# Values of AXLearn 0.0.1.post20240213 at STEPS, found by calling it.
GOLDEN = {
    "cosine": (
        lambda: schedule.cosine_with_linear_warmup(
            1.0, max_step=20, warmup_steps=5, begin_value=0.1, alpha=0.1, decay_begin_step=10
        ),
        [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1, 0.1],
    ),
    "cosine_at_once": (
        lambda: schedule.cosine_with_linear_warmup(1.0, max_step=20, warmup_steps=5),
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.904508471, 0.75, 0.25, 0.0, 0.0, 0.0],
    ),
    "linear": (
        lambda: schedule.linear_schedule_with_warmup(
            1.0, max_step=20, warmup_steps=5, begin_value=0.1, end_value=0.2
        ),
        [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 0.84, 0.733333349, 0.466666639, 0.2, 0.2, 0.2],
    ),
    "constant": (
        lambda: schedule.constant_with_linear_warmup(1.0, warmup_steps=5, begin_value=0.1),
        [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    ),
    "polynomial": (
        lambda: schedule.polynomial(
            begin_step=2, begin_value=0.1, end_step=10, end_value=0.9, power=2
        ),
        [0.1, 0.1, 0.1, 0.1125, 0.15, 0.2125, 0.55, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    "exponential": (
        lambda: schedule.exponential(begin_step=2, begin_value=1, end_step=10, end_value=0.01),
        [1.0, 1.0, 1.0, 0.562341332, 0.316227764, 0.177827939, 0.0316227749] + [0.01] * 5,
    ),
    "adafactor": (
        lambda: schedule.adafactor(1.0, warmup_steps=5, decay_power=-1, step_offset=3),
        [0.12, 0.16, 0.2, 1 / 6, 1 / 7, 1 / 8, 1 / 11, 1 / 13, 1 / 18, 1 / 23, 1 / 28, 1 / 103],
    ),
    "adafactor_decay_rate": (
        # There counted from 0.
        lambda: lambda step: schedule.adafactor_decay_rate(0.5, step_offset=2)(step + 1),
        [
            0.0,
            0.0,
            0.0,
            0.292893231,
            0.422649741,
            0.5,
            0.622035503,
            0.666666627,
            0.732738733,
            0.770584285,
            0.795875847,
            0.899496198,
        ],
    ),
    "decay_bias_correction": (
        lambda: lambda step: schedule.decay_bias_correction(0.9)(step + 1),
        [
            0.0,
            0.473684162,
            0.630996287,
            0.709217846,
            0.75580579,
            0.786579669,
            0.836755872,
            0.854267538,
            0.877255201,
            0.88771373,
            0.893092632,
            0.899997592,
        ],
    ),
    "ema_schedule": (
        lambda: schedule.ema_schedule(0.99, warmup_steps=5),
        [0.0, 0.5, 2 / 3, 0.75, 0.8, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99],
    ),
    "inverse_sqrt": (
        lambda: lambda step: schedule.inverse_sqrt(step, warmup_steps=5),
        [1 / math.sqrt(max(step, 5)) for step in STEPS],
    ),
    "stepwise": (
        lambda: schedule.stepwise(
            [0.1, schedule.polynomial(end_step=4, end_value=1), 0.5], [3, 10]
        ),
        [0.1, 0.1, 0.1, 0.0, 0.25, 0.5, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_match_golden_values(name):
    make, expected = GOLDEN[name]
    actual = [float(make()(jnp.asarray(step))) for step in STEPS]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_numbers_functions_and_configs_are_valid():
    cfg = config_for_function(schedule.polynomial).set(end_step=4, end_value=2.0)
    assert schedule.as_schedule_fn(0.3)(5) == 0.3
    assert schedule.as_schedule_fn(jnp.float32(0.5))(5) == 0.5
    assert schedule.as_schedule_fn(lambda step: step * 2)(5) == 10
    assert schedule.as_schedule_fn(cfg)(2) == 1.0
    assert schedule.as_schedule_fn(optax.constant_schedule(0.1))(2) == 0.1
    assert schedule.as_schedule_fn(None)(7) == 1.0


@pytest.mark.parametrize("bad", ["0.1", [0.1], jnp.ones(2)])
def test_non_schedule_is_rejected(bad):
    with pytest.raises(ScheduleError, match="a schedule is a number, a function from step"):
        schedule.as_schedule_fn(bad)


@given(
    warmup=st.integers(0, 50),
    stable=st.integers(0, 50),
    decay=st.integers(1, 50),
    peak=st.floats(1e-5, 10),
    alpha=st.floats(0, 1),
)
@settings(deadline=None, max_examples=25)
def test_properties_of_warmup_schedules(warmup, stable, decay, peak, alpha):
    begin, end = warmup + stable, warmup + stable + decay
    kwargs = {"max_step": end, "warmup_steps": warmup, "alpha": alpha, "decay_begin_step": begin}
    for make in (schedule.cosine_with_linear_warmup, schedule.warmup_stable_decay):
        values = np.asarray(jax.vmap(make(peak, **kwargs))(STEPS_160))
        # The peak is reached where the warm-up ends, and kept until the decay begins.
        np.testing.assert_allclose(values[warmup : begin + 1], peak, rtol=1e-5)
        assert np.all(np.diff(values[: warmup + 1]) >= 0)
        assert np.all(np.diff(values[begin:]) <= peak * 1e-6)
        np.testing.assert_allclose(values[end:], alpha * peak, rtol=1e-4, atol=peak * 1e-6)
        # No jump: no step is longer than the steepest of its parts.
        longest = peak * max(1 / max(warmup, 1), np.pi / 2 / decay)
        assert np.max(np.abs(np.diff(values))) <= longest * 1.001


def test_segments_are_set_by_lengths():
    ramp = schedule.polynomial(end_step=2, end_value=1.0)
    by_length = schedule.segment_wise([ramp, 0.25, ramp], segment_steps=[3, 4])
    values = [float(by_length(step)) for step in range(1, 11)]
    assert values == [0.5, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25, 0.5, 1.0, 1.0]


def test_ema_schedule_step_offset():
    late = schedule.ema_schedule(0.9, warmup_steps=3, step_offset=10)
    assert [round(float(late(step)), 4) for step in (0, 10, 11, 12, 13)] == [0, 0, 0.5, 0.6667, 0.9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedule.polynomial(begin_step=5, end_step=5),
            "begin_step=5, which is not below end_step=5",
        ),
        (
            lambda: schedule.exponential(begin_value=0.0, end_value=0.1),
            "both values must be positive; got begin_value=0.0 and end_value=0.1",
        ),
        (
            lambda: schedule.exponential(begin_value=0.1),
            "both values must be positive; got begin_value=0.1 and end_value=0.",
        ),
        (
            lambda: schedule.stepwise([1.0, 2.0], [1, 2]),
            "stepwise needs one entry of start_step between each two schedules; got 2 schedules "
            "and 2 entries, expected 1",
        ),
        (lambda: schedule.stepwise([1.0, 2.0, 3.0], [5, 2]), r"start_step in order; got \[5, 2\]"),
        (
            lambda: schedule.segment_wise([1.0], segment_steps=[4]),
            "segment_wise needs one entry of segment_steps .* 1 schedules and 1 entries",
        ),
        (
            lambda: schedule.segment_wise([1.0, 2.0], segment_steps=[-4]),
            r"lengths of at least 0; got segment_steps=\[-4\]",
        ),
        (lambda: schedule.adafactor(warmup_steps=0), "adafactor needs warmup_steps of at least 1"),
        (lambda: schedule.ema_schedule(warmup_steps=0), "ema_schedule needs warmup_steps"),
        (
            lambda: schedule.linear_schedule_with_warmup(1.0, max_step=5, warmup_steps=5),
            r"needs max_step above warmup_steps \(5\); got max_step=5",
        ),
        (
            lambda: schedule.cosine_with_linear_warmup(1.0, max_step=10, decay_begin_step=12),
            r"needs max_step above the beginning of the decay \(500\); got max_step=10",
        ),
        (
            lambda: schedule.warmup_stable_decay(
                1.0, max_step=9, decay_begin_step=2, warmup_steps=5
            ),
            "got decay_begin_step=2 and warmup_steps=5",
        ),
    ],
)
def test_inconsistent_arguments_are_rejected(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        schedule.linear_schedule_with_warmup,
        schedule.cosine_with_linear_warmup,
        functools.partial(schedule.warmup_stable_decay, decay_begin_step=30),
    ],
)
def test_warmup_may_be_a_share(make):
    steps = np.arange(1, 41)
    share = make(1.0, max_step=40, warmup_steps=0.1)
    np.testing.assert_array_equal(share(steps), make(1.0, max_step=40, warmup_steps=4)(steps))


def test_no_segment_covers_step_0():
    constant = schedule.segment_wise([0.1, 0.2], segment_steps=[2])
    np.testing.assert_allclose([constant(step) for step in range(4)], [0, 0.1, 0.1, 0.2])
    warmed_up = schedule.constant_with_linear_warmup(0.1, warmup_steps=0)
    np.testing.assert_allclose([warmed_up(step) for step in (0, 1)], 0.1)
