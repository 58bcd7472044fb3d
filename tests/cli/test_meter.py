"""Readings of a run: late, without blocking, and with the right arithmetic."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from weft.cli.meter import Meter, scalar
from weft.hierarchy.metrics import WeightedScalar


class Clock:
    """Advances a second at each look."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Loss:
    """Notes when it is read."""

    def __init__(self, step, read):
        self._step, self._read = step, read

    def __float__(self):
        self._read.append(self._step)
        return float(self._step)


BATCH = {"input_ids": np.zeros((4, 25))}


def test_a_loss_is_read_two_steps_late():
    read, meter = [], Meter(10, Clock())
    readings = [meter.on_step(s, {"loss": Loss(s, read)}, BATCH) for s in (1, 2, 3, 4)]
    assert read == [1, 2]
    assert [r and r.step for r in readings] == [None, None, 1, 2]
    assert meter.last().step == 4 and read == [1, 2, 3, 4]
    assert meter.last() is None


def run(meter, steps, batch=BATCH, **outputs):
    """The last reading, and the speed and time left of the one before the steps read at the end."""
    before = None
    for step in steps:
        before = meter.on_step(step, {"loss": 1.0, **outputs}, batch) or before
    last = meter.last()
    return last._replace(seconds_left=before.seconds_left) if before else last


def test_speed_and_time_left_follow_from_the_clock():
    meter = Meter(100, Clock())
    readings = [meter.on_step(step, {"loss": 1.0}, BATCH) for step in range(1, 13)]
    assert readings[-1].step == 10
    assert readings[-1].tokens_per_second == pytest.approx(100.0)  # 4 × 25 tokens, a step a second
    assert readings[-1].seconds_left == pytest.approx(90.0)
    assert readings[2].tokens_per_second is None and readings[2].seconds_left is None  # too early


def test_the_last_steps_keep_the_speed_since_they_are_read_all_at_once():
    clock = Clock()
    meter = Meter(100, clock)
    for step in range(1, 11):
        meter.on_step(step, {"loss": 1.0}, BATCH)
    meter.pause()
    now = clock.now
    assert meter.last().tokens_per_second == pytest.approx(100.0) and clock.now == now


def test_a_pause_does_not_count_as_slow_steps():
    clock = Clock()
    meter = Meter(100, clock)
    run(meter, range(1, 6))
    clock.now += 1000
    meter.pause()
    assert run(meter, range(6, 16)).tokens_per_second == pytest.approx(100.0)


def test_a_run_without_end_or_tokens_has_no_time_left_or_speed():
    reading = run(Meter(math.inf, Clock()), range(1, 5), batch={"image": np.zeros((4, 8, 8))})
    assert reading.seconds_left is None and reading.tokens_per_second is None


def test_without_tokens_the_examples_are_counted():
    reading = run(Meter(100, Clock()), range(1, 13), batch={"image": np.zeros((4, 8, 8))})
    assert reading.tokens_per_second is None
    assert reading.examples_per_second == pytest.approx(4.0)


def test_bits_per_byte_come_from_the_summaries():
    summaries = {"decoder": {"bits_per_byte": WeightedScalar(jnp.float32(2.5), jnp.float32(9.0))}}
    assert run(Meter(9, Clock()), [1], summaries=summaries).bits_per_byte == 2.5
    assert run(Meter(9, Clock()), [1], summaries={}).bits_per_byte is None


def test_a_summary_is_found_where_it_lies_least_deep():
    assert scalar({"a": {"b": {"x": 1}}, "c": {"x": 2}}, "x") == 2
    assert scalar({"a": {"b": 1}}, "x") is None
