import math

import jax.numpy as jnp

from weft.training.early_stopping import EarlyStopping


def after(stopping, *metrics):
    for metric in metrics:
        stopping = stopping.update(metric)
    return stopping


def test_stops_when_patience_is_over():
    stopping = EarlyStopping(min_delta=0.1, patience=2)
    assert not after(stopping, 1.0, 0.95, 0.94).should_stop
    stopped = after(stopping, 1.0, 0.95, 0.94, 0.93)
    assert stopped.should_stop and stopped.best_metric == 1.0
    assert after(stopped, 0.1) == stopped.replace(
        best_metric=0.1, patience_count=0, has_improved=True
    )


def test_no_patience_stops_at_once():
    assert after(EarlyStopping(), 1.0, 1.0).should_stop
    assert not after(EarlyStopping(), 1.0, 0.5).should_stop


def test_reset_keeps_what_it_was_made_with():
    stopping = EarlyStopping(min_delta=0.1, patience=2)
    assert after(stopping, 1.0, 2.0, 3.0, 4.0).reset() == stopping


def test_not_a_number_is_no_improvement():
    stopping = after(EarlyStopping(patience=5), math.nan, 1.0)
    assert stopping.has_improved and stopping.best_metric == 1.0
    assert not stopping.update(math.nan).has_improved


def test_a_metric_may_be_an_array():
    assert after(EarlyStopping(), jnp.array(1.0), jnp.array(0.5)).has_improved
